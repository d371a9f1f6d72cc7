# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts made of segments, in every layout, padded or packed, with a cached context in front."""

from __future__ import annotations

import jax

from jgr.ops.dispatch import Implementation, dispatch, kernel
from jgr.ops.segment_attention import pallas_triton, reference, xla
from jgr.ops.segment_attention.visibility import Arguments, Causal, Context
from jgr.prompt.layouts import CAUSAL, Layout, Tokens

__all__ = ["IMPLEMENTATIONS", "Arguments", "Causal", "Context", "segment_attention"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.segment_attention, pallas_triton.interpreted, pallas_triton.supports),
    Implementation("xla", xla.segment_attention),
    Implementation("reference", reference.segment_attention),
)


def segment_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens | Causal,
    layout: Layout | jax.Array = CAUSAL,
    *,
    keys: Tokens | None = None,
    context: Context | None = None,
    window: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v over the keys that each query sees, with grouped key/value heads; softmax in float32.

    A query sees a key iff both are of the same request and either of the same segment, the key's order not larger, or
    the layout lets the query's kind see the key's. The rule is evaluated on the fly; no T x T mask exists.

    Args:
        q: [B, T, H, d]. Rows are independent. A row may hold one request and padding, or several requests, packed.
        k, v: [B, K, S, d] of the new tokens, H a multiple of K; query head h reads key/value head h // (H / K).
        tokens: of the queries, [B, T] each, padding wherever request < 0; or Causal(lengths [B]): row b is one plain
            causal prompt. What stands in padding has no effect. Gradients: for Causal without context and options only.
        layout: a Layout; or [B, T] int32, of each query `Layout.bits[kind]`, where requests of several layouts meet.
        keys: the tokens of k and v, [B, S], where they are not the queries' own.
        context: keys and values in front of the new ones; with Causal tokens, its tokens are Causal too.
        window: [B, T] int32; a query sees only keys whose order is at least its own less its window.

    Returns:
        [B, T, H, d] in q's dtype; 0 for padding and for queries that see nothing.
    """
    call = Arguments(q, k, v, tokens, layout, keys, context, window)
    out: jax.Array = dispatch("segment_attention", IMPLEMENTATIONS, implementation, call)
    return out
