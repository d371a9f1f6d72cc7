# SPDX-License-Identifier: Apache-2.0
"""Attention with a relative bias, by softmax or SiLU, as HSTU (MODEL-6, 15) and Climber (MODEL-19) have it; FLAME-8."""

from __future__ import annotations

import jax

from jgr.ops.biased_attention import pallas_triton, reference, xla
from jgr.ops.biased_attention.bias import Activation, Arguments, Bias, Places, Targets, prepare, spread
from jgr.ops.dispatch import Implementation, dispatch, kernel
from jgr.ops.segment_attention.visibility import Causal, Context
from jgr.prompt.layouts import SINGLE_USER_MULTI_ITEM, Layout, Tokens

__all__ = ["IMPLEMENTATIONS", "Bias", "Causal", "Context", "Places", "Targets", "biased_attention", "spread"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.biased_attention, pallas_triton.interpreted, pallas_triton.supports),
    Implementation("xla", xla.biased_attention),
    Implementation("reference", reference.biased_attention),
)


def biased_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens | Causal | Targets,
    layout: Layout | jax.Array = SINGLE_USER_MULTI_ITEM,
    *,
    keys: Tokens | None = None,
    context: Context | None = None,
    window: jax.Array | None = None,
    bias: Bias | jax.Array | None = None,
    query_times: jax.Array | None = None,
    key_times: jax.Array | None = None,
    activation: Activation = "softmax",
    scale: float | jax.Array = 1.0,
    divisor: float = 1.0,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of each query to the keys that it sees, with an additive bias of relative positions and times.

        silu      sum_j silu(scale * q.k_j + bias_j) / divisor * v_j          HSTU: divisor is the pinned N
        softmax   sum_j softmax_j((q.k_j + bias_j) * scale) * v_j             Climber: scale is 1 / temperature

    The mask and the bias are evaluated block by block from vectors over tokens; no T x T array exists. Sums and
    activations are in float32. Which keys a query sees is the rule of jgr.ops.segment_attention. The forms "xla" and
    "reference" have gradients by q, k, v, tables and scale; the kernel has none.

    Args:
        q: [B, T, H, dq]. Rows are independent.
        k, v: [B, H, S, dq] and [B, H, S, dv], keys and values of the new tokens; S = T where `keys` is None.
        tokens: the queries' tokens, fields [B, T], padding where request < 0; or Causal(lengths [B]), each row one
            history; or Targets(lengths [B]), candidates after a Causal context. What stands in padding has no effect.
        layout: a Layout; or [B, T] int32, `Layout.bits[kind]` for each query.
        keys: the tokens of k and v, fields [B, S], where they are other tokens than the queries'.
        context: keys and values that stand before the new ones (M-FALCON, MODEL-13); Causal for Causal tokens.
        window: [B, T] int32; a query sees only keys whose order is at least its own order minus its window.
        bias: tables that are looked up by the tokens' `position`; Causal tokens have the positions 0, 1, 2, ..., the
            context first. Or the looked-up bias, made by `spread` once for layers that share it:
            [1 or B, 1 or H, 1 or T, C + S] float32; for Targets [1 or B, 1 or H, 1, C + 1], where the last entry is for
            what each target sees of itself.
        query_times, key_times: [B, T] and [B, C + S] int32 seconds, the context first; needed where the bias has times.
            The tokens of a row share an origin, so that no difference leaves int32. HSTU's query time is that of the
            next event (MODEL-7).
        activation: "softmax" or "silu".
        scale: a number, or float32 [B] or [B, H].
        divisor: what silu's weights are divided by (MODEL-6: a property of the checkpoint, not of the call); 1 for
            softmax.

    Returns:
        [B, T, H, dv] in q's dtype; 0 for padding and for queries that see nothing.

    Raises:
        ValueError: arguments that do not fit together, or that the named implementation cannot run.
    """
    options = bias, query_times, key_times, activation, scale, divisor
    problem = prepare(Arguments(q, k, v, tokens, layout, keys, context, window, *options))
    out: jax.Array = dispatch("biased_attention", IMPLEMENTATIONS, implementation, problem)
    return out
