# SPDX-License-Identifier: Apache-2.0
"""Both ops by the library jgr-native: ranges of some 96 rows, whose activations stay in a core's cache from the norm to
the last product. Padding is not computed, so that a prompt takes time by its own length and not by that of the compiled
shape; it gets zeros. Weights are packed into panels first, once a call, unless they are Tiled. No gradients.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jgr.ops import native
from jgr.ops.decoder_layer.arguments import Inputs, Matrices, Output
from jgr.ops.quantized import Quantized
from jgr.ops.tiled import Tiled

LEAST_ROWS = 64
"""With fewer rows packing costs more than it gains. In bfloat16 matrices are packed already, those of 8 bits apart."""


def supports(call: Inputs | Output) -> str | None:
    """Why the form cannot run, or None."""
    is_packed = any(map(_is_quantized, call.weights)) or call.h.dtype == jnp.float32
    if is_packed and math.prod(call.h.shape[:2]) < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} rows"
    whole = jax.tree.map(
        lambda w: None if isinstance(w, Quantized) else w, call.weights, is_leaf=_is_quantized
    )
    head = call.head if isinstance(call, Inputs) else native.HEAD
    return native.unusable(call.h, *jax.tree.leaves(whole), head=head)


def _real(call: Inputs | Output) -> jax.Array:
    return jnp.ones(call.h.shape[:2], jnp.int32) if call.real is None else call.real.astype(jnp.int32)


def _is_quantized(w: object) -> bool:
    return isinstance(w, Quantized)


def _stored(*stacks: Matrices) -> tuple[list[jax.Array], list[jax.Array]]:
    """The numbers of stacks of matrices, and their factors, of no columns where there are none.

    The library applies factors when it packs a matrix, whose floats are there then in any case.
    """
    numbers = [w.values if isinstance(w, Quantized | Tiled) else w for w in stacks]
    none = jnp.zeros((stacks[0].shape[0], 0), jnp.float32)
    return numbers, [w.scale if isinstance(w, Quantized) else none for w in stacks]


def _room(h: jax.Array, *stacks: Matrices) -> int:
    """Numbers of the working memory in which a layer's matrices are packed, those that are not tiled already."""
    matrices = [(w.shape[1], w.shape[2]) for w in stacks if not isinstance(w, Tiled)]
    return native.packed_size(h.dtype, *matrices)


def attention_inputs(call: Inputs) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """See jgr.ops.decoder_layer."""
    w, (batch, tokens, hidden) = call.weights, call.h.shape
    layers = w.norm.shape[0]
    none = jnp.zeros((layers, 0), call.h.dtype)
    wq, bq, q_norm = w.wq, w.bq, w.q_norm
    if not call.wants_queries:
        wq, bq, q_norm = jnp.zeros((layers, hidden, 0), call.h.dtype), None, None
    heads, kv_heads = wq.shape[2] // call.head, w.wk.shape[2] // call.head
    kv = batch, kv_heads, tokens, call.head
    room = _room(call.h, wq, w.wk, w.wv)
    numbers, scales = _stored(wq, w.wk, w.wv)
    q, k, v, _ = native.call(
        "inputs",
        [(batch, tokens, heads, call.head), kv, kv, (room,)],
        call.h,
        _real(call),
        jnp.reshape(call.number, (1,)).astype(jnp.int32),
        call.cos,
        call.sin,
        w.norm,
        *numbers,
        *scales,
        *(none if x is None else x for x in (bq, w.bk, w.bv, q_norm, w.k_norm)),
        eps=call.eps,
    )
    return (q if call.wants_queries else None), k, v


def layer_output(call: Output) -> jax.Array:
    """See jgr.ops.decoder_layer."""
    w = call.weights
    room = _room(call.h, w.wo, w.gate, w.up, w.down)
    number = jnp.reshape(call.number, (1,)).astype(jnp.int32)
    (wo, *mlp_numbers), scales = _stored(w.wo, w.gate, w.up, w.down)
    out, _ = native.call(
        "output", [call.h.shape, (room,)], call.h, call.attended, _real(call), number, wo, w.norm, *mlp_numbers,
        *scales, eps=call.eps, mlp=w.gate.shape[2],
    )  # fmt: skip
    return out
