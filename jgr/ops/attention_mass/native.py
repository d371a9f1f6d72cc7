# SPDX-License-Identifier: Apache-2.0
"""Attention mass by the library jgr-native: a block of queries at a time, whose scores stay in a core's cache.

Blocks are those of segment attention's form. In float32 only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops import native
from jgr.ops.segment_attention.native import stacked
from jgr.ops.segment_attention.visibility import Arguments, prepare


def supports(call: Arguments) -> str | None:
    """Why the form cannot run, or None."""
    if call.q.dtype != jnp.float32:
        return f"the library has no attention mass for {call.q.dtype}"
    return native.unusable(call.q, call.k, head=call.q.shape[-1])


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    queries, (source,) = prepare(call)
    made = [jax.ShapeDtypeStruct(queries.request.shape, jnp.float32)]
    (out,) = native.call("attention_mass", made, call.q, source.k, *stacked(queries, source.keys))
    return out
