# SPDX-License-Identifier: Apache-2.0
"""How much attention each token of a prompt gets, by which the tokens are chosen that matter (RCLLM-10)."""

from __future__ import annotations

import jax

from jgr.ops.attention_mass import native, pallas_triton, reference, xla
from jgr.ops.dispatch import Implementation, dispatch, kernel, on_cpu
from jgr.ops.segment_attention.visibility import Arguments
from jgr.prompt.layouts import CAUSAL, Layout, Tokens

__all__ = ["IMPLEMENTATIONS", "attention_mass"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.attention_mass, pallas_triton.interpreted, pallas_triton.supports),
    on_cpu(native.attention_mass, native.supports),
    Implementation("xla", xla.attention_mass),
    Implementation("reference", reference.attention_mass),
)


def attention_mass(
    q: jax.Array,
    k: jax.Array,
    tokens: Tokens,
    layout: Layout | jax.Array = CAUSAL,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """The attention that each token gets from a query that sees it: the sum of its weights over all heads, on average.

    The average is over the queries that see the token, since early tokens are seen by more of them.

    Args:
        q: [B, T, H, d]; k: [B, K, T, d], of the same tokens; H is a multiple of K. As in segment_attention.
        tokens: fields [B, T], padding where request < 0. layout: a Layout, or [B, T] int32 bits of what queries see.

    Returns:
        [B, T] float32; 0 for padding and for what nobody sees.
    """
    call = Arguments(q, k, k, tokens, layout)
    out: jax.Array = dispatch("attention_mass", IMPLEMENTATIONS, implementation, call)
    return out
