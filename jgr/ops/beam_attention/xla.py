# SPDX-License-Identifier: Apache-2.0
"""Staged beam attention (XGR-5): the shared stage is one matmul for all beams of a request, the own stage a few rows.

The prompt's keys and values are read once per request, whatever the beam width; a log-sum-exp merges the two stages.
The own stage has at most depth - 1 keys a beam, too few for matmuls: it is a multiply and a sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.beam_attention.arguments import Arguments

MASKED = -1e30  # finite, so that a row that sees nothing does not become NaN


def beam_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.beam_attention."""
    q, context_k, context_v, lengths, beam_k, beam_v, ancestors, widths = call
    batch, width, heads, dim = q.shape
    _, kv_heads, tokens, _ = context_k.shape
    groups = call.groups
    q5 = (q * jnp.asarray(dim**-0.5, q.dtype)).reshape(batch, width, kv_heads, groups, dim)

    # Shared stage: [B, K, W * G, d] x [B, K, T, d].
    rows = q5.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, width * groups, dim)
    real = jnp.arange(tokens) < lengths[:, None]
    values = jnp.where(real[:, None, :, None], context_v, jnp.zeros((), context_v.dtype))
    scores = jnp.einsum("bkrd,bktd->bkrt", rows, context_k, preferred_element_type=jnp.float32)
    scores = jnp.where(real[:, None, None, :], scores, MASKED)
    shared_max = scores.max(axis=-1)
    weights = jnp.exp(scores - shared_max[..., None])
    shared_sum = weights.sum(axis=-1)
    shared_out = jnp.einsum(
        "bkrt,bktd->bkrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )

    def by_beam(x: jax.Array) -> jax.Array:  # [B, K, W * G, ...] -> [B, W, K, G, ...]
        return jnp.moveaxis(x.reshape(batch, kv_heads, width, groups, *x.shape[3:]), 2, 1)

    # Own stage: [B, S, W, K, G].
    own_k, own_v = (x.astype(jnp.float32) for x in (_rows(beam_k, ancestors), _rows(beam_v, ancestors)))
    own_scores = (q5.astype(jnp.float32)[:, None] * own_k[:, :, :, :, None]).sum(axis=-1)

    # Merge. The query's own slot is always there, so the total is never empty, even for a prompt of length 0.
    top = jnp.maximum(by_beam(shared_max), own_scores.max(axis=1))
    own_weights = jnp.exp(own_scores - top[:, None])
    rescale = jnp.exp(by_beam(shared_max) - top)
    total = by_beam(shared_sum) * rescale + own_weights.sum(axis=1)
    out = by_beam(shared_out) * rescale[..., None] + (own_weights[..., None] * own_v[:, :, :, :, None]).sum(
        axis=1
    )
    out = (out / total[..., None]).reshape(batch, width, heads, dim).astype(q.dtype)
    if widths is not None:
        out = jnp.where(
            (jnp.arange(width) < widths[:, None])[:, :, None, None], out, jnp.zeros((), out.dtype)
        )
    return out


def _rows(own: jax.Array, ancestors: jax.Array | None) -> jax.Array:
    """The slots of each beam: [B, S, W, K, d]."""
    return own if ancestors is None else jnp.take_along_axis(own, ancestors[..., None, None], axis=2)
