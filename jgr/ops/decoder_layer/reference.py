# SPDX-License-Identifier: Apache-2.0
"""Both ops by their formulas, statistics in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops.decoder_layer.arguments import Inputs, Matrices, Output
from jgr.ops.dense import dense


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 / jnp.sqrt((x32**2).mean(-1, keepdims=True) + eps)).astype(x.dtype) * weight


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x: [B, T, heads, d]; cos, sin: [B, T, 1, d / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attention_inputs(call: Inputs) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """See jgr.ops.decoder_layer."""
    w: Any = jax.tree.map(lambda stack: stack[call.number], call.weights)
    x = _norm(call.h, w.norm, call.eps)

    def heads(weight: Matrices, bias: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        y = dense(x, weight) if bias is None else dense(x, weight) + bias
        y = y.reshape(*y.shape[:2], -1, call.head)
        return y if scale is None else _norm(y, scale, call.eps)

    q = _turn(heads(w.wq, w.bq, w.q_norm), call.cos, call.sin) if call.wants_queries else None
    k = _turn(heads(w.wk, w.bk, w.k_norm), call.cos, call.sin)
    return q, k.swapaxes(1, 2), heads(w.wv, w.bv, None).swapaxes(1, 2)


def layer_output(call: Output) -> jax.Array:
    """See jgr.ops.decoder_layer."""
    w: Any = jax.tree.map(lambda stack: stack[call.number], call.weights)
    h = call.h + dense(call.attended, w.wo)
    x = _norm(h, w.norm, call.eps)
    gate = dense(x, w.gate)
    out: jax.Array = h + dense(gate * jax.nn.sigmoid(gate) * dense(x, w.up), w.down)
    return out
