# SPDX-License-Identifier: Apache-2.0
"""The heads by their formulas, statistics and turns in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.rms_norm import rms_norm
from jgr.ops.turned_heads.arguments import Arguments


def turned_heads(call: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See jgr.ops.turned_heads."""
    x = call.x if call.bias is None else call.x + call.bias
    x = x.reshape(*x.shape[:-1], -1, call.head)
    q, k, v = jnp.split(x, [call.heads, call.heads + call.kv_heads], axis=-2)
    if call.q_norm is not None and call.k_norm is not None:
        q, k = rms_norm(q, call.q_norm, call.eps), rms_norm(k, call.k_norm, call.eps)
    return _turn(q, call.cos, call.sin), _turn(k, call.cos, call.sin), v


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
