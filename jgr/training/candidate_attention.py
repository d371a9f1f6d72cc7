# SPDX-License-Identifier: Apache-2.0
"""Attention over the prompts that a ranker is trained on: differentiable, and without scores of all pairs of tokens.

A candidate sees only itself and perhaps the user, and the user never sees the instruction. So in a prompt with 100
candidates only a tenth of the T x T pairs is computed. Which of these are visible is decided by the rule of
jgr.ops.segment_attention, in any layout.

Letters: B batch, T tokens (U user tokens, C candidates of S tokens, then the instruction), H heads, d head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.models.decoder import Attention
from jgr.ops.segment_attention import Causal, segment_attention
from jgr.ops.segment_attention.visibility import Arguments, prepare, visible
from jgr.prompt.layouts import ITEM_PREFIX, USER_PREFIX, Layout, Tokens


def candidate_attention(user: int, candidates: int, span: int, layouts: str = "both") -> Attention:
    """Make the attention for prompts in the order of `jgr.training.ranker.lay_out`: user, candidates, instruction.

    user: U. candidates: C. span: S. layouts: as train.layouts; if it names one layout, pairs that are invisible in it
    are not computed.
    """
    of_user, items = slice(0, user), slice(user, user + candidates * span)
    instruction = slice(items.stop, None)
    user_sees = of_user if layouts == USER_PREFIX.name else slice(0, items.stop)
    items_see = slice(0, 0) if layouts == ITEM_PREFIX.name else of_user

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens | Causal, layout: Layout | jax.Array
    ) -> jax.Array:
        if isinstance(tokens, Causal) or isinstance(layout, Layout):
            raise ValueError("these are prompts of segments, and each has its own layout")

        def all_pairs(queries: slice, keys: slice) -> jax.Array:
            return segment_attention(
                q[:, queries], k[:, :, keys], v[:, :, keys], _at(tokens, queries), layout[:, queries],
                keys=_at(tokens, keys), implementation="reference",
            )  # fmt: skip

        def each(x: jax.Array, axis: int) -> jax.Array:
            """Split the axis of the candidates' tokens in two: [.., C * S, ..] -> [.., C, S, ..]."""
            x = jax.lax.slice_in_dim(x, items.start, items.stop, axis=axis)
            return x.reshape(*x.shape[:axis], candidates, span, *x.shape[axis + 1 :])

        def of_items() -> jax.Array:
            """The candidates' output: one softmax over the user's tokens and the candidate's own."""
            groups = q.shape[2] // k.shape[1]
            keys, values = (jnp.repeat(x, groups, 1) for x in (k, v))
            sees_user = _visible(_at(tokens, items), layout[:, items], _at(tokens, items_see))
            alone = Tokens(*(each(x, 1) for x in tokens))
            sees_self = _visible(alone, each(layout, 1), alone)
            scaled = q / jnp.sqrt(jnp.float32(q.shape[3]))
            to_user = jnp.einsum("bthd,bhud->bhtu", scaled[:, items], keys[:, :, items_see])
            to_self = jnp.einsum("bcshd,bhcrd->bhcsr", each(scaled, 1), each(keys, 2))
            scores = jnp.concatenate(
                [
                    jnp.where(sees_user[:, None], to_user, -jnp.inf),
                    jnp.where(sees_self[:, None], to_self, -jnp.inf).reshape(*to_user.shape[:3], span),
                ],
                axis=-1,
            )
            top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-1e30))  # padding sees nothing
            weights = jnp.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            weights = weights / jnp.where(total > 0, total, 1.0)
            user_weights, own_weights = jnp.split(weights, [items_see.stop], axis=-1)
            from_user = jnp.einsum("bhtu,bhud->bthd", user_weights, values[:, :, items_see])
            from_self = jnp.einsum("bhcsr,bhcrd->bcshd", own_weights.reshape(to_self.shape), each(values, 2))
            return from_user + from_self.reshape(from_user.shape)

        parts = all_pairs(of_user, user_sees), of_items(), all_pairs(instruction, slice(0, None))
        return jnp.concatenate(parts, axis=1)

    return attend


def _visible(queries: Tokens, bits: jax.Array, keys: Tokens) -> jax.Array:
    """Which keys [.., S] each query [.., T] sees, [.., T, S] bool. bits: the queries' layouts."""
    q, none = jnp.zeros((1, queries.order.shape[-1])), jnp.zeros(())  # the rule does not read the arrays
    rows, (columns,) = prepare(Arguments(q, none, none, queries, bits, keys))
    return visible(
        jax.tree.map(lambda x: x[..., :, None], rows), jax.tree.map(lambda x: x[..., None, :], columns.keys)
    )


def _at(tokens: Tokens, at: slice) -> Tokens:
    return Tokens(*(x[:, at] for x in tokens))
