# SPDX-License-Identifier: Apache-2.0
"""Segment attention by the library jgr-native: one pass over blocks of 96 keys that stay in a core's cache.

A block has as many queries, of the heads that share a key/value head, as a panel has columns; they stand in the lanes
of vectors, so that the softmax needs nothing across lanes. Pairs of blocks are left out by the rule of
`visibility.relation`. No gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops import native
from jgr.ops.segment_attention.visibility import Arguments, Keys, Queries, prepare

_LEAST = -(2**31)


def supports(call: Arguments) -> str | None:
    """Why the form cannot run, or None."""
    arrays = [call.q, call.k, call.v]
    if call.context is not None:
        arrays += [call.context.k, call.context.v]
    return native.unusable(*arrays, head=call.q.shape[-1])


def segment_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.segment_attention."""
    queries, sources = prepare(call)
    keys: Any = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *(s.keys for s in sources))
    k, v = (jnp.concatenate([getattr(s, name) for s in sources], 2) for name in ("k", "v"))

    room = native.arranged_size(v.shape, v.dtype)
    out, _ = native.call("attention", [call.q.shape, (room,)], call.q, k, v, *stacked(queries, keys))
    return out


def stacked(queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """The vectors of queries [6, B, T] and of keys [4, B, S], as the library's calls over segments take them."""

    def filled(side: Queries | Keys, **otherwise: int) -> jax.Array:
        parts = [
            jnp.full_like(side.request, otherwise.get(name, 0)) if part is None else part
            for name, part in side._asdict().items()
        ]
        return jnp.stack(parts)

    return filled(queries, lowest=_LEAST), filled(keys)
