# SPDX-License-Identifier: Apache-2.0
"""The visibility rule of jgr.prompt.layouts on arrays, token by token and block by block.

All forms of the op begin with `prepare`, which reduces the arguments to a few int32 vectors per query and per key, and
decide with `visible`. `relation` says for whole blocks whether nothing, something or everything in them is seen. It
looks at the least and greatest values of a block only: so it may say SOMETHING where NOTHING or ALL is true, but it
never says NOTHING or ALL wrongly.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jgr.prompt.layouts import CAUSAL, EARLIER, Layout, Tokens

NOTHING, SOMETHING, ALL = 0, 1, 2
_FAR = 2**30  # no order is this large
_MOST = 2**31 - 1


class Causal(NamedTuple):
    """The tokens of rows that are plain causal prompts of `lengths` [B] int32 tokens; padding follows."""

    lengths: jax.Array


class Context(NamedTuple):
    """Keys and values of an earlier call, k and v [B, K, C, d], and their tokens [B, C]; they precede the new ones."""

    k: jax.Array
    v: jax.Array
    tokens: Tokens | Causal


class Queries(NamedTuple):
    """What the rule needs to know of queries, [B, T] int32 each; None where the call does not need it.

    sees, earlier: bits of the kinds that a query sees anywhere, and in earlier segments only. lowest: the least order
    that its window holds.
    """

    request: jax.Array  # padding: -2
    segment: jax.Array
    order: jax.Array
    sees: jax.Array | None = None
    earlier: jax.Array | None = None
    lowest: jax.Array | None = None


class Keys(NamedTuple):
    """What the rule needs to know of keys, [B, T] int32 each; kind is one bit."""

    request: jax.Array  # padding: -1
    segment: jax.Array
    order: jax.Array
    kind: jax.Array | None = None


Side = TypeVar("Side", Queries, Keys)


class Source(NamedTuple):
    """A part of the keys: k, v [B, K, T, d], and the vectors of their tokens."""

    k: jax.Array
    v: jax.Array
    keys: Keys


class Problem(NamedTuple):
    """The queries and their sources of keys: the context, where there is one, then the new tokens."""

    queries: Queries
    sources: tuple[Source, ...]


class Arguments(NamedTuple):
    """A call of segment_attention, as all forms of the op take it; see there for the fields."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    tokens: Tokens | Causal
    layout: Layout | jax.Array = CAUSAL
    keys: Tokens | None = None
    context: Context | None = None
    window: jax.Array | None = None

    @property
    def triangle(self) -> bool:
        """Whether the blocks that a query sees are known without the arrays: those up to its own."""
        return isinstance(self.tokens, Causal) and self.context is None and self.window is None


def prepare(call: Arguments) -> Problem:
    """The arguments as vectors. Raises ValueError where they do not fit together."""
    tokens, layout, keys, context, window = call.tokens, call.layout, call.keys, call.context, call.window
    plain, queries = isinstance(tokens, Causal), call.q.shape[1]
    if context is not None and isinstance(context.tokens, Causal) != plain:
        raise ValueError("tokens and context.tokens must both be Causal, or neither")
    if plain and (keys is not None or layout != CAUSAL):
        raise ValueError("tokens are Causal: the layout must be CAUSAL, and keys the queries' own")
    before = context.tokens.lengths if context is not None and isinstance(context.tokens, Causal) else 0
    own = spell_out(tokens, queries, before)
    needs_kinds = not plain
    new = own if keys is None else keys
    sources = [Source(call.k, call.v, _keys(new, needs_kinds))]
    if context is not None:
        known = spell_out(context.tokens, context.k.shape[2], 0)
        sources.insert(0, Source(context.k, context.v, _keys(known, needs_kinds)))
    order = own.order
    result = Queries(
        jnp.where(own.request < 0, -2, own.request),
        own.segment,
        order,
        lowest=None if window is None else order - jnp.minimum(window, _FAR),
    )
    if needs_kinds:
        bits = jnp.asarray(layout.bits)[own.kind] if isinstance(layout, Layout) else layout
        result = result._replace(sees=bits & ((1 << EARLIER) - 1), earlier=bits >> EARLIER)
        if isinstance(layout, Layout):  # what no kind sees is not computed
            low, high = layout.bits & ((1 << EARLIER) - 1), layout.bits >> EARLIER
            result = result._replace(
                sees=result.sees if low.any() else None, earlier=result.earlier if high.any() else None
            )
    return Problem(result, tuple(sources))


def spell_out(tokens: Tokens | Causal, count: int, before: jax.Array | int) -> Tokens:
    """The tokens as five arrays [B, count]; those of plain prompts follow `before` tokens in each row."""
    if isinstance(tokens, Tokens):
        return Tokens(*(jnp.asarray(x, jnp.int32) for x in tokens))
    place = jnp.arange(count, dtype=jnp.int32)
    shape = (*tokens.lengths.shape, count)
    none = jnp.zeros(shape, jnp.int32)
    request = jnp.where(place < tokens.lengths[:, None], 0, -1)
    order = jnp.broadcast_to(place + jnp.reshape(jnp.asarray(before, jnp.int32), (-1, 1)), shape)
    return Tokens(request, none, none, order, order)


def _keys(tokens: Tokens, needs_kinds: bool) -> Keys:
    request = jnp.where(tokens.request < 0, -1, tokens.request)
    kind = jnp.left_shift(1, tokens.kind) if needs_kinds else None
    return Keys(request, tokens.segment, tokens.order, kind)


def visible(q: Queries, k: Keys) -> jax.Array:
    """Whether the query sees the key, elementwise; shapes broadcast."""
    seen = (q.segment == k.segment) & (k.order <= q.order)
    if q.sees is not None and k.kind is not None:
        seen |= (q.sees & k.kind) != 0
    if q.earlier is not None and k.kind is not None:
        seen |= ((q.earlier & k.kind) != 0) & (k.segment < q.segment)
    if q.lowest is not None:
        seen &= k.order >= q.lowest
    return seen & (q.request == k.request)


def pad_tokens(x: Side, multiple: int) -> Side:
    """Fill up with padding tokens, to a multiple of `multiple`."""
    extra = -x.request.shape[1] % multiple
    if extra == 0:
        return x
    padded: Side = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, extra))), x)
    nobody = -2 if isinstance(x, Queries) else -1
    request = jnp.pad(x.request, ((0, 0), (0, extra)), constant_values=nobody)
    return padded._replace(request=request)


def relation(queries: Queries, keys: Keys, query_block: int, key_block: int) -> jax.Array:
    """What each block of queries sees of each block of keys: [B, query blocks, key blocks] int32.

    NOTHING, SOMETHING or ALL. ALL: every real query of the block sees every key, and no key is padding. The numbers of
    tokens are multiples of the block sizes.
    """
    q = _Bounds(queries.request, query_block, 2)
    k = _Bounds(keys.request, key_block, 1)
    q_low, q_high = q.low, q.high
    k_low, k_high = k.low, k.high

    some = (q_low(queries.segment) <= k_high(keys.segment)) & (k_low(keys.segment) <= q_high(queries.segment))
    some &= k_low(keys.order) <= q_high(queries.order)
    every = (q_low(queries.segment) == k_high(keys.segment)) & (
        k_low(keys.segment) == q_high(queries.segment)
    )
    every &= k_high(keys.order) <= q_low(queries.order)
    if keys.kind is not None:
        kinds = k.union(keys.kind)
        if queries.sees is not None:
            some |= (q.union(queries.sees) & kinds) != 0
            every |= (kinds & ~q.common(queries.sees)) == 0
        if queries.earlier is not None:
            some |= ((q.union(queries.earlier) & kinds) != 0) & (
                k_low(keys.segment) < q_high(queries.segment)
            )
            seen = (kinds & ~q.common(queries.earlier)) == 0
            every |= seen & (k_high(keys.segment) < q_low(queries.segment))
    if queries.lowest is not None:
        some &= k_high(keys.order) >= q_low(queries.lowest)
        every &= k_low(keys.order) >= q_high(queries.lowest)
    some &= (q_low(queries.request) <= k_high(keys.request)) & (
        k_low(keys.request) <= q_high(queries.request)
    )
    every &= (q_low(queries.request) == k_high(keys.request)) & (
        k_low(keys.request) == q_high(queries.request)
    )
    every &= k.all_real
    return jnp.where(some, jnp.where(every, ALL, SOMETHING), NOTHING)


class _Bounds:
    """The least and greatest value, and the union and intersection of bits, over the real tokens of each block."""

    def __init__(self, request: jax.Array, size: int, axis: int) -> None:
        """axis: the axis of [B, query blocks, key blocks] that belongs to the other side."""
        self._size, self._axis = size, axis
        self._real = self._cut(request) >= 0
        self.all_real = jnp.expand_dims(self._real.all(-1), axis)

    def _cut(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, self._size)

    def _over(self, x: jax.Array, otherwise: int) -> jax.Array:
        return jnp.where(self._real, self._cut(x), otherwise)

    def low(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(self._over(x, _MOST).min(-1), self._axis)

    def high(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(self._over(x, -_MOST).max(-1), self._axis)

    def union(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(jax.lax.reduce_or(self._over(x, 0), (2,)), self._axis)

    def common(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(jax.lax.reduce_and(self._over(x, -1), (2,)), self._axis)
