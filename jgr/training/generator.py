# SPDX-License-Identifier: Apache-2.0
"""Train a generator of semantic ids on a dataset, and write a model folder that `jgr serve` takes as it is.

Next-item language modelling: a decoder learns to continue a history of semantic ids. It is trained on the prompt that
the server would build for a window of items. Every code of every item after the first is predicted from the tokens
before it, so one window trains on all of its items; at serving time the next item simply follows.

Letters: B batch, N items in a window, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import Config, ConfigError, TrainConfig
from jgr.data.datasets import Dataset
from jgr.models import checkpoint, decoder
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.generators import GeneratorConfig, GeneratorParams, generator
from jgr.prompt.tokens import PromptBuilder, level_tokens, semantic_id_tokenizer
from jgr.training import lazy
from jgr.training.run import Progress, train_to_best
from jgr.training.softmax import softmax_nats
from jgr.training.start import begin_from
from jgr.training.trainer import Begin, Loss, as_drawn, dropout
from jgr.training.windows import Windows

Int32 = npt.NDArray[np.int32]


def decoder_config(train: TrainConfig, vocab_size: int, max_position: int) -> DecoderConfig:
    """The small Qwen3-style decoder that a TrainConfig describes, with tied embeddings."""
    return DecoderConfig(
        family="qwen3",
        vocab_size=vocab_size,
        hidden=train.hidden,
        layers=train.layers,
        heads=train.heads,
        kv_heads=train.kv_heads,
        head_dim=train.head_dim,
        mlp=train.mlp,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied=True,
        max_position=max_position,
    )


def next_item_loss(
    model: DecoderConfig,
    prefix: npt.ArrayLike,
    item_tokens: npt.ArrayLike,
    dropout_rate: float,
    devices: int = 1,
    smoothing: float = 0.0,
) -> Loss:
    """The loss of a decoder over windows of items.

    prefix: [p] int32, the prompt's tokens before the history. item_tokens: [n items, depth] int32, the tokens of every
    row's semantic id. The prefix and a window's first item are context only. devices: how many share a batch.
    smoothing: the share of a target that is spread evenly over its level's tokens (Szegedy et al. 2016).
    """
    before, of_item = jnp.asarray(prefix, jnp.int32), jnp.asarray(item_tokens, jnp.int32)
    depth = of_item.shape[1]
    of_level = [np.unique(column) for column in np.asarray(item_tokens).T]
    first_target = before.shape[0] + depth

    def loss(weights: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = rows.shape[0]
        items = jnp.where(rows[..., None] >= 0, of_item[jnp.maximum(rows, 0)], 0)
        start = jnp.broadcast_to(before, (batch, before.shape[0]))
        tokens = jnp.concatenate([start, items.reshape(batch, -1)], axis=1)
        lengths = before.shape[0] + depth * (rows >= 0).sum(axis=1)
        drop = None if dropout_rate == 0 else lambda x, k: dropout(x, k, dropout_rate)
        hidden = decoder.prefill(
            weights,
            model,
            tokens,
            lengths,
            dropout=drop,
            key=None if drop is None else key,
            attention="xla",  # the implementation that has gradients
        ).hidden
        hidden, targets = hidden[:, first_target - 1 : -1], tokens[:, first_target:]
        real = jnp.arange(first_target, tokens.shape[1]) < lengths[:, None]
        nats = softmax_nats(hidden, weights.output_rows, targets, real, groups=devices)
        if smoothing:
            # logsumexp - (1 - s) taken - s mean is the plain loss + s (taken - mean).
            mean = jnp.stack([weights.output_rows[codes].mean(axis=0) for codes in of_level])
            places = (jnp.arange(targets.shape[1]) % depth)[None]
            beyond = (hidden * (weights.output_rows[targets] - mean[places])).sum(axis=-1)
            nats += smoothing * jnp.where(real, beyond, 0.0).sum()
        return nats, real.sum().astype(jnp.float32)

    return loss


def train_generator(
    config: Config,
    dataset: Dataset,
    progress: Progress = lambda done, total, status: None,
    validate: Callable[[GeneratorConfig, GeneratorParams], float] | None = None,
) -> Path:
    """Train on the dataset's training sequences and write train.out: weights, config, tokenizer, catalog, manifest,
    curves.

    validate(config, params) -> recall@10; called every train.evaluate_every steps. Goes on where an earlier, killed
    call with the same arguments stopped. Raises ConfigError if prompt and training do not fit together.
    """
    train, prompt = config.train, config.prompt
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    if not prompt.template.endswith("{history}") or prompt.item != "{sid}" or prompt.separator:
        raise ConfigError(
            "training needs prompts in which the next item's codes follow the history at once: prompt.template ending "
            "in {history}, prompt.item={sid} and no prompt.separator, "
            f"not {prompt.template!r}, {prompt.item!r}, {prompt.separator!r}"
        )
    checkpoint.require_writable(Path(train.out))
    catalog = dataset.catalog
    tokenizer = semantic_id_tokenizer(catalog)
    prompts = PromptBuilder(prompt, tokenizer, catalog)
    tokens = level_tokens(catalog, tokenizer, tokenizer.vocab_size)
    item_tokens = np.stack([t[catalog.codes[:, level]] for level, t in enumerate(tokens)], axis=1)
    # Training sees up to max_items + 1 items; serving at most the longest prompt and one item more.
    trained = len(prompts.prefix) + (train.max_items + 1) * catalog.depth
    model: GeneratorConfig
    begin: Begin = as_drawn
    if train.model == "onerec":
        model = lazy.lazy_config(
            train, tokenizer.vocab_size, tokens, max(train.max_items, config.prompt.max_items)
        )
        loss = lazy.next_item_loss(model, item_tokens, train.dropout)
    else:
        model = decoder_config(train, tokenizer.vocab_size, max(trained, prompts.max_tokens + catalog.depth))
        loss = next_item_loss(
            model, prompts.prefix, item_tokens, train.dropout, train.devices, train.label_smoothing
        )
        begin = begin_from(train, model, tokenizer, catalog)
    misfit = generator(model).misfit(model, prompt, tokens)
    if misfit:
        raise ConfigError(misfit)

    def save(params: GeneratorParams, write_beside: Callable[[Path], None]) -> None:
        def write_all(folder: Path) -> None:
            tokenizer.save(folder / "tokenizer.json")
            write_beside(folder)

        checkpoint.save(Path(train.out), model, params, write_all)

    return train_to_best(
        config,
        catalog,
        generator(model).spec(model),
        loss,
        Windows(dataset.interactions.sequences, train),
        described={"prompt": asdict(prompt), "catalog_version": catalog.version},
        validate=None if validate is None else lambda params: validate(model, params),
        progress=progress,
        save=save,
        begin=begin,
    )
