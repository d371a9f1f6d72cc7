# SPDX-License-Identifier: Apache-2.0
"""Train SASRec (MODEL-11) from a dataset, to stand beside a generator in an evaluation.

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
from jgr.models import checkpoint, sasrec
from jgr.models.sasrec import SasrecConfig, SasrecParams
from jgr.training.run import Progress, train_to_best
from jgr.training.trainer import Loss, dropout
from jgr.training.windows import Windows


def softmax_loss(model: SasrecConfig, negatives: int, dropout_rate: float) -> Loss:
    """Cross-entropy of every item of a window after the first."""

    def loss(weights: SasrecParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dropout_key, negatives_key = jax.random.split(key)
        drop = None if dropout_rate == 0 else lambda x, k: dropout(x, k, dropout_rate)
        hidden = sasrec.encode(weights, model, rows[:, :-1], dropout=drop, key=dropout_key)
        targets = jnp.maximum(rows[:, 1:], 0)
        if negatives == 0:
            scores = hidden @ weights.embed.T
            taken = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        else:
            drawn = jax.random.randint(negatives_key, (negatives,), 0, model.n_items)
            taken = (hidden * weights.embed[targets]).sum(axis=-1)
            others = hidden @ weights.embed[drawn].T
            others = jnp.where(drawn == targets[..., None], -jnp.inf, others)
            # The target stands for itself, the drawn ones for all others.
            others = others + jnp.log((model.n_items - 1) / negatives)
            scores = jnp.concatenate([taken[..., None], others], axis=-1)
        real = rows[:, 1:] >= 0
        nats = jnp.where(real, jax.nn.logsumexp(scores, axis=-1) - taken, 0.0)
        return nats.sum(), real.sum().astype(jnp.float32)

    return loss


def train_sasrec(
    config: Config,
    dataset: Dataset,
    progress: Progress = lambda done, total, note: None,
    validate: Callable[[SasrecConfig, SasrecParams], float] | None = None,
) -> Path:
    """Train on the dataset's training sequences and write train.out. Arguments as of `train_generator`."""
    train, catalog = config.train, dataset.catalog
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    if train.hidden % train.heads:
        raise ConfigError(
            f"train.hidden ({train.hidden}) must be a multiple of train.heads ({train.heads}) for sasrec"
        )
    checkpoint.require_writable(Path(train.out))
    model = sasrec.sasrec_config(train, catalog.item_ids)

    def save(params: SasrecParams, write_beside: Callable[[Path], None]) -> None:
        sasrec.save(Path(train.out), model, params, write_beside)

    return train_to_best(
        train,
        sasrec.spec(model),
        softmax_loss(model, train.negatives, train.dropout),
        Windows(dataset.interactions.sequences, train),
        described={"items": model.items},
        validate=None if validate is None else lambda params: validate(model, params),
        progress=progress,
        save=save,
    )
