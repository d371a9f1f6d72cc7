# SPDX-License-Identifier: Apache-2.0
"""Attention of a decode step's beams: over the prompt, stored once, and over each beam's few tokens (XGR-5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jgr.ops import split
from jgr.ops.beam_attention import native, pallas_triton, reference, xla
from jgr.ops.beam_attention.arguments import Arguments
from jgr.ops.beam_attention.reorder import reorder_beam_kv
from jgr.ops.dispatch import Implementation, dispatch, kernel, on_cpu

__all__ = ["beam_attention", "reorder_beam_kv"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.beam_attention, pallas_triton.interpreted, pallas_triton.supports),
    on_cpu(native.beam_attention, native.supports),
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
    ancestors: jax.Array | None,
    widths: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """softmax over [prompt ; own slots] with grouped key/value heads; softmax in float32.

    Args:
        q: [B, W, H, d], one query per beam.
        context_k, context_v: [B, K, T, d], the prompt, shared by the W beams of a request.
        lengths: [B] int32, the prompt tokens of each request; what stands after them has no effect.
        beam_k, beam_v: [B, S, W, K, d]; slot s holds the keys and values of the s-th generated token of each row w.
        ancestors: [B, S, W] int32; beam w's s-th token stands in row ancestors[b, s, w] of slot s (XGR-4, the table
            variant: beams are re-ordered by moving indices, not keys and values). The last slot is the query's own.
            None: beam w's tokens stand in row w of every slot (the direct variant, see reorder_beam_kv).
        widths: [B] int32, the beams of each request; the rows after them are dead. None: W beams.

    Returns:
        [B, W, H, d] in q's dtype; zeros in dead rows.
    """

    def run(call: Arguments) -> jax.Array:
        out: jax.Array = dispatch("beam_attention", IMPLEMENTATIONS, implementation, call)
        return out

    call = Arguments(q, context_k, context_v, lengths, beam_k, beam_v, ancestors, widths)
    return run(call) if split.devices() == 1 else _by_heads(run, call)


def _by_heads(run: Callable[[Arguments], jax.Array], call: Arguments) -> jax.Array:
    """The call on several devices, each of which has some of the heads."""
    everywhere, heads = split.EVERYWHERE, call.context_k.shape[1]
    of_context, own = split.of_heads(heads, 1)
    of_beams, own_of_beams = split.of_heads(heads, 3)
    of_queries = split.along(2)

    def part(call: Arguments) -> jax.Array:
        return run(
            call._replace(
                context_k=own(call.context_k),
                context_v=own(call.context_v),
                beam_k=own_of_beams(call.beam_k),
                beam_v=own_of_beams(call.beam_v),
            )
        )

    given: Any = (of_queries, of_context, of_context, everywhere, of_beams, of_beams, everywhere, everywhere)
    out: jax.Array = split.on_each(part, (call,), (Arguments(*given),), of_queries)
    return out
