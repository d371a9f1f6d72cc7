# SPDX-License-Identifier: Apache-2.0
"""LRURec: a linear recurrence over item ids, the retriever that hands a ranker its candidates (MODEL-29).

    x = norm(dropout(embed[items]))
    per layer:  h_t = lambda * h_{t-1} + gamma * (B x_t),   complex and diagonal
                x = norm(x + Re(C h));  x = norm(x + W2 gelu(W1 x))
    score of item i after the history's last item = x . embed[i] + bias[i]
    lambda = exp(-exp(nu) + i exp(theta)),   gamma = sqrt(1 - |lambda|^2)

A recurrence over time is an associative scan: log2 N steps, not N. Histories are padded on the right, so padding only
comes after the real items, and the recurrence needs no mask.

Letters: B batch, N items of a history, n items of the catalog, L layers, D hidden, S = 2 D state, F mlp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgr.config import TrainConfig
from jgr.models import repeats
from jgr.models.params import Spec
from jgr.models.sasrec import Dropout, layer_norm
from jgr.ops import split
from jgr.ops.dense import dense

NAME = "LRURec"
RING = (0.8, 0.99)
"""The range of |lambda| in fresh parameters."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class LruRecConfig:
    """Architecture only. items: what `items_digest` gives for the catalog whose rows it embeds.

    repeats: whether items of the history have weights by their age, see jgr.models.repeats.
    """

    n_items: int
    max_items: int
    hidden: int
    layers: int
    mlp: int
    items: str
    repeats: bool = False

    @classmethod
    def of(cls, train: TrainConfig, n_items: int, items: str) -> LruRecConfig:
        """The LRURec that a TrainConfig describes; the fields about heads are not read."""
        return cls(n_items, train.max_items, train.hidden, train.layers, train.mlp, items, train.repeats)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LruRecLayer:
    """Leading axis L on every leaf; norms: (scale minus 1, bias). nu and theta are stored minus their start values."""

    nu: Any  # [L, 1, S]: log of the decay of each state, see `_start`
    theta: Any  # [L, 1, S]: log of its angle
    into: Any  # [L, D, 2 S]: B, the real parts first
    out: Any  # [L, 2 S, D]: C, whose imaginary part is stored negated
    recurrence_norm: Any  # [L, 2, D]: norm after the recurrence
    w1: Any  # [L, D, F]: first matrix of the MLP
    b1: Any  # [L, 1, F]: its bias
    w2: Any  # [L, F, D]: second matrix
    b2: Any  # [L, 1, D]: its bias
    mlp_norm: Any  # [L, 2, D]: norm after the MLP


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LruRecParams:
    embed: Any  # [n, D]: a row for each item
    bias: Any  # [n]: added to each item's score
    norm: Any  # [2, D]: norm of the embedded history
    layers: LruRecLayer
    repeats: Any = None  # [K]: weights of the history's items by their age; None: there are none


def spec(cfg: LruRecConfig) -> LruRecParams:
    """The declaration of every parameter. A norm's scale is stored minus 1, so that it is drawn as zeros."""
    n, hidden, state, mlp = cfg.layers, cfg.hidden, 2 * cfg.hidden, cfg.mlp

    def zeros(rows: int, width: int, axes: tuple[str, str]) -> Spec:
        return Spec((n, rows, width), ("layer", *axes), "zeros")

    layers = LruRecLayer(
        nu=zeros(1, state, ("one", "state")),
        theta=zeros(1, state, ("one", "state")),
        into=Spec((n, hidden, 2 * state), ("layer", "embed", "state"), fan_in=hidden),
        out=Spec((n, 2 * state, hidden), ("layer", "state", "embed"), fan_in=2 * state),
        recurrence_norm=zeros(2, hidden, ("norm", "embed")),
        w1=Spec((n, hidden, mlp), ("layer", "embed", "mlp"), fan_in=hidden),
        b1=zeros(1, mlp, ("one", "mlp")),
        w2=Spec((n, mlp, hidden), ("layer", "mlp", "embed"), fan_in=mlp),
        b2=zeros(1, hidden, ("one", "embed")),
        mlp_norm=zeros(2, hidden, ("norm", "embed")),
    )
    return LruRecParams(
        Spec((cfg.n_items, hidden), ("items", "embed")),
        Spec((cfg.n_items,), ("items",), "zeros"),
        Spec((2, hidden), ("norm", "embed"), "zeros"),
        layers,
        repeats.spec(cfg.max_items) if cfg.repeats else None,
    )


def _start(state: int) -> tuple[jax.Array, jax.Array]:
    """nu and theta [S] float32 of fresh parameters: lambda spread evenly over the ring's area.

    Squared moduli at equal steps, angles at golden-ratio steps, so that no draw is needed and none clusters.
    """
    low, high = RING
    places = np.arange(state) + 0.5
    squared = low**2 + places / state * (high**2 - low**2)
    angles = 2 * np.pi * (places * GOLDEN % 1)
    return jnp.float32(np.log(-0.5 * np.log(squared))), jnp.float32(np.log(angles))


def recurrence(x: jax.Array, nu: jax.Array, theta: jax.Array) -> jax.Array:
    """h_t = lambda * h_{t-1} + gamma * x_t along axis 1, from h = 0.

    x: [B, N, S] complex64. nu, theta: [1, S] float32 as stored, minus their start values. Gives [B, N, S] complex64.
    """
    nu_start, theta_start = _start(x.shape[-1])
    rate = jnp.exp(nu_start + nu)
    decay = jnp.exp(jax.lax.complex(-rate, jnp.exp(theta_start + theta)))
    gamma = jnp.sqrt(-jnp.expm1(-2 * rate))

    def after(
        first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], then[0] * first[1] + then[1]

    # lambda is the same at every place and in every row: [1, N, S] is enough.
    decays = jnp.broadcast_to(decay, (1, *x.shape[1:]))
    states: jax.Array = jax.lax.associative_scan(after, (decays, gamma * x), axis=1)[1]
    return states


def encode(
    params: LruRecParams,
    cfg: LruRecConfig,
    rows: jax.Array,
    *,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """The query vector at each position, for the item after it, [B, N, D]. rows: [B, N] int32, -1 on the right.

    dropout: (x, key) -> x on the embedding, on each block's output and inside the mlp, for training; needs key.
    """
    keys = None if key is None else jax.random.split(key, (cfg.layers + 1, 3))

    def drop(x: jax.Array, layer_keys: jax.Array | None, which: int) -> jax.Array:
        return x if dropout is None or layer_keys is None else dropout(x, layer_keys[which])

    def layer_step(x: jax.Array, xs: tuple[LruRecLayer, jax.Array | None]) -> tuple[jax.Array, None]:
        layer, layer_keys = xs
        real, imaginary = jnp.split(dense(x, layer.into), 2, axis=-1)
        states = recurrence(jax.lax.complex(real, imaginary), layer.nu, layer.theta)
        mixed = dense(jnp.concatenate([states.real, states.imag], axis=-1), layer.out)
        x = layer_norm(x + drop(mixed, layer_keys, 0), layer.recurrence_norm)
        inner = drop(jax.nn.gelu(dense(x, layer.w1) + layer.b1, approximate=False), layer_keys, 1)
        return layer_norm(x + drop(dense(inner, layer.w2) + layer.b2, layer_keys, 2), layer.mlp_norm), None

    embedded = drop(split.rows(params.embed, jnp.maximum(rows, 0)), None if keys is None else keys[-1], 0)
    x = layer_norm(embedded, params.norm)
    x, _ = jax.lax.scan(layer_step, x, (params.layers, None if keys is None else keys[:-1]))
    return x


def output(params: LruRecParams, rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """The items' output vectors, [n, D], and biases, [n]: a score is the product with the query plus the bias.

    rows: the items; None: all of them.
    """
    if rows is None:
        return params.embed, params.bias
    return split.rows(params.embed, rows), split.rows(params.bias, rows)
