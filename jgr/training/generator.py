# SPDX-License-Identifier: Apache-2.0
"""Train a generator of semantic ids on a dataset, and write a model folder that `jgr serve` takes as it is.

Next-item language modelling: a decoder learns to continue a history of semantic ids. It is trained on the prompt that
the server would build for a window of items. Every code of every item after the first is predicted from the tokens
before it, so one window trains on all of its items; at serving time the next item simply follows.

Letters: B batch, N items in a window, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from jgr.models.params import PyTree
from jgr.prompt.tokens import PromptBuilder, level_tokens, semantic_id_tokenizer
from jgr.training import item_embeddings, item_vectors, lazy
from jgr.training.run import Progress, train_to_best
from jgr.training.softmax import softmax_nats
from jgr.training.start import begin_from
from jgr.training.trainer import Begin, Loss, as_drawn, dropout
from jgr.training.windows import Windows

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


def decoder_config(train: TrainConfig, vocab_size: int, max_position: int) -> DecoderConfig:
    """The small Qwen3-style decoder that a TrainConfig describes."""
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
        tied=train.tied,
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
    encode, levels = _encoder(model, prefix, item_tokens, dropout_rate), _levels(item_tokens)

    def loss(weights: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, targets, real = encode(weights, rows, key)
        nats = softmax_nats(hidden, weights.output_rows, targets, real, groups=devices)
        if smoothing:
            # logsumexp - (1 - s) taken - s mean is the plain loss + s (taken - mean).
            mean = jnp.stack([weights.output_rows[codes].mean(axis=0) for codes in levels])
            places = (jnp.arange(targets.shape[1]) % len(levels))[None]
            beyond = (hidden * (weights.output_rows[targets] - mean[places])).sum(axis=-1)
            nats += smoothing * jnp.where(real, beyond, 0.0).sum()
        return nats, real.sum().astype(jnp.float32)

    return loss


def cosine_loss(
    model: DecoderConfig,
    prefix: npt.ArrayLike,
    item_tokens: npt.ArrayLike,
    dropout_rate: float,
    devices: int = 1,
    smoothing: float = 0.0,
    *,
    temperature: float,
    item_loss: float = 0.0,
    later_codes: float = 1.0,
) -> Loss:
    """The loss of the decoder that `with_cosines` makes of the weights, in a softmax over each level's codes alone.

    item_loss: the weight of a second loss: where an item begins, its last code is predicted as well, so that the
    history's encoder learns what a retriever does. later_codes: the weight of an item's codes after the first. For the
    others see `next_item_loss`.
    """
    encode, levels = _encoder(model, prefix, item_tokens, dropout_rate), _levels(item_tokens)
    depth = len(levels)

    def loss(drawn: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, nats = with_cosines(drawn, temperature), jnp.zeros(())
        hidden, targets, real = encode(weights, rows, key)
        for level, codes in enumerate(levels):
            outputs, (h, t, r) = weights.head[codes], (x[:, level::depth] for x in (hidden, targets, real))
            t = jnp.searchsorted(jnp.asarray(codes), t)  # levels may share tokens, each at a place of its own
            of_level = softmax_nats(h, outputs, t, r, groups=devices)
            if smoothing:
                beyond = (h * (outputs[t] - outputs.mean(axis=0))).sum(axis=-1)
                of_level += smoothing * jnp.where(r, beyond, 0.0).sum()
            nats += of_level * (later_codes if level else 1.0)
        if item_loss:
            own = jnp.searchsorted(jnp.asarray(levels[-1]), targets[:, depth - 1 :: depth])
            whole = softmax_nats(
                hidden[:, ::depth], weights.head[levels[-1]], own, real[:, ::depth], groups=devices
            )
            nats += item_loss * whole
        return nats, real.sum().astype(jnp.float32)

    return loss


def with_cosines(weights: DecoderParams, temperature: float) -> DecoderParams:
    """The decoder of tied weights whose logits are cosines of the last hidden state and a token's row, over the
    temperature: its output rows have the length 1, and its last norm gives every state the same length. What it reads
    are the rows times the square root of their width, as in HSTU: else what the layers add drowns the last item."""
    embed = weights.embed
    rows = embed * jax.lax.rsqrt((embed * embed).sum(axis=-1, keepdims=True) + 1e-12)
    length = 1 / (math.sqrt(embed.shape[-1]) * temperature)  # a normed state has that of sqrt(D)
    read, norm = embed * math.sqrt(embed.shape[-1]), jnp.full_like(weights.norm, length)
    return replace(weights, embed=read, head=rows, norm=norm)


Encoder = Callable[[DecoderParams, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""(weights, rows [B, N], key) -> the hidden states [B, T, D] before each token of a window's items but the first one's,
these tokens [B, T], and whether they are real."""


def _encoder(
    model: DecoderConfig, prefix: npt.ArrayLike, item_tokens: npt.ArrayLike, dropout_rate: float
) -> Encoder:
    before, of_item = jnp.asarray(prefix, jnp.int32), jnp.asarray(item_tokens, jnp.int32)
    depth = of_item.shape[1]
    first_target = before.shape[0] + depth

    def encode(
        weights: DecoderParams, rows: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
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
        real = jnp.arange(first_target, tokens.shape[1]) < lengths[:, None]
        return hidden[:, first_target - 1 : -1], tokens[:, first_target:], real

    return encode


def _levels(item_tokens: npt.ArrayLike) -> list[Int32]:
    """The tokens of each level's codes, ascending."""
    return [np.unique(column) for column in np.asarray(item_tokens).T]


def token_vectors(of_items: Float32, item_tokens: Int32, vocab_size: int) -> Float32:
    """The vectors of tokens [V, e]: the mean of those of the items [n, e] whose ids have the token; 0 where none do."""
    vectors = np.zeros((vocab_size, of_items.shape[1]), np.float32)
    times = np.zeros((vocab_size, 1), np.float32)
    for column in item_tokens.T:
        np.add.at(vectors, column, of_items)
        np.add.at(times, column, 1)
    vectors /= np.maximum(times, 1)
    return vectors


@dataclass(frozen=True)
class _Course:
    """How a generator is trained. specs: of what is trained; model: of what is served; served: makes the one of the
    other. described: what the run depends on besides its settings."""

    specs: PyTree
    loss: Loss
    model: GeneratorConfig
    served: Callable[[PyTree], GeneratorParams] = as_drawn
    described: Mapping[str, str] = field(default_factory=dict)


def _course(train: TrainConfig, model: DecoderConfig, prefix: npt.ArrayLike, item_tokens: Int32) -> _Course:
    """That of a decoder. Raises ConfigError for train.item_loss where items share their last code."""
    settings = (model, prefix, item_tokens, train.dropout, train.devices, train.label_smoothing)
    specs = decoder.spec(model)
    if not train.cosines:
        course = _Course(specs, next_item_loss(*settings), model)
    else:
        if train.item_loss and len(np.unique(item_tokens[:, -1])) < len(item_tokens):
            raise ConfigError(
                "train.item_loss: items share their last code; `jgr ids --collisions=item` gives each its own"
            )
        loss = cosine_loss(
            *settings, temperature=train.temperature, item_loss=train.item_loss, later_codes=train.later_codes
        )
        course = _Course(
            specs, loss, replace(model, tied=False), partial(with_cosines, temperature=train.temperature)
        )
    if not train.item_vectors:
        return course
    of_items = item_vectors.read_vectors(train.item_vectors, len(item_tokens))
    vectors = token_vectors(of_items, item_tokens, model.vocab_size)

    def with_vectors(params: PyTree) -> GeneratorParams:
        return course.served(item_embeddings.folded(params, vectors))

    return replace(
        course,
        specs=item_embeddings.spec(course.specs, vectors.shape[1]),
        loss=item_embeddings.informed_loss(course.loss, vectors),
        served=with_vectors,
        described={"vectors": hashlib.sha256(vectors.tobytes()).hexdigest()[:16]},
    )


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
    begin: Begin = as_drawn
    if train.model == "onerec":
        lazy_model = lazy.lazy_config(
            train, tokenizer.vocab_size, tokens, max(train.max_items, config.prompt.max_items)
        )
        loss = lazy.next_item_loss(lazy_model, item_tokens, train.dropout)
        course = _Course(generator(lazy_model).spec(lazy_model), loss, lazy_model)
    else:
        drawn = decoder_config(train, tokenizer.vocab_size, max(trained, prompts.max_tokens + catalog.depth))
        course = _course(train, drawn, prompts.prefix, item_tokens)
        begin = begin_from(train, drawn, tokenizer, catalog)
    model = course.model
    misfit = generator(model).misfit(model, prompt, tokens)
    if misfit:
        raise ConfigError(misfit)

    def save(params: PyTree, write_beside: Callable[[Path], None]) -> None:
        def write_all(folder: Path) -> None:
            tokenizer.save(folder / "tokenizer.json")
            write_beside(folder)

        checkpoint.save(Path(train.out), model, jax.device_get(course.served(params)), write_all)

    return train_to_best(
        config,
        catalog,
        course.specs,
        course.loss,
        Windows(dataset.interactions.sequences, train),
        described={"prompt": asdict(prompt), "catalog_version": catalog.version, **course.described},
        validate=None if validate is None else lambda params: validate(model, course.served(params)),
        progress=progress,
        save=save,
        begin=begin,
    )
