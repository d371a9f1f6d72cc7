# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch of prompts onto themselves (MODEL-1): causal with right padding, or under any dense mask."""

from __future__ import annotations

import jax

from jgr.ops.dispatch import Implementation, dispatch
from jgr.ops.prefill_attention import reference, xla

IMPLEMENTATIONS = (
    Implementation("xla", xla.prefill_attention, xla.supports),
    Implementation("reference", reference.prefill_attention),
)


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    mask: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(q k^T / sqrt(d) + mask) v with grouped key/value heads; softmax in float32.

    Args:
        q: [B, T, H, d].
        k, v: [B, K, T, d], H a multiple of K; query head h reads key/value head h // (H / K).
        lengths: [B] int32; row b's tokens at lengths[b] and beyond are padding, whatever they hold.
        mask: [B, T, T] bool, mask[b, i, j]: token i sees token j. None: token i sees every j <= i.

    Returns:
        [B, T, H, d] in q's dtype. Rows of padding tokens, and rows that see nothing, are finite and meaningless.
    """
    out: jax.Array = dispatch("prefill_attention", IMPLEMENTATIONS, implementation, q, k, v, lengths, mask)
    return out
