# SPDX-License-Identifier: Apache-2.0
"""Attention over the prompts that a ranker learns from: with gradients, and without scores of all pairs.

A candidate sees nothing but itself and perhaps the user, who sees no instruction. So of the T x T pairs of a prompt of
100 candidates a tenth is computed. What of those is seen is the rule of jgr.ops.segment_attention, in any layout.

Letters: B batch, T tokens (U of the user, C candidates of S each, the instruction's), H heads, d head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.layouts import Layout, Tokens
from jgr.models.decoder import Attention
from jgr.ops.segment_attention import Causal, segment_attention


def candidate_attention(user: int, candidates: int, span: int) -> Attention:
    """For prompts whose tokens stand as `jgr.training.ranker.lay_out` has them: U, C times S, the instruction's."""
    items = slice(user, user + candidates * span)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens | Causal, layout: Layout | jax.Array
    ) -> jax.Array:
        if isinstance(tokens, Causal) or isinstance(layout, Layout):
            raise ValueError("these are prompts of segments, and each has its own layout")
        batch, bits = len(q), layout

        def part(queries: slice, keys: slice) -> jax.Array:
            return _attend(
                q[:, queries],
                k[:, :, keys],
                v[:, :, keys],
                _at(tokens, queries),
                bits[:, queries],
                _at(tokens, keys),
            )

        def each(x: jax.Array, axis: int) -> jax.Array:
            """Of every candidate one row: [B, .., C * S, ..] -> [B * C, .., S, ..], the tokens at `axis`."""
            listed = jnp.moveaxis(x, axis, 1)[:, items]
            return jnp.moveaxis(listed.reshape(batch * candidates, span, *listed.shape[2:]), 1, axis)

        def beside(x: jax.Array, axis: int) -> jax.Array:
            """The user's in front of every candidate's: [B * C, .., U + S, ..]."""
            users = jax.lax.slice_in_dim(x, 0, user, axis=axis)
            return jnp.concatenate([jnp.repeat(users, candidates, axis=0), each(x, axis)], axis)

        of_user = part(slice(0, user), slice(0, items.stop))
        of_items = _attend(
            each(q, 1), beside(k, 2), beside(v, 2),
            Tokens(*(each(x, 1) for x in tokens)), each(bits, 1), Tokens(*(beside(x, 1) for x in tokens)),
        )  # fmt: skip
        of_instruction = part(slice(items.stop, None), slice(0, None))
        return jnp.concatenate([of_user, of_items.reshape(batch, -1, *q.shape[2:]), of_instruction], 1)

    return attend


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, bits: jax.Array, keys: Tokens
) -> jax.Array:
    return segment_attention(q, k, v, tokens, bits, keys=keys, implementation="reference")


def _at(tokens: Tokens, at: slice) -> Tokens:
    return Tokens(*(x[:, at] for x in tokens))
