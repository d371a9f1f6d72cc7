# SPDX-License-Identifier: Apache-2.0
"""Climber's layers, over histories and over candidates, in the three builds of FLAME-7.

Blocks are computed side by side: their weights stand on an axis of their own, and attention sees a block of a user, a
group, as a row of its batch. The bias is looked up by the caller, once for all layers.

Letters as in jgr.models.climber: N_b blocks, G groups, T tokens of a group, s places of a history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jgr.models.hstu import standard
from jgr.models.params import Spec
from jgr.ops.biased_attention import Causal, Context, Targets, biased_attention
from jgr.ops.fused_linear import Activation, fused_linear

Build = Literal["op_by_op", "xla", "fused"]
"""How the layers are computed, all with the same result; `executors.build` of a server.

op_by_op: plain operations, not to be jitted: each is a program of its own, dispatched by the host. The layers' weights
    and a user's keys and values are tuples (`by_layer`).
xla: the same operations, jitted: one program.
fused: jitted, with the fused ops. On a GPU these are kernels (FLAME-8, 9). On a CPU attention takes tiles that fit
    its cache and leaves out the unseen ones, and a linear layer is what XLA makes of the plain one.
"""

_MASKED = -1e30  # finite, since the difference of two infinities is not a number
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""An attention: (q [G, T, H, h], k and v [G, H, T, h] of the same tokens) -> [G, T, H, h]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """The weights of all layers, with leading axes L and N_b on every leaf. The scales of norms are stored minus 1."""

    attention_scale: Any  # [L, N_b, D]: scale of the norm before attention
    attention_shift: Any  # [L, N_b, D]: its shift
    qkv: Any  # [L, N_b, D, 3 D]: projection to queries, keys and values
    out: Any  # [L, N_b, D, D]: output projection of attention
    out_bias: Any  # [L, N_b, D]: its bias
    mlp_scale: Any  # [L, N_b, D]: scale of the norm before the MLP
    mlp_shift: Any  # [L, N_b, D]: its shift
    up: Any  # [L, N_b, D, F]: first matrix of the MLP
    up_bias: Any  # [L, N_b, F]: its bias
    down: Any  # [L, N_b, F, D]: second matrix of the MLP
    down_bias: Any  # [L, N_b, D]: its bias


def layer_spec(layers: int, blocks: int, hidden: int, mlp: int) -> Layer:
    """The declaration of every parameter."""

    def zeros(width: int) -> Spec:
        return Spec((layers, blocks, width), ("layer", "blocks", "embed"), "zeros")

    def matrix(inner: int, width: int) -> Spec:
        return Spec((layers, blocks, inner, width), ("layer", "blocks", "embed", "mlp"), fan_in=inner)

    return Layer(
        attention_scale=zeros(hidden),
        attention_shift=zeros(hidden),
        qkv=matrix(hidden, 3 * hidden),
        out=matrix(hidden, hidden),
        out_bias=zeros(hidden),
        mlp_scale=zeros(hidden),
        mlp_shift=zeros(hidden),
        up=matrix(hidden, mlp),
        up_bias=zeros(mlp),
        down=matrix(mlp, hidden),
        down_bias=zeros(hidden),
    )


def linear(
    build: Build,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    norm: tuple[jax.Array, jax.Array] | None = None,
    activation: Activation = "none",
    residual: jax.Array | None = None,
) -> jax.Array:
    """activation(norm(x) w + bias) + residual for each block: x [N_b, n, D], w [N_b, D, F] -> [N_b, n, F].

    norm: its scale minus 1, and its shift.
    """
    if build == "fused":

        def of_block(x: jax.Array, w: jax.Array, bias: Any, norm: Any, residual: Any) -> jax.Array:
            scale, shift = (None, None) if norm is None else (1 + norm[0], norm[1])
            return fused_linear(
                x, w, bias, normalize=norm is not None, scale=scale, shift=shift, activation=activation,
                residual=residual,
            )  # fmt: skip

        out: jax.Array = jax.vmap(of_block)(x, w, bias, norm, residual)
        return out
    if norm is not None:
        scale, shift = norm
        x = (standard(x.astype(jnp.float32)) * (1 + scale[:, None]) + shift[:, None]).astype(w.dtype)
    x = x @ w
    if bias is not None:
        x = x + bias[:, None]
    if activation == "gelu":
        x = jax.nn.gelu(x, approximate=False)
    return x if residual is None else x + residual


def _layer(
    build: Build, layer: Layer, h: jax.Array, heads: int, attend: Attend
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The output [N_b, B, T, D] of one layer for its input h, and the layer's keys and values [G, H, T, D / H]."""
    blocks, batch, tokens, hidden = h.shape
    flat = h.reshape(blocks, batch * tokens, hidden)
    projected = linear(build, flat, layer.qkv, norm=(layer.attention_scale, layer.attention_shift))
    q, k, v = (x.reshape(blocks * batch, tokens, heads, -1) for x in jnp.split(projected, 3, axis=-1))
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = attend(q, k, v).reshape(flat.shape)
    flat = linear(build, out, layer.out, layer.out_bias, residual=flat)
    inner = linear(build, flat, layer.up, layer.up_bias, (layer.mlp_scale, layer.mlp_shift), "gelu")
    flat = linear(build, inner, layer.down, layer.down_bias, residual=flat)
    return flat.reshape(h.shape), (k, v)


def _each(build: Build, step: Callable[[Any, Any], tuple[Any, Any]], h: jax.Array, xs: Any) -> Any:
    """jax.lax.scan, or for op_by_op the same over tuples."""
    if build != "op_by_op":
        return jax.lax.scan(step, h, xs)
    kept: list[Any] = []
    for x in zip(*xs, strict=True):
        h, y = step(h, x)
        kept.append(y)
    return h, None if kept[0] is None else tuple(zip(*kept, strict=True))


def _by_softmax(logits: jax.Array, v: jax.Array) -> jax.Array:
    """logits [G, H, T, S], v [G, H, S, h] -> [G, H, T, h]."""
    return jnp.einsum("ghts,ghsd->ghtd", jax.nn.softmax(logits).astype(v.dtype), v)


def _attend_to_history(build: Build, lengths: jax.Array, bias: jax.Array, scale: jax.Array) -> Attend:
    if build == "fused":

        def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return biased_attention(q, k, v, Causal(lengths), bias=bias, scale=scale)

        return fused
    place = jnp.arange(bias.shape[-1])
    earlier = (place < place[:, None]) & (place < lengths[:, None, None, None])
    seen = earlier | (place == place[:, None])  # padding sees itself, so that its softmax stays finite
    bias, scale = jnp.where(seen, bias, _MASKED), scale[:, None, None, None]

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        product = jnp.einsum("gthd,ghsd->ghts", q, k, preferred_element_type=jnp.float32)
        return _by_softmax((product + bias) * scale, v).transpose(0, 2, 1, 3)

    return plain


def history_layers(
    build: Build,
    layers: Any,
    h: jax.Array,
    heads: int,
    lengths: jax.Array,
    bias: jax.Array,
    scale: jax.Array,
) -> tuple[Any, Any]:
    """Keys and values [L, G, H, s, h] of histories h [N_b, B, s, D]; each event sees itself and those before it.

    layers: Layer; for op_by_op a tuple of them, and so are keys and values. lengths: [G] int32. bias: [G, 1, s, s]
    float32. scale: [G] float32, 1 / temperature.
    """
    attend = _attend_to_history(build, lengths, bias, scale)

    def step(h: jax.Array, xs: tuple[Layer]) -> Any:
        return _layer(build, xs[0], h, heads, attend)

    kept: tuple[Any, Any] = _each(build, step, h, (layers,))[1]
    return kept


def _attend_to_user(
    build: Build, lengths: jax.Array, bias: jax.Array, scale: jax.Array
) -> Callable[[jax.Array, jax.Array], Attend]:
    """A function from k and v of the history to the attention of its candidates."""
    if build == "fused":

        def fused(cached_k: jax.Array, cached_v: jax.Array) -> Attend:
            context = Context(cached_k, cached_v, Causal(lengths))

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                every = Targets(jnp.full_like(lengths, q.shape[1]))
                return biased_attention(q, k, v, every, context=context, bias=bias, scale=scale)

            return attend

        return fused
    seen = jnp.arange(bias.shape[-1] - 1) < lengths[:, None, None, None]
    to_history = jnp.where(seen, bias[..., :-1], _MASKED)
    to_itself, scale = bias[..., -1:], scale[:, None, None, None]

    def plain(cached_k: jax.Array, cached_v: jax.Array) -> Attend:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            product = jnp.einsum("gthd,ghsd->ghts", q, cached_k, preferred_element_type=jnp.float32)
            own = jnp.einsum("gthd,ghtd->ght", q, k, preferred_element_type=jnp.float32)[..., None]
            logits = jnp.concatenate([product + to_history, own + to_itself], axis=-1) * scale
            weights = jax.nn.softmax(logits).astype(v.dtype)
            out = jnp.einsum("ghts,ghsd->ghtd", weights[..., :-1], cached_v) + weights[..., -1:] * v
            return out.transpose(0, 2, 1, 3)

        return attend

    return plain


def candidate_layers(
    build: Build,
    layers: Any,
    h: jax.Array,
    heads: int,
    k: Any,
    v: Any,
    lengths: jax.Array,
    bias: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, tuple[Any, Any]]:
    """The layers' output for candidates h [N_b, B, m, D], and the candidates' own keys and values.

    Each candidate sees the history and itself.
    k, v: from `history_layers`. bias: [G, 1, 1, s + 1], the last entry for the candidate itself. For the other
    arguments see `history_layers`.
    """
    attend_to = _attend_to_user(build, lengths, bias, scale)

    def step(h: jax.Array, xs: tuple[Layer, jax.Array, jax.Array]) -> Any:
        layer, cached_k, cached_v = xs
        return _layer(build, layer, h, heads, attend_to(cached_k, cached_v))

    out: tuple[jax.Array, tuple[Any, Any]] = _each(build, step, h, (layers, k, v))
    return out


def all_layers(
    build: Build,
    layers: Any,
    history: jax.Array,
    candidates: jax.Array,
    heads: int,
    lengths: jax.Array,
    bias: jax.Array,
    candidates_bias: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """The result of `history_layers` and `candidate_layers`, in one pass that keeps no keys and values."""
    places = history.shape[2]
    of_history = _attend_to_history(build, lengths, bias, scale)
    to_user = _attend_to_user(build, lengths, candidates_bias, scale)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        past = k[:, :, :places], v[:, :, :places]
        rest = k[:, :, places:], v[:, :, places:]
        parts = [of_history(q[:, :places], *past), to_user(*past)(q[:, places:], *rest)]
        return jnp.concatenate(parts, axis=1)

    def step(h: jax.Array, xs: tuple[Layer]) -> tuple[jax.Array, None]:
        return _layer(build, xs[0], h, heads, attend)[0], None

    h = jnp.concatenate([history, candidates], axis=2)
    out: jax.Array = _each(build, step, h, (layers,))[0]
    return out[:, :, places:]
