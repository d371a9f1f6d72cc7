# SPDX-License-Identifier: Apache-2.0
"""Beam attention by the formula: a copy of the prompt and the own tokens for each beam, one softmax over both."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.beam_attention.arguments import Arguments


def beam_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.beam_attention."""
    q, context_k, context_v, lengths, beam_k, beam_v, ancestors, widths = call
    batch, width, _, dim = q.shape
    _, kv_heads, tokens, _ = context_k.shape
    slots = beam_k.shape[1]

    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.arange(width), (batch, slots, width))

    def whole(context: jax.Array, own: jax.Array) -> jax.Array:  # [B, W, H, T + S, d]
        rows = jnp.take_along_axis(own, ancestors[:, :, :, None, None], axis=2).transpose(0, 2, 3, 1, 4)
        shared = jnp.broadcast_to(context[:, None], (batch, width, kv_heads, tokens, dim))
        return jnp.repeat(jnp.concatenate([shared, rows], axis=3), call.groups, axis=2).astype(jnp.float32)

    visible = (jnp.arange(tokens + slots) < lengths[:, None]) | (jnp.arange(tokens + slots) >= tokens)
    scores = jnp.einsum("bwhd,bwhsd->bwhs", q.astype(jnp.float32), whole(context_k, beam_k))
    scores = scores / jnp.sqrt(jnp.float32(dim))
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    values = jnp.where(visible[:, None, None, :, None], whole(context_v, beam_v), 0.0)
    out = jnp.einsum("bwhs,bwhsd->bwhd", weights, values).astype(q.dtype)
    if widths is not None:
        out = jnp.where((jnp.arange(width) < widths[:, None])[:, :, None, None], out, 0)
    return out
