# SPDX-License-Identifier: Apache-2.0
"""The relative bias of HSTU and Climber (MODEL-7), and the arguments of biased attention as plain arrays.

All forms of the op begin with `prepare`. Which keys a query sees is segment attention's rule. What is added to a logit
depends on two differences only, of positions and of times, so any block of the bias can be computed from the vectors
of its rows and columns. Where many layers share a bias, `spread` looks it up once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention import visibility
from jgr.ops.segment_attention.visibility import Causal, Context, Keys, Queries, spell_out
from jgr.prompt.layouts import CAUSAL, SINGLE_USER_MULTI_ITEM, Kind, Layout, Tokens

Activation = Literal["softmax", "silu"]

_BUCKET_WIDTH = 0.301
"""The width of a bucket of times, in the natural logarithm of seconds."""


class Bias(NamedTuple):
    """Tables of a relative bias, float32. K is 1 where the heads share a table, else H.

    positions: [K, 2N - 1], or [B, K, 2N - 1] where the rows of the batch have tables of their own (Climber's
        scenarios). The entry is N - 1 + key's position - query's position, clipped to the table.
    times: [K, n] or [B, K, n]. The entry is bucket(query's time - key's time, n). None: times do not matter.
    """

    positions: jax.Array
    times: jax.Array | None = None


class Targets(NamedTuple):
    """Candidates for the event that follows a Causal context: `lengths` [B] int32 of them; padding follows.

    Each sees the context and itself, and all have the position right after the context (MODEL-13).
    """

    lengths: jax.Array


class Arguments(NamedTuple):
    """A call of biased_attention, whose docstring describes the fields."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    tokens: Tokens | Causal | Targets
    layout: Layout | jax.Array = SINGLE_USER_MULTI_ITEM
    keys: Tokens | None = None
    context: Context | None = None
    window: jax.Array | None = None
    bias: Bias | jax.Array | None = None
    query_times: jax.Array | None = None
    key_times: jax.Array | None = None
    activation: Activation = "softmax"
    scale: float | jax.Array = 1.0
    divisor: float = 1.0


class Places(NamedTuple):
    """What the bias needs to know of tokens, [B, n] int32 each. time: None where times do not matter."""

    position: jax.Array
    time: jax.Array | None = None


class Source(NamedTuple):
    """A part of the keys: k [B, H, n, dq], v [B, H, n, dv], and the vectors of their tokens."""

    k: jax.Array
    v: jax.Array
    keys: Keys
    places: Places


class Problem(NamedTuple):
    """A call of biased_attention, as all forms of the op take it. sources: the context, if there is one; the new keys.

    q: [B, T, H, dq]. bias: tables [1 or B, 1 or H, n], or the looked-up bias [1 or B, 1 or H, 1 or T, S] for the S keys
    of all sources (targets: for the keys of the first source, and one more entry for their own key). scale:
    [1 or B, 1 or H]. triangle: the tokens are plain causal from position 0 on, whatever the arrays hold. targets:
    queries see all keys of the first source, and only their own key of the second. lengths: for a triangle and for
    targets, how many queries, and how many keys of the first source, are no padding.
    """

    q: jax.Array
    queries: Queries
    places: Places
    sources: tuple[Source, ...]
    bias: Bias | jax.Array | None
    scale: jax.Array
    activation: Activation
    divisor: float
    triangle: bool
    targets: bool
    lengths: tuple[jax.Array, jax.Array] | None

    @property
    def in_rows(self) -> bool:
        """Whether no bias has to be looked up: then a block of queries takes all of its keys at once."""
        return isinstance(self.bias, jax.Array) or (self.bias is None and self.targets)


def bucket(difference: jax.Array, buckets: int) -> jax.Array:
    """int32 of any shape: min(floor(ln(max(1, |difference|)) / 0.301), buckets - 1) of seconds (MODEL-7)."""
    seconds = jnp.maximum(jnp.abs(difference), 1).astype(jnp.float32)
    return jnp.minimum((jnp.log(seconds) / _BUCKET_WIDTH).astype(jnp.int32), buckets - 1)


def entry(query: jax.Array, key: jax.Array, entries: int) -> jax.Array:
    """The entry of the table of positions, int32; shapes broadcast. entries: 2N - 1."""
    return jnp.clip(entries // 2 + key - query, 0, entries - 1)


def look_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """The values of table [1 or B, K, n] at index [B, T, S] int32: [B, K, T, S] float32."""
    each = jnp.broadcast_to(table, (index.shape[0], *table.shape[1:])).astype(jnp.float32)
    found: jax.Array = jax.vmap(lambda row, at: row[:, at])(each, index)
    return found


def spread(tables: Bias, rows: Places, columns: Places) -> jax.Array:
    """The bias of every pair of a row [B, T] and a column [B, S], for layers that share it: [B, K, T, S] float32."""
    tables = _batched(tables)
    positions, times = tables
    found = look_up(
        positions, entry(rows.position[:, :, None], columns.position[:, None], positions.shape[2])
    )
    if times is not None and rows.time is not None and columns.time is not None:
        found += look_up(times, bucket(rows.time[:, :, None] - columns.time[:, None], times.shape[2]))
    return found


def _batched(tables: Bias) -> Bias:
    return Bias(*(None if x is None else x.reshape(-1, *x.shape[-2:]) for x in tables))  # type: ignore[arg-type]


def joined(sources: Sequence[Source]) -> Source:
    """All sources as one. v is 0 in padding, which may hold NaN that a weight of zero would not remove."""
    keys, places = (
        jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *(getattr(s, name) for s in sources))
        for name in ("keys", "places")
    )
    k, v = (jnp.concatenate([getattr(s, name) for s in sources], 2) for name in ("k", "v"))
    return Source(k, jnp.where(keys.request[:, None, :, None] >= 0, v, jnp.zeros((), v.dtype)), keys, places)


def prepare(call: Arguments) -> Problem:
    """The call as a Problem. ValueError where its arguments do not fit together."""
    q, k, v, tokens, layout, keys, context, window = call[:8]
    bias, query_times, key_times, activation, scale, divisor = call[8:]
    if activation not in get_args(Activation):
        raise ValueError(f"activation is {activation!r}, not one of {get_args(Activation)}")
    if activation == "softmax" and divisor != 1:
        raise ValueError(f"divisor is {divisor}: softmax's weights have none")
    targets, lengths = isinstance(tokens, Targets), None
    if isinstance(tokens, Targets):
        if context is None or not isinstance(context.tokens, Causal):
            raise ValueError("Targets need a context, and its tokens must be Causal")
        lengths = tokens.lengths, context.tokens.lengths
        tokens, context = _spell_out_targets(tokens.lengths, context, context.tokens.lengths, q.shape[1])
        if keys is not None or window is not None or layout is not SINGLE_USER_MULTI_ITEM:
            raise ValueError("what Targets see is known: they have no keys, window or layout of their own")
    if isinstance(tokens, Causal) and isinstance(layout, Layout) and layout == SINGLE_USER_MULTI_ITEM:
        layout = CAUSAL  # the same, of a history alone
    seen = visibility.Arguments(q, k, v, tokens, layout, keys, context, window)
    queries, sources = visibility.prepare(seen)
    before = context.tokens.lengths if context is not None and isinstance(context.tokens, Causal) else 0
    own = spell_out(tokens, q.shape[1], before).position
    positions = [own if keys is None else spell_out(keys, k.shape[2], 0).position]
    if context is not None:
        positions.insert(0, spell_out(context.tokens, context.k.shape[2], 0).position)
    asked = None
    happened: Sequence[jax.Array | None] = [None] * len(sources)
    if isinstance(bias, Bias):
        if bias.times is not None:
            asked = _times(query_times, own.shape)
            new = _times(key_times, (own.shape[0], sum(x.shape[1] for x in positions)))
            happened = jnp.split(new, [positions[0].shape[1]][: len(sources) - 1], axis=1)
        bias = _batched(bias)
    elif bias is not None:
        bias = _checked(bias, q, sum(x.shape[1] for x in positions), targets)
    triangle = not targets and seen.triangle
    if triangle and isinstance(tokens, Causal):
        lengths = tokens.lengths, tokens.lengths
    factor = jnp.asarray(scale, jnp.float32)
    return Problem(
        q,
        queries,
        Places(own, asked),
        tuple(Source(*s, Places(*x)) for s, *x in zip(sources, positions, happened, strict=True)),
        bias,
        factor.reshape(*factor.shape, *[1] * (2 - factor.ndim)),
        activation,
        divisor,
        triangle,
        targets,
        lengths,
    )


def _spell_out_targets(
    lengths: jax.Array, context: Context, ends: jax.Array, count: int
) -> tuple[Tokens, Context]:
    """`count` targets after the ends of the context's rows, and the context, both as Tokens."""
    history = spell_out(context.tokens, context.k.shape[2], 0)
    place = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*lengths.shape, count))
    end = jnp.broadcast_to(jnp.asarray(ends, jnp.int32)[:, None], place.shape)
    request = jnp.where(place < lengths[:, None], 0, -1)
    spelled = Tokens(request, 1 + place, jnp.full_like(place, int(Kind.ITEM)), end, end)
    kind = jnp.full_like(history.kind, int(Kind.USER))
    return spelled, context._replace(tokens=history._replace(kind=kind))


def _checked(bias: jax.Array, q: jax.Array, keys: int, targets: bool) -> jax.Array:
    batch, count, heads, _ = q.shape
    given = keys - count + 1 if targets else keys
    rows = (1,) if targets else (1, count)
    wanted = ((1, batch), (1, heads), rows, (given,))
    if bias.ndim != 4 or any(n not in fits for n, fits in zip(bias.shape, wanted, strict=True)):
        words = ", ".join(" or ".join(map(str, fits)) for fits in wanted)
        raise ValueError(f"bias is {list(bias.shape)}, and must be [{words}]")
    return jnp.asarray(bias, jnp.float32)


def _times(given: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    if given is None or given.shape != shape:
        found = "none" if given is None else list(given.shape)
        raise ValueError(
            f"the bias has times: they must be {list(shape)}, of the context's tokens too, not {found}"
        )
    return jnp.asarray(given, jnp.int32)
