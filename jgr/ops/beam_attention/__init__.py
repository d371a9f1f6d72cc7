# SPDX-License-Identifier: Apache-2.0
"""Attention of a decode step's beams: over the prompt, stored once, and over each beam's few tokens (XGR-5)."""

from __future__ import annotations

import jax

from jgr.ops.beam_attention import reference, xla
from jgr.ops.dispatch import Implementation, dispatch

IMPLEMENTATIONS = (
    Implementation("xla", xla.beam_attention),
    Implementation("reference", reference.beam_attention),
)


def beam_attention(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    lengths: jax.Array,
    beam_k: jax.Array,
    beam_v: jax.Array,
    ancestors: jax.Array,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """softmax over [prompt ; own slots] with grouped key/value heads; softmax in float32.

    Args:
        q: [B, W, H, d], one query per beam.
        context_k, context_v: [B, K, T, d], the prompt, shared by the W beams of a request.
        lengths: [B] int32, prompt tokens of each request; what stands beyond is never read into an answer.
        beam_k, beam_v: [B, S, W, K, d], slot s holds the keys and values of the s-th generated token of row w.
        ancestors: [B, S, W] int32; beam w's s-th token stands in row ancestors[b, s, w] of slot s (XGR-4, the table
            variant: beams are re-ordered by moving indices, not keys and values). The last slot is the query's own.

    Returns:
        [B, W, H, d] in q's dtype.
    """
    out: jax.Array = dispatch(
        "beam_attention",
        IMPLEMENTATIONS,
        implementation,
        q,
        context_k,
        context_v,
        lengths,
        beam_k,
        beam_v,
        ancestors,
    )
    return out
