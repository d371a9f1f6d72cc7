# SPDX-License-Identifier: Apache-2.0
"""Beam attention by the library jgr-native: one pass over the prompt in blocks of 96 keys that stay in a core's cache.

A block has as many queries, of the beams and the heads that share a key/value head, as a panel has columns; they stand
in the lanes of vectors. XLA's form writes a score for every beam and key and reads them again, several times: with many
beams they are more than a cache holds. No gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops import native
from jgr.ops.beam_attention.arguments import Arguments

LEAST_ROWS = 32
"""With fewer beams times heads of a group most lanes of a panel are empty; XLA's bfloat16 is slower even so."""


def supports(call: Arguments) -> str | None:
    """Why the form cannot run, or None."""
    if call.q.dtype == jnp.float32 and call.q.shape[1] * call.groups < LEAST_ROWS:
        return f"fewer than {LEAST_ROWS} queries of a key/value head"
    arrays = call.q, call.context_k, call.context_v, call.beam_k, call.beam_v
    return native.unusable(*arrays, head=call.q.shape[-1])


def beam_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.beam_attention."""
    batch, slots, width = call.beam_k.shape[:3]
    ancestors, widths = call.ancestors, call.widths
    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, slots, width))
    if widths is None:
        widths = jnp.full(batch, width, jnp.int32)
    out, _ = native.call(
        "beam_attention",
        [call.q.shape, (native.arranged_size(call.context_v.shape, call.q.dtype),)],
        call.q,
        call.context_k,
        call.context_v,
        call.lengths,
        call.beam_k,
        call.beam_v,
        ancestors,
        widths,
    )
    return out
