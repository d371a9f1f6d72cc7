# SPDX-License-Identifier: Apache-2.0
"""The logits of tokens: products of hidden states with the tokens' output rows, in float32 (MODEL-1)."""

from __future__ import annotations

import jax

from jgr.ops.dispatch import Implementation, dispatch, on_cpu
from jgr.ops.token_logits import native, reference

__all__ = ["IMPLEMENTATIONS", "token_logits"]

IMPLEMENTATIONS = (
    on_cpu(native.token_logits, native.supports),
    Implementation("reference", reference.token_logits),
)


def token_logits(hidden: jax.Array, head: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """hidden [..., D] times head [V, D] of the same dtype: [..., V] float32."""
    made: jax.Array = dispatch("token_logits", IMPLEMENTATIONS, implementation, hidden, head)
    return made
