# SPDX-License-Identifier: Apache-2.0
"""Training the lazy decoder: its config from a TrainConfig, and its loss over windows of items.

Every item of a window after the first is a sample of its own, with the items before it as history. The layers run only
over the `depth` positions of a sample, and reading a history is one projection. So samples share no computation, and
training computes exactly what serving does.

Letters: B batch, N items in a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import ConfigError, TrainConfig
from jgr.models import lazy_decoder
from jgr.models.lazy_decoder import LazyConfig, LazyParams
from jgr.training.trainer import Loss, dropout


def lazy_config(
    train: TrainConfig, vocab_size: int, level_tokens: Sequence[npt.NDArray[np.int32]], max_items: int
) -> LazyConfig:
    """The config of a lazy decoder with TrainConfig's sizes; both attentions have train.kv_heads.

    level_tokens: for each level [V_l], ascending from level to level. Raises ConfigError if two levels share tokens.
    """
    first = tuple(int(tokens[0]) for tokens in level_tokens)
    sizes = tuple(len(tokens) for tokens in level_tokens)
    if not np.array_equal(np.concatenate(level_tokens), first[0] + np.arange(sum(sizes))):
        raise ConfigError("train.model=onerec needs semantic ids whose levels have names of their own")
    return LazyConfig(
        vocab_size=vocab_size,
        first_tokens=first,
        level_sizes=sizes,
        max_items=max_items,
        hidden=train.hidden,
        layers=train.layers,
        heads=train.heads,
        kv_heads=train.kv_heads,
        context_heads=train.kv_heads,
        head_dim=train.head_dim,
        mlp=train.mlp,
    )


def next_item_loss(model: LazyConfig, item_tokens: npt.ArrayLike, dropout_rate: float) -> Loss:
    """The loss over windows of items. item_tokens: [n items, depth] int32, the tokens of every row's semantic id."""
    of_item, depth = jnp.asarray(item_tokens, jnp.int32), model.depth

    def loss(weights: LazyParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, window = rows.shape
        tokens = of_item[jnp.maximum(rows, 0)]
        targets = tokens[:, 1:].reshape(-1, depth)
        histories = jnp.repeat(tokens.reshape(batch, -1), window - 1, axis=0)
        lengths = jnp.tile(jnp.arange(1, window) * depth, batch)
        drop = None if dropout_rate == 0 else lambda x, k: dropout(x, k, dropout_rate)
        hidden = lazy_decoder.forward(
            weights, model, histories, lengths, targets, dropout=drop, key=None if drop is None else key
        )
        nats = jnp.zeros(targets.shape[0])
        for level in range(depth):
            logits, first = lazy_decoder.next_logits(weights, model, hidden[:, level], level)
            taken = jnp.take_along_axis(logits, targets[:, level, None] - first, axis=-1)[:, 0]
            nats = nats + jax.nn.logsumexp(logits, axis=-1) - taken
        real = (rows[:, 1:] >= 0).reshape(-1)
        return jnp.where(real, nats, 0.0).sum(), depth * real.sum().astype(jnp.float32)

    return loss
