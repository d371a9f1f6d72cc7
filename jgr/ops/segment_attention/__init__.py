# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts made of segments, in every layout, padded or packed, with a cached context in front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jgr.ops import split
from jgr.ops.dispatch import GPU, Implementation, dispatch, kernel, on_cpu
from jgr.ops.segment_attention import cudnn, native, pallas_triton, reference, xla
from jgr.ops.segment_attention.visibility import Arguments, Causal, Context
from jgr.prompt.layouts import CAUSAL, Layout, Tokens

__all__ = ["IMPLEMENTATIONS", "Arguments", "Causal", "Context", "segment_attention"]

IMPLEMENTATIONS = (
    Implementation("cudnn", cudnn.segment_attention, cudnn.supports, GPU, is_kernel=True),
    *kernel(pallas_triton.segment_attention, pallas_triton.interpreted, pallas_triton.supports),
    on_cpu(native.segment_attention, native.supports),
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

    A query sees a key iff both belong to the same request and either they stand in the same segment and the key's order
    is not larger, or the layout lets the query's kind see the key's kind. The rule is evaluated block by block; no T x
    T mask exists.

    Args:
        q: [B, T, H, d]. Rows are independent. A row may hold one request and padding, or several requests, packed.
        k, v: [B, K, S, d], keys and values of the new tokens; query head h reads key/value head h // (H / K), and H is
            a multiple of K.
        tokens: the queries' tokens, fields [B, T], padding where request < 0; or Causal(lengths [B]), where each row
            is one plain causal prompt. What stands in padding has no effect. There are gradients for Causal tokens
            without context and options only.
        layout: a Layout; or [B, T] int32, `Layout.bits[kind]` for each query, where a batch mixes layouts.
        keys: the tokens of k and v, fields [B, S], where they are other tokens than the queries'.
        context: keys and values that stand before the new ones. Its tokens are Causal iff `tokens` are.
        window: [B, T] int32; a query sees only keys whose order is at least its own order minus its window.

    Returns:
        [B, T, H, d] in q's dtype; 0 for queries that see nothing, and for padding, save that padding after a plain
        causal prompt may get anything.
    """

    def run(call: Arguments) -> jax.Array:
        out: jax.Array = dispatch("segment_attention", IMPLEMENTATIONS, implementation, call)
        return out

    call = Arguments(q, k, v, tokens, layout, keys, context, window)
    # Heads that devices cannot share equally, as of a model whose layers are whole everywhere, are computed by each.
    return _by_heads(run, call) if split.devices() > 1 and not q.shape[2] % split.devices() else run(call)


def _by_heads(run: Callable[[Arguments], jax.Array], call: Arguments) -> jax.Array:
    """The call on several devices, each of which has some of the heads."""
    of_queries, everywhere = split.along(2), split.EVERYWHERE
    of_keys, own = split.of_heads(call.k.shape[1], 1)
    described = call.layout if isinstance(call.layout, Layout) else None
    arrays: Any = call if described is None else call._replace(layout=None)  # type: ignore[arg-type]
    given: Any = [of_queries, of_keys, of_keys, *[everywhere] * (len(call) - 3)]
    if call.context is not None:
        parts: Any = (of_keys, of_keys, everywhere)
        given[Arguments._fields.index("context")] = Context(*parts)

    def part(call: Arguments) -> jax.Array:
        before = call.context
        if before is not None:
            before = before._replace(k=own(before.k), v=own(before.v))
        layout = call.layout if described is None else described
        return run(call._replace(k=own(call.k), v=own(call.v), layout=layout, context=before))

    out: jax.Array = split.on_each(part, (arrays,), (Arguments(*given),), of_queries)
    return out
