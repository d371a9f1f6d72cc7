# SPDX-License-Identifier: Apache-2.0
"""Train SASRec (MODEL-11) or LRURec (MODEL-29) from a dataset: the baseline of an evaluation, a ranker's retriever.

The loss is the softmax over all items, or over the target and train.negatives items drawn uniformly for the whole
batch; a drawn item that is the target itself is left out.

Letters: B batch, N items of a window, n items of the catalog, M negatives, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.models import checkpoint, retrievers
from jgr.models.retrievers import RetrieverConfig, RetrieverParams, retriever
from jgr.training.run import Progress, train_to_best
from jgr.training.trainer import Loss, dropout
from jgr.training.windows import Windows


def softmax_loss(cfg: RetrieverConfig, negatives: int, dropout_rate: float) -> Loss:
    """Cross-entropy of every item of a window after the first."""

    model = retriever(cfg)

    def loss(weights: RetrieverParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dropout_key, negatives_key = jax.random.split(key)
        drop = None if dropout_rate == 0 else lambda x, k: dropout(x, k, dropout_rate)
        hidden = model.encode(weights, cfg, rows[:, :-1], dropout=drop, key=dropout_key)
        targets = jnp.maximum(rows[:, 1:], 0)
        embed, bias = model.output(weights)
        if negatives == 0:
            scores = hidden @ embed.T + (0 if bias is None else bias)
            taken = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        else:
            drawn = jax.random.randint(negatives_key, (negatives,), 0, cfg.n_items)
            taken = (hidden * embed[targets]).sum(axis=-1) + (0 if bias is None else bias[targets])
            others = hidden @ embed[drawn].T + (0 if bias is None else bias[drawn])
            others = jnp.where(drawn == targets[..., None], -jnp.inf, others)
            # The target stands for itself, the drawn ones for all others.
            others = others + jnp.log((cfg.n_items - 1) / negatives)
            scores = jnp.concatenate([taken[..., None], others], axis=-1)
        real = rows[:, 1:] >= 0
        nats = jnp.where(real, jax.nn.logsumexp(scores, axis=-1) - taken, 0.0)
        return nats.sum(), real.sum().astype(jnp.float32)

    return loss


def train_retriever(
    config: Config,
    dataset: Dataset,
    progress: Progress = lambda done, total, note: None,
    validate: Callable[[RetrieverConfig, RetrieverParams], float] | None = None,
) -> Path:
    """Train on the dataset's training sequences and write train.out. Arguments as of `train_generator`."""
    train = config.train
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    cfg = retrievers.make_config(train, dataset.catalog.item_ids)
    checkpoint.require_writable(Path(train.out))

    def save(params: RetrieverParams, write_beside: Callable[[Path], None]) -> None:
        retrievers.save(Path(train.out), cfg, params, write_beside)

    return train_to_best(
        train,
        retriever(cfg).spec(cfg),
        softmax_loss(cfg, train.negatives, train.dropout),
        Windows(dataset.interactions.sequences, train),
        described={"items": cfg.items},
        validate=None if validate is None else lambda params: validate(cfg, params),
        progress=progress,
        save=save,
    )
