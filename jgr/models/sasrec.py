# SPDX-License-Identifier: Apache-2.0
"""SASRec: a causal transformer over item ids, the baseline that sequential recommenders are compared with (MODEL-11).

    h = dropout(embed[items] * sqrt(D) + position)
    per layer:  h += attention(norm(h));  h += W2 relu(W1 norm(h))
    score of item i after the history's last item = norm(h) . embed[i]

Layers are scanned. It ranks a whole catalog by one matmul, so it is no generator: see `jgr.models.retrievers`.

Letters: B batch, N items of a history, n items of the catalog, L layers, D hidden, H heads, F mlp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgr.config import ConfigError, TrainConfig
from jgr.models import repeats
from jgr.models.params import Spec
from jgr.ops import split
from jgr.ops.dense import dense
from jgr.ops.segment_attention import Causal, segment_attention

Dropout = Callable[[jax.Array, jax.Array], jax.Array]

NAME = "SASRec"
NORM_EPS = 1e-6


@dataclass(frozen=True)
class SasrecConfig:
    """Architecture only. items: what `items_digest` gives for the catalog whose rows it embeds.

    repeats: whether items of the history have weights by their age, see jgr.models.repeats.
    """

    n_items: int
    max_items: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    items: str
    repeats: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide {self.hidden} hidden")

    @classmethod
    def of(cls, train: TrainConfig, n_items: int, items: str) -> SasrecConfig:
        """The SASRec that a TrainConfig describes; kv_heads and head_dim are not read. Raises ConfigError."""
        if train.hidden % train.heads:
            raise ConfigError(
                f"train.hidden ({train.hidden}) must be a multiple of train.heads ({train.heads}) for sasrec"
            )
        return cls(
            n_items, train.max_items, train.hidden, train.layers, train.heads, train.mlp, items, train.repeats
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SasrecLayer:
    """The weights of all layers, with leading axis L on every leaf. Norms are (scale minus 1, bias)."""

    attention_norm: Any  # [L, 2, D]: norm before attention
    wq: Any  # [L, D, D]: projection to queries
    wk: Any  # [L, D, D]: to keys
    wv: Any  # [L, D, D]: to values
    wo: Any  # [L, D, D]: output projection of attention
    mlp_norm: Any  # [L, 2, D]: norm before the MLP
    w1: Any  # [L, D, F]: first matrix of the MLP
    b1: Any  # [L, F]: its bias
    w2: Any  # [L, F, D]: second matrix
    b2: Any  # [L, D]: its bias


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SasrecParams:
    embed: Any  # [n, D]: a row for each item
    position: Any  # [N, D]: a row for each place of a history
    layers: SasrecLayer
    norm: Any  # [2, D]: the last norm
    repeats: Any = None  # [K]: weights of the history's items by their age; None: there are none


def spec(cfg: SasrecConfig) -> SasrecParams:
    """The declaration of every parameter. A norm's scale is stored minus 1, so that it is drawn as zeros."""
    n, hidden, mlp = cfg.layers, cfg.hidden, cfg.mlp

    def square() -> Spec:
        return Spec((n, hidden, hidden), ("layer", "embed", "heads"), fan_in=hidden)

    def norm() -> Spec:
        return Spec((n, 2, hidden), ("layer", "norm", "embed"), "zeros")

    layers = SasrecLayer(
        attention_norm=norm(),
        wq=square(),
        wk=square(),
        wv=square(),
        wo=square(),
        mlp_norm=norm(),
        w1=Spec((n, hidden, mlp), ("layer", "embed", "mlp"), fan_in=hidden),
        b1=Spec((n, mlp), ("layer", "mlp"), "zeros"),
        w2=Spec((n, mlp, hidden), ("layer", "mlp", "embed"), fan_in=mlp),
        b2=Spec((n, hidden), ("layer", "embed"), "zeros"),
    )
    return SasrecParams(
        Spec((cfg.n_items, hidden), ("items", "embed")),
        Spec((cfg.max_items, hidden), ("positions", "embed")),
        layers,
        Spec((2, hidden), ("norm", "embed"), "zeros"),
        repeats.spec(cfg.max_items) if cfg.repeats else None,
    )


def layer_norm(x: jax.Array, scale_bias: jax.Array) -> jax.Array:
    """x [..., D] at mean 0 and variance 1, scaled and shifted by (scale minus 1, bias) [2, D]."""
    x = x - x.mean(axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS)
    return x * (1 + scale_bias[0]) + scale_bias[1]


def encode(
    params: SasrecParams,
    cfg: SasrecConfig,
    rows: jax.Array,
    *,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """The query vector at each position, for the item after it, [B, N, D]. rows: [B, N] int32, -1 on the right.

    dropout: (x, key) -> x on the embedding and on each block's output, for training; needs key.
    """
    keys = None if key is None else jax.random.split(key, (cfg.layers + 1, 2))
    lengths = (rows >= 0).sum(axis=1)

    def drop(x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return x if dropout is None or dropout_key is None else dropout(x, dropout_key)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], cfg.heads, -1)

    def layer_step(h: jax.Array, xs: tuple[SasrecLayer, jax.Array | None]) -> tuple[jax.Array, None]:
        layer, layer_keys = xs
        attention_key, mlp_key = (None, None) if layer_keys is None else (layer_keys[0], layer_keys[1])
        x = layer_norm(h, layer.attention_norm)
        k, v = (heads(dense(x, w)).transpose(0, 2, 1, 3) for w in (layer.wk, layer.wv))
        q = heads(dense(x, layer.wq))
        out = segment_attention(q, k, v, Causal(lengths), implementation="xla")  # the form with gradients
        h = h + drop(dense(out.reshape(h.shape), layer.wo), attention_key)
        x = jax.nn.relu(dense(layer_norm(h, layer.mlp_norm), layer.w1) + layer.b1)
        return h + drop(dense(x, layer.w2) + layer.b2, mlp_key), None

    h = split.rows(params.embed, jnp.maximum(rows, 0)) * cfg.hidden**0.5 + params.position[: rows.shape[1]]
    h = drop(h, None if keys is None else keys[-1, 0])
    h, _ = jax.lax.scan(layer_step, h, (params.layers, None if keys is None else keys[:-1]))
    return layer_norm(h, params.norm)


def output(params: SasrecParams, rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """The items' output vectors, [n, D], and no bias: an item's score is its product with the query.

    rows: the items; None: all of them.
    """
    return params.embed if rows is None else split.rows(params.embed, rows), None
