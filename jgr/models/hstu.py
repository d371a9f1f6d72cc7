# SPDX-License-Identifier: Apache-2.0
"""HSTU as its authors trained it on MovieLens: a retriever by gated attention without a softmax (MODEL-6 to MODEL-12).

    h = dropout(embed[items] * sqrt(D) + position)
    per layer:  u, v, q, k = silu(norm(h) W);  o_i = sum over j <= i of silu(q_i . k_j + bias_ij) / N * v_j
                h += dropout(u * norm(o)) W_o + b_o
    score of item i after the history's last item = unit(h) . unit(embed[i])
    bias_ij = positions[N - 1 + j - i] + times[bucket(t_{i+1} - t_j)]

N belongs to the checkpoint, never to the shape of a call: the weights are not normalised, so another N is another
model. Norms have no parameters. A row's bias depends on the time of the *next* event, the last row's on the time of the
request; so when a cached history grows, its newest row is computed again, and all others are final.

Letters: B batch, S = max_items places of a history, N length, n items of the catalog, m new events, L layers, D hidden,
H heads, a and b width of a query and of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jgr.config import ConfigError, TrainConfig
from jgr.models import repeats
from jgr.models.params import Spec
from jgr.models.sasrec import NORM_EPS, Dropout
from jgr.ops import split
from jgr.ops.biased_attention import Bias, Causal, biased_attention
from jgr.ops.dense import dense
from jgr.prompt.layouts import Kind, Tokens

NAME = "HSTU"
EXTRA_POSITIONS = 11
"""N minus max_items in the authors' code: positions for ten events that the model may generate, and for the target."""
BUCKETS = 129
"""Buckets of times; the last one is for everything longer ago."""


class WindowSlides(ValueError):
    """New events do not fit the window: a cached history would lose its oldest event, and every row would change."""


@dataclass(frozen=True)
class HstuConfig:
    """Architecture only. items: what `items_digest` gives for the catalog whose rows it embeds.

    length: N. bias: what a logit's bias depends on; "times": on positions and times. concat_ua: whether W_o takes
    [u, o', u * o'], with the normalised o', rather than u * o'. activated: whether silu is applied to u, v, q and k.
    repeats: whether items of the history have weights by their age, see jgr.models.repeats.
    """

    n_items: int
    max_items: int
    hidden: int
    layers: int
    heads: int
    qk_dim: int
    v_dim: int
    length: int
    items: str
    bias: Literal["none", "positions", "times"] = "positions"
    concat_ua: bool = False
    activated: bool = True
    repeats: bool = False

    @classmethod
    def of(cls, train: TrainConfig, n_items: int, items: str) -> HstuConfig:
        """The HSTU that a TrainConfig describes; kv_heads, head_dim and mlp are not read. Raises ConfigError."""
        if train.hidden % train.heads:
            raise ConfigError(
                f"train.hidden ({train.hidden}) must be a multiple of train.heads ({train.heads}) for hstu"
            )
        width = train.hidden // train.heads
        return cls(
            n_items, train.max_items, train.hidden, train.layers, train.heads, width, width,
            train.max_items + EXTRA_POSITIONS, items, "times" if train.times else "positions",
            repeats=train.repeats,
        )  # fmt: skip

    @property
    def timed(self) -> bool:
        return self.bias == "times"

    @property
    def gated(self) -> int:
        """How many vectors of H b numbers W_o takes."""
        return 3 if self.concat_ua else 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HstuLayer:
    """The weights of all layers, with leading axis L on every leaf.

    A table that the bias does not depend on is None.
    """

    uvqk: Any  # [L, D, 2 H b + 2 H a], in the order u, v, q, k
    out: Any  # [L, H b, D]: output projection; [L, 3 H b, D] with concat_ua
    out_bias: Any  # [L, 1, D]: bias of the output
    positions: Any  # [L, 1, 2 N - 1]: bias of logits, by how many places back a key is
    times: Any  # [L, 1, BUCKETS]: bias of logits, by the time between


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HstuParams:
    embed: Any  # [n, D]: a row for each item
    position: Any  # [N, D]: a row for each place of a history
    layers: HstuLayer
    repeats: Any = None  # [K]: weights of the history's items by their age; None: there are none


def spec(cfg: HstuConfig) -> HstuParams:
    """The declaration of every parameter, with the authors' scales."""
    n, hidden, values = cfg.layers, cfg.hidden, cfg.heads * cfg.v_dim
    gated = cfg.gated * values
    layers = HstuLayer(
        uvqk=Spec((n, hidden, 2 * (values + cfg.heads * cfg.qk_dim)), ("layer", "embed", "heads")),
        out=Spec((n, gated, hidden), ("layer", "heads", "embed"), fan_in=(gated + hidden) // 2),
        out_bias=Spec((n, 1, hidden), ("layer", "one", "embed"), "zeros"),
        positions=None
        if cfg.bias == "none"
        else Spec((n, 1, 2 * cfg.length - 1), ("layer", "one", "distance")),
        times=Spec((n, 1, BUCKETS), ("layer", "one", "bucket")) if cfg.timed else None,
    )
    position = Spec((cfg.length, hidden), ("positions", "embed"), fan_in=(cfg.length + hidden) // 2)
    embed = Spec((cfg.n_items, hidden), ("items", "embed"))
    return HstuParams(embed, position, layers, repeats.spec(cfg.max_items) if cfg.repeats else None)


def standard(x: jax.Array, eps: float = NORM_EPS) -> jax.Array:
    """Normalise x, [..., D], to mean 0 and variance 1."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def unit(x: jax.Array) -> jax.Array:
    """Scale x, [..., D], to length 1; a vector shorter than 1e-6 stays short."""
    # Not jnp.linalg.norm: its gradient at 0 is not a number.
    return x * jax.lax.rsqrt(jnp.maximum((x * x).sum(axis=-1, keepdims=True), NORM_EPS**2))


def split_uvqk(x: jax.Array, heads: int, qk_dim: int, v_dim: int) -> tuple[jax.Array, ...]:
    """u [B, T, H b] and, as attention takes them, v [B, H, T, b], q [B, T, H, a], k [B, H, T, a].

    x: [B, T, 2 H (a + b)].
    """
    values, keys = heads * v_dim, heads * qk_dim
    u, v, q, k = jnp.split(x, (values, 2 * values, 2 * values + keys), axis=-1)
    v, k = (part.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3) for part in (v, k))
    return u, v, q.reshape(*x.shape[:2], heads, qk_dim), k


def _embed(params: HstuParams, cfg: HstuConfig, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Embed rows [B, T] at places [B or 1, T]: [B, T, D], zeros where there is no row."""
    x = split.rows(params.embed, jnp.maximum(rows, 0)) * cfg.hidden**0.5 + params.position[places]
    return jnp.where(rows[..., None] >= 0, x, 0.0)


def _layer(
    layer: HstuLayer,
    cfg: HstuConfig,
    h: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array, Bias | None], jax.Array],
    drop: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The output [B, T, D] of one layer for its input h. attend(q, k, v, bias) -> [B, T, H, b]."""
    x = dense(standard(h), layer.uvqk)
    u, v, q, k = split_uvqk(jax.nn.silu(x) if cfg.activated else x, cfg.heads, cfg.qk_dim, cfg.v_dim)
    bias = None if cfg.bias == "none" else Bias(layer.positions, layer.times)
    o = standard(attend(q, k, v, bias).reshape(u.shape))
    gated = jnp.concatenate([u, o, u * o], axis=-1) if cfg.concat_ua else u * o
    out: jax.Array = h + dense(drop(gated), layer.out) + layer.out_bias
    return out


def blocks(
    layers: HstuLayer,
    cfg: HstuConfig,
    h: jax.Array,
    lengths: jax.Array,
    times: jax.Array | None = None,
    *,
    dropout: Dropout | None = None,
    keys: jax.Array | None = None,
) -> jax.Array:
    """The layers over embedded histories: h [B, T, D] -> [B, T, D]; rows after a length are padding.

    lengths: [B] int32. times: [B, T + 1] int32 seconds where cfg.timed, see `encode`. keys: [L], for dropout.
    """
    return _blocks(layers, cfg, h, lengths, times, dropout, keys, keep=False)[0]


def _blocks(
    layers: HstuLayer,
    cfg: HstuConfig,
    h: jax.Array,
    lengths: jax.Array,
    times: jax.Array | None,
    dropout: Dropout | None,
    keys: jax.Array | None,
    *,
    keep: bool,
) -> tuple[jax.Array, Any]:
    """As `blocks`; with `keep` also the keys [L, B, H, T, a] and the values [L, B, H, T, b]."""
    if cfg.timed and times is None:
        raise ValueError("this HSTU's bias depends on times: they must be given")
    seen: list[tuple[jax.Array, jax.Array]] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: Bias | None) -> jax.Array:
        seen.append((k, v))
        asked, happened = (None, None) if times is None or not cfg.timed else (times[:, 1:], times[:, :-1])
        return biased_attention(
            q, k, v, Causal(lengths), bias=bias, query_times=asked, key_times=happened,
            activation="silu", divisor=cfg.length,
            implementation="auto" if keys is None else "xla",  # the form with gradients
        )  # fmt: skip

    def layer_step(h: jax.Array, xs: tuple[HstuLayer, jax.Array | None]) -> tuple[jax.Array, Any]:
        layer, key = xs
        drop = (lambda x: x) if dropout is None or key is None else (lambda x: dropout(x, key))
        h = _layer(layer, cfg, h, attend, drop)
        return h, seen.pop() if keep else None

    out: tuple[jax.Array, Any] = jax.lax.scan(layer_step, h, (layers, keys))
    return out


def encode(
    params: HstuParams,
    cfg: HstuConfig,
    rows: jax.Array,
    *,
    times: jax.Array | None = None,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """The query vectors, [B, T, D] of length 1: at each position, what is looked for after the items up to it.

    rows: [B, T] int32, T <= S, -1 on the right. times: [B, T + 1] int32 where cfg.timed: the seconds of each event from
    an origin of the history's own, and after the last event the time that is asked for. dropout: (x, key) -> x on the
    embedding and on W_o's input; needs key. key: for training, which has gradients.
    """
    keys = None if key is None else jax.random.split(key, cfg.layers + 1)
    h = _embed(params, cfg, rows, jnp.arange(rows.shape[1])[None])
    if dropout is not None and keys is not None:
        h = dropout(h, keys[-1])
    rest = None if keys is None else keys[:-1]
    lengths = (rows >= 0).sum(axis=1)
    return unit(blocks(params.layers, cfg, h, lengths, times, dropout=dropout, keys=rest))


def output(params: HstuParams, rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """The items' output vectors, [n, D] of length 1, and no bias: an item's score is its product with the query.

    rows: the items; None: all of them.
    """
    return unit(params.embed if rows is None else split.rows(params.embed, rows)), None


class History(NamedTuple):
    """Users' events with the keys and values of all layers, at absolute positions (MODEL-12).

    k: [L, B, H, S, a]. v: [L, B, H, S, b]. rows: [B, S] int32, -1 after the last event. times: [B, S] int32, in seconds
    from an origin per user that never changes; used only if cfg.timed.
    """

    k: jax.Array
    v: jax.Array
    rows: jax.Array
    times: jax.Array


def begin(
    params: HstuParams, cfg: HstuConfig, rows: jax.Array, times: jax.Array | None = None
) -> tuple[jax.Array, History]:
    """Read whole histories at once: equals `extend` of `empty` users. rows: [B, S]; times: [B, S + 1], see `encode`."""
    lengths = (rows >= 0).sum(axis=1)
    h = _embed(params, cfg, rows, jnp.arange(rows.shape[1])[None])
    h, (k, v) = _blocks(params.layers, cfg, h, lengths, times, None, None, keep=True)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    after = unit(jnp.take_along_axis(h, last, axis=1)[:, 0])
    return after, History(k, v, rows, jnp.zeros_like(rows) if times is None else times[:, :-1])


def empty(cfg: HstuConfig, batch: int) -> History:
    """Users without events."""
    places = (batch, cfg.max_items)
    k, v = (
        jnp.zeros((cfg.layers, batch, cfg.heads, cfg.max_items, dim), jnp.float32)
        for dim in (cfg.qk_dim, cfg.v_dim)
    )
    return History(k, v, jnp.full(places, -1, jnp.int32), jnp.zeros(places, jnp.int32))


def extend(
    params: HstuParams, cfg: HstuConfig, history: History, rows: jax.Array, times: jax.Array | None = None
) -> tuple[jax.Array, History]:
    """Add new events: the query vector after all events, [B, D] of length 1, and the history with the new ones.

    The result is that of `encode` over all events, at the cost of the new ones and of the newest before them. That one
    is computed again: its bias held the time of the last request, and now holds the time of the event that came. All
    others are final.

    rows: [B, m] int32 new events, -1 on the right, any number for each user; none: ask again at another time. times:
    [B, m + 1] int32 where cfg.timed, as of `encode`. Raises WindowSlides where a user would have more than S events:
    positions count from the start of the window, so a window that slides changes every row. Begin again from `empty`
    with the latest events, fewer than S of them, so that the history can grow.
    """
    counts = (history.rows >= 0).sum(axis=1) + (rows >= 0).sum(axis=1)
    if counts.size and int(counts.max()) > cfg.max_items:
        raise WindowSlides(f"{int(counts.max())} events, the window holds {cfg.max_items}: it would slide")
    if cfg.timed and times is None:
        raise ValueError("this HSTU's bias depends on times: they must be given")
    if times is None:
        times = jnp.zeros((rows.shape[0], rows.shape[1] + 1), jnp.int32)
    appended: tuple[jax.Array, History] = append(params, history, rows, times, cfg=cfg)
    return appended


@functools.partial(jax.jit, static_argnames="cfg")
def append(
    params: HstuParams, history: History, rows: jax.Array, times: jax.Array, *, cfg: HstuConfig
) -> tuple[jax.Array, History]:
    """`extend`, for programs: the caller has seen to it that no window slides. times: read only where cfg.timed."""
    batch, new = rows.shape
    before = (history.rows >= 0).sum(axis=1)[:, None]
    total = before + (rows >= 0).sum(axis=1)[:, None]
    places = jnp.arange(cfg.max_items + 1)[None]

    def joined(old: jax.Array, added: jax.Array) -> jax.Array:  # [B, S + 1]
        fresh = jnp.take_along_axis(added, jnp.clip(places - before, 0, new), axis=1)
        return jnp.where(places < before, jnp.pad(old, ((0, 0), (0, 1))), fresh)

    all_times = joined(history.times, times)
    all_rows = jnp.where(places < total, joined(history.rows, jnp.pad(rows, ((0, 0), (0, 1)))), -1)
    first = jnp.maximum(before - 1, 0)
    at = first + jnp.arange(new + 1)[None]
    own = jnp.take_along_axis(all_rows, jnp.minimum(at, cfg.max_items), axis=1)
    asked = jnp.take_along_axis(all_times, jnp.minimum(at + 1, cfg.max_items), axis=1)

    def described(rows: jax.Array, places: jax.Array) -> Tokens:
        zeros, places = jnp.zeros_like(rows), jnp.broadcast_to(places, rows.shape)
        return Tokens(jnp.where(rows >= 0, 0, -1), zeros, zeros + int(Kind.USER), places, places)

    tokens, keys = described(own, at), described(all_rows[:, :-1], places[:, :-1])
    slots = jnp.where(own >= 0, at, cfg.max_items)  # out of bounds: not stored
    rows_of = jnp.arange(batch)[:, None]

    def layer_step(h: jax.Array, xs: tuple[HstuLayer, jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        layer, *cached = xs
        stored: list[jax.Array] = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: Bias | None) -> jax.Array:
            for old, fresh in zip(cached, (k, v), strict=True):
                stored.append(old.at[rows_of, :, slots].set(fresh.transpose(0, 2, 1, 3), mode="drop"))
            return biased_attention(
                q, stored[0], stored[1], tokens, keys=keys, bias=bias,
                query_times=asked if cfg.timed else None, key_times=all_times[:, :-1] if cfg.timed else None,
                activation="silu", divisor=cfg.length,
            )  # fmt: skip

        return _layer(layer, cfg, h, attend, lambda x: x), tuple(stored)

    h = _embed(params, cfg, own, jnp.minimum(at, cfg.length - 1))
    h, (k, v) = jax.lax.scan(layer_step, h, (params.layers, history.k, history.v))
    last = jnp.maximum(total - 1 - first, 0)[..., None]
    after = unit(jnp.take_along_axis(h, last, axis=1)[:, 0])
    return after, History(k, v, all_rows[:, :-1], all_times[:, :-1])
