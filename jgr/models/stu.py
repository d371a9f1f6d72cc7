# SPDX-License-Identifier: Apache-2.0
"""HSTU's layers as in DLRMv3, the STU, over a user's context, history and candidates (MODEL-14, MODEL-15).

    per layer:  u, v, q, k = norm(h) W + beta;  u = silu(u)
                o_i = sum over what i sees of silu(q_i . k_j / sqrt(a)) / N * v_j
                h += [u, o, u * norm'(o)] W_o

No bias of positions or times: those are in the input (`jgr.models.stu_scorer`). N is the checkpoint's, the same for
the whole of a prompt and for its parts, so a prompt may be computed in parts: a part reads the keys and values of those
before it. Contextual slots see each other and the history; history rows the context and the rows before them;
candidates both and themselves, never one another.

Letters: B batch, T new rows, S rows before, L layers, D hidden, H heads, a and b width of a query and of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.models.hstu import split_uvqk, standard
from jgr.models.params import Spec
from jgr.ops.biased_attention import Context, biased_attention
from jgr.ops.dense import dense
from jgr.prompt.layouts import SINGLE_USER_MULTI_ITEM, Kind, Tokens

_EVERYTHING = 2**30


@dataclass(frozen=True)
class StuConfig:
    """Architecture only. length: N. contextual: slots in front of the history.

    max_attention: how many events back a row sees, 0: all. The last `full_rows` of the history see all, and where
    there are such rows, candidates too. group_norm: whether norm' is taken over each head, with one scale and bias
    each.
    """

    hidden: int
    layers: int
    heads: int
    qk_dim: int
    v_dim: int
    length: int
    contextual: int = 0
    max_attention: int = 0
    full_rows: int = 0
    group_norm: bool = False

    @property
    def gated(self) -> int:
        """How many vectors of H b numbers W_o takes."""
        return 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StuLayer:
    """The weights of all layers, with leading axis L on every leaf. The scales of norms are stored minus 1."""

    input_norm: Any  # [L, 2, D]: scale, bias
    uvqk: Any  # [L, D, 2 H b + 2 H a], in the order u, v, q, k
    beta: Any  # [L, 1, 2 H b + 2 H a]: bias of u, v, q and k
    output_norm: Any  # [L, 2, H b]: scale and bias of norm'; [L, 2, H] with group_norm
    out: Any  # [L, 3 H b, D]: output projection of [u, o, u * norm'(o)]


class Past(NamedTuple):
    """Rows that were computed before: k [L, B, H, S, a], v [L, B, H, S, b], tokens [B, S] each."""

    k: jax.Array
    v: jax.Array
    tokens: Tokens


def spec(cfg: StuConfig) -> StuLayer:
    """The declaration of every parameter."""
    n, hidden, values = cfg.layers, cfg.hidden, cfg.heads * cfg.v_dim
    width, normed = 2 * (values + cfg.heads * cfg.qk_dim), cfg.heads if cfg.group_norm else values
    return StuLayer(
        input_norm=Spec((n, 2, hidden), ("layer", "norm", "embed"), "zeros"),
        uvqk=Spec((n, hidden, width), ("layer", "embed", "heads"), fan_in=hidden),
        beta=Spec((n, 1, width), ("layer", "one", "heads"), "zeros"),
        output_norm=Spec((n, 2, normed), ("layer", "norm", "heads"), "zeros"),
        out=Spec((n, 3 * values, hidden), ("layer", "heads", "embed"), fan_in=3 * values),
    )


def describe(
    cfg: StuConfig, history_ends: jax.Array, ends: jax.Array, starts: jax.Array | int, rows: int
) -> Tokens:
    """Describe `rows` rows of each prompt, from its row `starts` on, as Tokens of [B, rows] each (MODEL-14).

    history_ends: [B] int32, the rows of context and history; ends: [B] int32, with the candidates. Further rows are
    padding.
    """
    context = cfg.contextual
    place = jnp.broadcast_to(
        jnp.reshape(starts, (-1, 1)) + jnp.arange(rows, dtype=jnp.int32), (len(ends), rows)
    )
    number = place - history_ends[:, None]
    candidate, slot = number >= 0, place < context
    kind = jnp.where(candidate, int(Kind.ITEM), jnp.where(slot, int(Kind.CONTEXT), int(Kind.USER)))
    segment = jnp.where(candidate, 2 + number, jnp.where(slot, 0, 1))
    order = jnp.minimum(_number(cfg, place), _number(cfg, history_ends)[:, None])
    return Tokens(jnp.where(place < ends[:, None], 0, -1), segment, kind, order, place)


def _number(cfg: StuConfig, place: jax.Array) -> jax.Array:
    """The attention id of a place: 0 in the context, then one more for each event; candidates have that of the end."""
    return jnp.maximum(place - cfg.contextual + 1, 0) if cfg.contextual else place


def window(cfg: StuConfig, tokens: Tokens, history_ends: jax.Array) -> jax.Array | None:
    """[B, T] int32: how many events back a row sees; None: all rows see everything. Arguments as of `describe`."""
    if not cfg.max_attention:
        return None
    narrow = jnp.full_like(tokens.order, cfg.max_attention)
    if not cfg.full_rows:
        return narrow
    return jnp.where(tokens.order >= _number(cfg, history_ends)[:, None] - cfg.full_rows, _EVERYTHING, narrow)


def _affine(x: jax.Array, scale_bias: jax.Array) -> jax.Array:
    return x * (1 + scale_bias[0]) + scale_bias[1]


def layers(
    weights: StuLayer,
    cfg: StuConfig,
    h: jax.Array,
    tokens: Tokens,
    history_ends: jax.Array,
    past: Past | None = None,
) -> tuple[jax.Array, Past]:
    """The stack over rows h [B, T, D] that `describe` describes: [B, T, D], and their keys and values.

    history_ends: [B] int32, as for `describe`. past: the rows before, computed with the same history: the result is
    then that of one pass over all rows. Rows of padding have no effect, and their results no meaning.
    """
    reach = window(cfg, tokens, history_ends)

    def layer_step(h: jax.Array, xs: tuple[StuLayer, Any]) -> tuple[jax.Array, Any]:
        layer, cached = xs
        x = dense(_affine(standard(h), layer.input_norm), layer.uvqk) + layer.beta
        u, v, q, k = split_uvqk(x, cfg.heads, cfg.qk_dim, cfg.v_dim)
        context = None if past is None else Context(cached[0], cached[1], past.tokens)
        out = biased_attention(
            q, k, v, tokens, SINGLE_USER_MULTI_ITEM, context=context, window=reach,
            activation="silu", scale=cfg.qk_dim**-0.5, divisor=cfg.length,
        )  # fmt: skip
        u, o = jax.nn.silu(u), out.reshape(u.shape)
        if cfg.group_norm:
            normed = _affine(standard(out), layer.output_norm[..., None]).reshape(u.shape)
        else:
            normed = _affine(standard(o), layer.output_norm)
        return h + dense(jnp.concatenate([u, o, u * normed], axis=-1), layer.out), (k, v)

    before = None if past is None else (past.k, past.v)
    h, (k, v) = jax.lax.scan(layer_step, h, (weights, before))
    return h, Past(k, v, tokens)
