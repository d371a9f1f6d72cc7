# SPDX-License-Identifier: Apache-2.0
"""The heads that an attention takes, of one product with the weights of queries, keys and values (MODEL-1, 2)."""

from __future__ import annotations

import jax

from jgr.ops.dispatch import Implementation, dispatch, kernel
from jgr.ops.turned_heads import pallas_triton, reference
from jgr.ops.turned_heads.arguments import Arguments

__all__ = ["IMPLEMENTATIONS", "turned_heads"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.turned_heads, pallas_triton.interpreted, pallas_triton.supports),
    Implementation("reference", reference.turned_heads),
)


def turned_heads(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    *,
    kv_heads: int,
    head: int,
    eps: float,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The heads of x + bias; those of q and k are normed and turned.

    Args:
        x: [B, T, (H + 2 K) d], queries, keys and values side by side.
        cos, sin: [B, T, 1, d / 2] float32; dimension i of a head is turned with i + d / 2.
        bias: [(H + 2 K) d], or None for none.
        q_norm, k_norm: [d], the scale of the norm of each head; both or neither.
        kv_heads: K. head: d, an even number. eps: of the norms.

    Returns:
        q [B, T, H, d], k and v [B, T, K, d].
    """
    call = Arguments(x, cos, sin, bias, q_norm, k_norm, kv_heads, head, eps)
    made: tuple[jax.Array, jax.Array, jax.Array] = dispatch(
        "turned_heads", IMPLEMENTATIONS, implementation, call
    )
    return made
