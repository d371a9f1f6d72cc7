# SPDX-License-Identifier: Apache-2.0
"""Train SASRec, HSTU (MODEL-11) or LRURec (MODEL-29), for use as a scorer, as a baseline, or as a ranker's retriever.

The loss is the softmax over all items, or over the target and train.negatives items drawn uniformly for the whole
batch; a drawn item that is the target itself is left out. HSTU's authors draw anew for each position.

Letters: B batch, N items in a window, n items in the catalog, M negatives, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.data.interactions import Interactions, Ragged
from jgr.models import checkpoint, repeats, retrievers
from jgr.models.params import PyTree
from jgr.models.retrievers import RetrieverConfig, RetrieverParams, retriever
from jgr.training import item_embeddings, item_vectors
from jgr.training.run import Progress, train_to_best
from jgr.training.softmax import Repeats, softmax_nats
from jgr.training.trainer import Loss, dropout
from jgr.training.windows import Windows


def softmax_loss(
    cfg: RetrieverConfig,
    negatives: int,
    dropout_rate: float,
    *,
    temperature: float = 1.0,
    weigh_negatives: bool = True,
    devices: int = 1,
) -> Loss:
    """The cross-entropy of every item of a window after the first. For the arguments see TrainConfig."""

    model = retriever(cfg)

    def loss(weights: RetrieverParams, windows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, times = (windows[..., 0], windows[..., 1]) if windows.ndim == 3 else (windows, None)
        dropout_key, negatives_key = jax.random.split(key)
        drop = None if dropout_rate == 0 else lambda x, k: dropout(x, k, dropout_rate)
        hidden = retrievers.encode(weights, cfg, rows[:, :-1], times, dropout=drop, key=dropout_key)
        hidden = hidden / temperature
        targets = jnp.maximum(rows[:, 1:], 0)
        real = rows[:, 1:] >= 0
        count = real.sum().astype(jnp.float32)
        embed, bias = model.output(weights)
        seen = None
        if weights.repeats is not None:
            seen = repeats.window(rows[:, :-1])
            of_ages = weights.repeats / temperature
        if negatives == 0:
            again = None if seen is None else Repeats(of_ages, seen)
            return softmax_nats(hidden, embed, targets, real, bias=bias, repeats=again, groups=devices), count
        drawn = jax.random.randint(negatives_key, (negatives,), 0, cfg.n_items)
        taken = (hidden * embed[targets]).sum(axis=-1) + (0 if bias is None else bias[targets])
        others = hidden @ embed[drawn].T + (0 if bias is None else bias[drawn])
        if seen is not None:
            taken = taken + repeats.of_targets(of_ages, seen, targets)
            others = others + repeats.of_drawn(of_ages, seen, drawn)
        others = jnp.where(drawn == targets[..., None], -jnp.inf, others)
        if weigh_negatives:  # the target counts once, the drawn items stand for all others
            others = others + jnp.log((cfg.n_items - 1) / negatives)
        scores = jnp.concatenate([taken[..., None], others], axis=-1)
        return jnp.where(real, jax.nn.logsumexp(scores, axis=-1) - taken, 0.0).sum(), count

    return loss


def training_sequences(interactions: Interactions, learn_valid: bool) -> Ragged:
    """Each user's events to train on: up to the first held-out target or, with learn_valid, to the validation's end."""
    sequences = interactions.sequences
    if not learn_valid:
        return sequences
    stops, valid = sequences.stops.copy(), interactions.valid
    # Behind one history stand the targets of a set without an order, which all have it.
    _, which, targets = np.unique(valid.histories.stops, return_inverse=True, return_counts=True)
    np.maximum.at(stops, valid.users, valid.histories.stops + targets[which])
    return replace(sequences, stops=stops)


def train_retriever(
    config: Config,
    dataset: Dataset,
    progress: Progress = lambda done, total, status: None,
    validate: Callable[[RetrieverConfig, RetrieverParams], float] | None = None,
) -> Path:
    """Train on the dataset's training sequences and write train.out. For the arguments see `train_generator`."""
    train = config.train
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    cfg = retrievers.make_config(train, dataset.catalog.item_ids)
    checkpoint.require_writable(Path(train.out))

    specs = retriever(cfg).spec(cfg)
    loss = softmax_loss(
        cfg,
        train.negatives,
        train.dropout,
        temperature=train.temperature,
        weigh_negatives=train.weigh_negatives,
        devices=train.devices,
    )
    described = {"items": cfg.items}
    if train.item_vectors:
        vectors = item_vectors.read_vectors(train.item_vectors, cfg.n_items)
        specs = item_embeddings.spec(specs, vectors.shape[1])
        loss = item_embeddings.informed_loss(loss, vectors)
        described["vectors"] = hashlib.sha256(vectors.tobytes()).hexdigest()[:16]

    def served(params: PyTree) -> RetrieverParams:
        folded: RetrieverParams = item_embeddings.folded(params, vectors) if train.item_vectors else params
        return folded

    def save(params: PyTree, write_beside: Callable[[Path], None]) -> None:
        folded = jax.device_get(served(params))
        retrievers.save(Path(train.out), cfg, folded, write_beside, train.tables)

    return train_to_best(
        config,
        dataset.catalog,
        specs,
        loss,
        Windows(training_sequences(dataset.interactions, train.learn_valid), train),
        described=described,
        validate=None if validate is None else lambda params: validate(cfg, served(params)),
        progress=progress,
        save=save,
    )
