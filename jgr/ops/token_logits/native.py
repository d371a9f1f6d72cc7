# SPDX-License-Identifier: Apache-2.0
"""Logits in bfloat16 by the library jgr-native: the output rows are read once and stay 16 bits wide.

XLA for CPUs makes float32 of all of them in every call. In float32 it does as well as the library would. No gradients.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jgr.ops import native

LEAST_ROWS = 16
"""The fewest tokens: the rows of a tile."""
PANEL = 32
"""Hidden states that are multiplied at a time."""


def supports(hidden: jax.Array, head: jax.Array) -> str | None:
    """Why the form cannot run, or None."""
    if hidden.dtype != jnp.bfloat16:
        return "it is for bfloat16"
    if head.shape[0] < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} tokens"
    return native.unusable(hidden, head, head=head.shape[1])


def token_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """See jgr.ops.token_logits."""
    (tokens, size), rows = head.shape, math.prod(hidden.shape[:-1])
    made = jax.ShapeDtypeStruct((rows, tokens), jnp.float32)
    room = (-(-rows // PANEL) * PANEL * size,)
    out, _ = native.call("token_logits", [made, room], hidden.reshape(rows, size), head)
    return out.reshape(*hidden.shape[:-1], tokens)
