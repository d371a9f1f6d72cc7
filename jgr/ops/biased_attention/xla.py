# SPDX-License-Identifier: Apache-2.0
"""Biased attention over the pairs (query block, key block) in which something is seen, forwards and backwards.

The pairs are those of jgr.ops.segment_attention.xla; a loop has one turn for each. Only one turn's logits, and its
block of the bias, exist at a time; the gradient computes them again. With SiLU the turns add up; with softmax they are
an online softmax, whose gradient needs the logarithm of each row's sum.

Where tokens are Causal, position i is place i: a block of the position bias is a few entries of the table, copied along
diagonals, and its gradient is the sums of diagonals. Elsewhere the bias is gathered, and its gradient scattered back.
Where the bias is looked up already, or targets have none, `rows` computes the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgr.ops.biased_attention import rows as whole_rows
from jgr.ops.biased_attention.bias import Activation, Places, Problem, bucket, entry, joined, look_up
from jgr.ops.dispatch import target_platform
from jgr.ops.segment_attention.pallas_triton import fill
from jgr.ops.segment_attention.visibility import Keys, Queries, pad_tokens, visible
from jgr.ops.segment_attention.xla import Pairs, causal_pairs, seen_pairs

MOST_TOKENS = 512
MOST_LOGIT_BYTES = 1 << 20
GPU_LOGIT_BYTES = 1 << 30
"""On a GPU no cache holds a turn's logits, and what a turn costs is its kernels' launches."""
_MASKED = -1e30  # finite: a difference of two is no NaN, and SiLU of it is 0


@dataclass(frozen=True)
class Blocks:
    """Tokens of a block of queries, tokens of a block of keys, and how many rows of the batch are computed together."""

    queries: int
    keys: int
    rows: int


def choose_blocks(batch: int, heads: int, queries: int, keys: int) -> Blocks:
    """The largest blocks with which one turn's logits fit into a core's cache; several rows where prompts are short."""
    most_bytes = GPU_LOGIT_BYTES if target_platform() == "gpu" else MOST_LOGIT_BYTES
    most = min(MOST_TOKENS, math.isqrt(most_bytes // (4 * heads)))

    def equal(tokens: int) -> int:
        return -(-tokens // -(-tokens // most))

    rows, columns = equal(queries), equal(keys)
    fitting = max(1, most_bytes // (4 * heads * rows * columns))
    return Blocks(rows, columns, max(n for n in range(1, batch + 1) if batch % n == 0 and n <= fitting))


class _Arrays(NamedTuple):
    """The arrays that have gradients. q: [n, B, H, block, dq]; others as in Problem, S a multiple of the key block."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: jax.Array | None
    times: jax.Array | None
    scale: jax.Array


class _Facts(NamedTuple):
    """What is known of the tokens, padded to whole blocks."""

    queries: Queries
    keys: Keys
    query_places: Places
    key_places: Places


class _Static(NamedTuple):
    """What is known when the program is traced. triangle: the tokens are plain causal, whatever the arrays hold."""

    activation: Activation
    divisor: float
    rows: int
    columns: int
    triangle: bool


class _Turn(NamedTuple):
    """A pair of blocks: their numbers, whether a mask is needed, and what is known of their tokens."""

    i: Any
    j: Any
    masked: Any
    tokens: _Facts


class _Running(NamedTuple):
    """The running result: weighted values [n, B, H, block, dv]; for softmax maximum and sum [n, B, H, block]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


State = TypeVar("State")


def _cut(x: Any, at: Any, size: int, axis: int = 1) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at * size, size, axis), x)


def _each_turn(static: _Static, facts: _Facts, step: Callable[[State, _Turn], State], state: State) -> State:
    """The state after a step for each pair of blocks in which something is seen."""
    query_blocks = facts.queries.request.shape[1] // static.rows
    if static.triangle:
        pairs: Pairs = causal_pairs(query_blocks)
        number: Any = len(pairs[0])
    else:
        pairs, number = seen_pairs(facts.queries, facts.keys, static.rows, static.columns)

    def turn(i: Any, j: Any, masked: Any) -> _Turn:
        rows = [_cut(x, i, static.rows) for x in (facts.queries, facts.query_places)]
        columns = [_cut(x, j, static.columns) for x in (facts.keys, facts.key_places)]
        return _Turn(i, j, masked, _Facts(rows[0], columns[0], rows[1], columns[1]))

    if len(pairs[0]) == 1:
        return step(state, turn(0, 0, True))
    listed = jax.tree.map(jnp.asarray, pairs)
    done: State = jax.lax.fori_loop(0, number, lambda at, s: step(s, turn(*(x[at] for x in listed))), state)
    return done


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum of x, cast to y's dtype, and y, summed in float32."""
    return jnp.einsum(subscripts, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _position_block(positions: jax.Array, turn: _Turn, static: _Static) -> jax.Array:
    """The turn's block of the bias by positions: [1 or B, K, rows, columns]."""
    entries = positions.shape[-1]
    if not static.triangle:
        return look_up(positions, _entries(turn.tokens, entries))
    # Row i of the block is the table shifted by i. Where n = rows + columns entries are repeated again and again, the
    # n - 1 entries from place i (n - 1) on are those entries shifted by i.
    n = static.rows + static.columns
    away = np.concatenate([np.arange(static.columns + 1), np.arange(1 - static.rows, 0)])
    there = positions[..., entry(turn.i * static.rows, turn.j * static.columns + away, entries)]
    repeated = jnp.tile(there, static.rows)[..., : static.rows * (n - 1)]
    return repeated.reshape(*there.shape[:-1], static.rows, n - 1)[..., : static.columns]


def _entries(tokens: _Facts, entries: int) -> jax.Array:
    """Which entries of the table of positions the pairs of a turn have: [B, rows, columns]."""
    rows, columns = tokens.query_places.position, tokens.key_places.position
    return entry(rows[:, :, None], columns[:, None], entries)


def _buckets(tokens: _Facts, buckets: int) -> jax.Array | None:
    """Which entries of the table of times the pairs of a turn have: [B, rows, columns]; None without times."""
    rows, columns = tokens.query_places.time, tokens.key_places.time
    if rows is None or columns is None:
        return None
    return bucket(rows[:, :, None] - columns[:, None], buckets)


def _logits(arrays: _Arrays, turn: _Turn, static: _Static) -> tuple[jax.Array, jax.Array]:
    """A turn's logits, _MASKED where nothing is seen, and what `scale` multiplies: [B, H, rows, columns] each."""
    q, k = arrays.q[turn.i], _cut(arrays.k, turn.j, static.columns, 2)
    scaled = _product("bhtd,bhsd->bhts", q, k)
    bias: Any = 0.0
    if arrays.positions is not None:
        bias = _position_block(arrays.positions, turn, static)
    if arrays.times is not None:
        at = _buckets(turn.tokens, arrays.times.shape[-1])
        bias = bias if at is None else bias + look_up(arrays.times, at)
    scale = arrays.scale[:, :, None, None]
    if static.activation == "softmax":
        scaled += bias
        logits = scaled * scale
    else:
        logits = scaled * scale + bias

    def mask(logits: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda x: x[:, :, None], turn.tokens.queries)
        seen = visible(rows, jax.tree.map(lambda x: x[:, None], turn.tokens.keys))
        return jnp.where(seen[:, None], logits, _MASKED)

    if turn.masked is True:
        return mask(logits), scaled
    return jax.lax.cond(turn.masked, mask, lambda logits: logits, logits), scaled


def _forward(static: _Static, arrays: _Arrays, tokens: _Facts) -> tuple[jax.Array, jax.Array]:
    """The result [n, B, H, rows, dv] float32, and for softmax the logarithm of each row's sum [n, B, H, rows]."""

    def step(running: _Running, turn: _Turn) -> _Running:
        logits, _ = _logits(arrays, turn, static)
        v = _cut(arrays.v, turn.j, static.columns, 2)
        old: _Running = jax.tree.map(lambda x: x[turn.i], running)
        if static.activation == "silu":
            new = old._replace(out=old.out + _product("bhts,bhsd->bhtd", jax.nn.silu(logits), v))
        else:
            top = jnp.maximum(old.top, logits.max(-1))
            shrink, weights = jnp.exp(old.top - top), jnp.exp(logits - top[..., None])
            out = old.out * shrink[..., None] + _product("bhts,bhsd->bhtd", weights, v)
            new = _Running(out, top, old.total * shrink + weights.sum(-1))
        return jax.tree.map(lambda x, y: x.at[turn.i].set(y), running, new)  # type: ignore[no-any-return]

    zeros = jnp.zeros(arrays.q.shape[:-1], jnp.float32)
    nothing = jnp.zeros((*arrays.q.shape[:-1], arrays.v.shape[-1]), jnp.float32)
    running = _each_turn(static, tokens, step, _Running(nothing, zeros + _MASKED, zeros))
    if static.activation == "silu":
        return running.out / static.divisor, running.total
    saw = running.top > 0.5 * _MASKED
    total = jnp.where(saw, running.total, 1.0)
    out = jnp.where(saw[..., None], running.out / total[..., None], 0.0)
    return out, jnp.where(saw, running.top + jnp.log(total), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, arrays: _Arrays, tokens: _Facts) -> jax.Array:
    return _forward(static, arrays, tokens)[0]


def _attend_forward(static: _Static, arrays: _Arrays, tokens: _Facts) -> tuple[jax.Array, Any]:
    out, log_total = _forward(static, arrays, tokens)
    return out, (arrays, tokens, out, log_total)


def _attend_backward(static: _Static, saved: Any, d_out: jax.Array) -> tuple[_Arrays, None]:
    arrays, tokens, out, log_total = saved
    inner = (out * d_out).sum(-1)
    d_out = d_out / static.divisor

    def step(sums: _Arrays, turn: _Turn) -> _Arrays:
        logits, scaled = _logits(arrays, turn, static)
        q, d_o = arrays.q[turn.i], d_out[turn.i]
        k, v = (_cut(x, turn.j, static.columns, 2) for x in (arrays.k, arrays.v))
        d_weights = _product("bhtd,bhsd->bhts", d_o, v)
        if static.activation == "silu":
            gate = jax.nn.sigmoid(logits)
            weights = logits * gate
            d_logits = d_weights * gate * (1 + logits * (1 - gate))
        else:
            weights = jnp.exp(logits - log_total[turn.i][..., None])
            d_logits = weights * (d_weights - inner[turn.i][..., None])
        d_scaled = d_logits * arrays.scale[:, :, None, None]
        d_bias = d_scaled if static.activation == "softmax" else d_logits

        def add(total: jax.Array, block: jax.Array) -> jax.Array:
            """Add the block to the columns' part of `total`."""
            at = turn.j * static.columns
            old = jax.lax.dynamic_slice_in_dim(total, at, static.columns, 2)
            return jax.lax.dynamic_update_slice_in_dim(total, old + block, at, 2)

        return _Arrays(
            sums.q.at[turn.i].add(_product("bhts,bhsd->bhtd", d_scaled, k)),
            add(sums.k, _product("bhts,bhtd->bhsd", d_scaled, q)),
            add(sums.v, _product("bhts,bhtd->bhsd", weights, d_o)),
            *_bias_gradients(sums, arrays, d_bias, turn, static),
            sums.scale + _sum_to((d_logits * scaled).sum((2, 3)), arrays.scale.shape),
        )

    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
    sums = _each_turn(static, tokens, step, sums)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), sums, arrays), None


_attend.defvjp(_attend_forward, _attend_backward)


def _bias_gradients(
    sums: _Arrays, arrays: _Arrays, d_bias: jax.Array, turn: _Turn, static: _Static
) -> tuple[jax.Array | None, jax.Array | None]:
    """The tables' gradients after a turn whose bias has the gradient d_bias [B, H, rows, columns]."""
    positions, times = sums.positions, sums.times
    if arrays.positions is not None and positions is not None:
        block = functools.partial(_position_block, turn=turn, static=static)
        if static.triangle:
            blocks, back = jax.vjp(block, arrays.positions)
            (found,) = back(_sum_to(d_bias, blocks.shape))
            positions += found
        else:
            positions += _add_up(d_bias, _entries(turn.tokens, positions.shape[-1]), positions.shape)
    if times is not None:
        at = _buckets(turn.tokens, times.shape[-1])
        if at is not None:
            times += _add_up(d_bias, at, times.shape)
    return positions, times


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The sum of x over those of its first two axes that have size 1 in `shape`."""
    over = tuple(axis for axis in (0, 1) if shape[axis] == 1)
    return x.sum(over, keepdims=True)


def _add_up(x: jax.Array, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Add x [B, H, rows, columns] up in tables [1 or B, 1 or H, n] at the entries `index` [B, rows, columns].

    It scatters: for 128 rows of 211 tokens that takes 40 ms on one core, where products with one-hot digits take 60 ms
    and with one-hot vectors 350 ms.
    """
    x = _sum_to(x, (x.shape[0], *shape[1:]))
    groups = shape[0]
    flat = x.reshape(groups, -1, *x.shape[1:]).swapaxes(1, 2).reshape(groups, shape[1], -1)
    at = index.reshape(groups, -1)

    def one(values: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.zeros(shape[-1]).at[at].add(values)

    summed: jax.Array = jax.vmap(jax.vmap(one, (0, None)))(flat, at)
    return summed


def _in_groups(static: _Static, arrays: _Arrays, tokens: _Facts, rows: int) -> jax.Array:
    """_attend for `rows` rows of the batch at a time; queries and result are [B, n, ...]."""
    batch = arrays.q.shape[0]

    def attend(arrays: _Arrays, tokens: _Facts) -> jax.Array:
        turned = arrays._replace(q=jnp.moveaxis(arrays.q, 0, 1))
        return jnp.moveaxis(_attend(static, turned, tokens), 0, 1)

    if rows == batch:
        return attend(arrays, tokens)
    leaves, tree = jax.tree.flatten((arrays, tokens))
    cut = [x.reshape(-1, rows, *x.shape[1:]) if x.shape[0] == batch else None for x in leaves]

    def group(cut: list[jax.Array | None]) -> jax.Array:
        whole = [x if part is None else part for x, part in zip(leaves, cut, strict=True)]
        return attend(*jax.tree.unflatten(tree, whole))

    out: jax.Array = jax.lax.map(group, cut)
    return out.reshape(batch, *out.shape[2:])


def run(problem: Problem, blocks: Blocks | None = None) -> jax.Array:
    """See jgr.ops.biased_attention; the bias is in tables, or None. blocks: None for those of choose_blocks."""
    q, source, bias = problem.q, joined(problem.sources), problem.bias
    assert not isinstance(bias, jax.Array)
    batch, count, heads, dim = q.shape
    if blocks is None:
        blocks = choose_blocks(batch, heads, count, source.k.shape[2])
    static = _Static(problem.activation, problem.divisor, blocks.queries, blocks.keys, problem.triangle)
    tokens = _Facts(
        pad_tokens(problem.queries, blocks.queries),
        pad_tokens(source.keys, blocks.keys),
        jax.tree.map(lambda x: fill(x, 1, blocks.queries), problem.places),
        jax.tree.map(lambda x: fill(x, 1, blocks.keys), source.places),
    )
    q = fill(q, 1, blocks.queries).reshape(batch, -1, blocks.queries, heads, dim)
    arrays = _Arrays(
        q.transpose(0, 1, 3, 2, 4),
        fill(source.k, 2, blocks.keys),
        fill(source.v, 2, blocks.keys),
        None if bias is None else bias.positions,
        None if bias is None else bias.times,
        problem.scale,
    )
    out = _in_groups(static, arrays, tokens, blocks.rows)  # [B, n, H, rows, dv]
    out = out.transpose(0, 1, 3, 2, 4).reshape(batch, -1, heads, source.v.shape[3])[:, :count]
    return jnp.where(problem.queries.request[:, :, None, None] >= 0, out, 0.0).astype(q.dtype)


def biased_attention(problem: Problem) -> jax.Array:
    """See jgr.ops.biased_attention."""
    return whole_rows.run(problem) if problem.in_rows else run(problem)
