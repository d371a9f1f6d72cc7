# SPDX-License-Identifier: Apache-2.0
"""Segment attention as a GPU kernel: an online softmax over the blocks of keys in which a query sees something.

One program owns a block of queries of one head. For each source of keys (the cached context, the new tokens) it gets a
list of key blocks and their number: first the blocks that it sees whole, for which it computes no mask, then those that
it sees in part. Other blocks are never loaded. The mask is computed from the vectors of tokens.

Invariants: arrays are padded to whole blocks, with tokens of no request; a row that sees nothing is 0; scores and
accumulators are float32 in units of log2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.pieces import Pieces, pieces_of
from jgr.ops.segment_attention.visibility import (
    ALL,
    NOTHING,
    Arguments,
    Causal,
    Keys,
    Queries,
    pad_tokens,
    prepare,
    relation,
    visible,
)

_MASKED = -1e30  # finite, so that differences are never NaN
_MAX_ELEMENTS = 2**31 - 1  # the kernel's offsets are int32


@dataclass(frozen=True)
class Tiles:
    """Block sizes. queries, keys: tokens of a block; warps, stages: Triton's num_warps and num_stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def choose_tiles(queries: int, keys: int, dim: int, itemsize: int) -> Tiles:
    """Tiles that spill no register when compiled for an H200 (`make compile-gpu`): in 16 bits, for heads of up to 128,
    those that were fastest on one, for the others the largest, which were not timed."""
    if itemsize > 2:
        rows, columns, warps, stages = (16, 32, 8, 1) if dim > 128 else (64, 32, 8, 2)
    elif dim > 128:
        rows, columns, warps, stages = 64, 32, 8, 2
    else:
        rows, columns, warps, stages = 64, 64, 4, 2
    if queries <= rows // 2:
        rows, warps = max(16, pl.next_power_of_2(queries)), min(warps, 4)
    return Tiles(rows, min(columns, max(16, pl.next_power_of_2(keys))), warps, stages)


def supports(call: Arguments) -> str | None:
    """Why the kernel cannot run, or None."""
    q, k, v, context = call.q, call.k, call.v, call.context
    dim = q.shape[-1]
    if dim % 16 or dim > 256:
        return f"the head size is {dim}, not a multiple of 16 up to 256"
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries are {q.dtype}"
    arrays = [k, v] if context is None else [k, v, context.k, context.v]
    if not all(x.dtype == q.dtype for x in arrays):
        return f"keys and values are not all {q.dtype}, as the queries are"
    if not all(math.prod(x.shape) for x in (q, *arrays)):
        return "an array is empty"
    if max(math.prod(x.shape) for x in (q, *arrays)) > _MAX_ELEMENTS:
        return "an array has more elements than an int32 can count"
    return None


class _Static(NamedTuple):
    """What the kernel knows at trace time. query_fields, key_fields: the names of the stacked vectors."""

    pieces: Pieces
    scale: float
    tiles: Tiles
    query_fields: tuple[str, ...]
    key_fields: tuple[str, ...]
    interpret: bool


class _Running(NamedTuple):
    """State of an online softmax: maximum [R], sum [R], and the weighted values of each piece of the head [R, size]."""

    top: jax.Array
    total: jax.Array
    out: tuple[jax.Array, ...]


def dot(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    # One pass of TF32, a GPU's default for float32, keeps three digits; exact products do without tensor cores.
    tf32 = a.dtype == jnp.float32 and not interpret
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if tf32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _visit(
    at: Any,
    running: _Running,
    q: list[jax.Array],
    queries: Queries,
    source: tuple[Any, ...],
    masked: bool,
    static: _Static,
) -> _Running:
    """Add the at-th block of keys in the list."""
    k_ref, v_ref, keys_ref, list_ref, _ = source
    here = pl.ds(list_ref[at] * static.tiles.keys, static.tiles.keys)
    parts = [
        dot(q[c], k_ref[here, pl.ds(*piece)].T, static.interpret) for c, piece in enumerate(static.pieces)
    ]
    scores = functools.reduce(jnp.add, parts) * static.scale
    values = [v_ref[here, pl.ds(*piece)] for piece in static.pieces]
    if masked:
        keys = Keys(**{name: keys_ref[f, here] for f, name in enumerate(static.key_fields)})
        rows = jax.tree.map(lambda x: x[:, None], queries)
        scores = jnp.where(visible(rows, jax.tree.map(lambda x: x[None, :], keys)), scores, _MASKED)
        # Padding may hold NaN, which a weight of zero does not remove.
        values = [jnp.where((keys.request >= 0)[:, None], x, jnp.zeros_like(x)) for x in values]
    top = jnp.maximum(running.top, scores.max(axis=1))
    shrink, weights = jnp.exp2(running.top - top), jnp.exp2(scores - top[:, None])
    out = tuple(
        o * shrink[:, None] + dot(weights.astype(x.dtype), x, static.interpret)
        for o, x in zip(running.out, values, strict=True)
    )
    return _Running(top, running.total * shrink + weights.sum(axis=1), out)


def _kernel(
    q_ref: Any,  # [R, d]
    queries_ref: Any,  # [query fields, R]
    *refs: Any,  # of each source k, v [S, d], keys [key fields, S], list [S / block], counts [2]; then out [R, d]
    static: _Static,
) -> None:
    out_ref = refs[-1]
    rows = static.tiles.queries
    q = [q_ref[:, pl.ds(*piece)] for piece in static.pieces]
    queries = Queries(**{name: queries_ref[f, :] for f, name in enumerate(static.query_fields)})
    running = _Running(
        jnp.full((rows,), _MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, size), jnp.float32) for _, size in static.pieces),
    )
    for source in (tuple(refs[i : i + 5]) for i in range(0, len(refs) - 1, 5)):
        visit = functools.partial(_visit, q=q, queries=queries, source=source, static=static)
        whole, seen = source[4][0], source[4][1]
        running = jax.lax.fori_loop(0, whole, functools.partial(visit, masked=False), running)
        running = jax.lax.fori_loop(whole, seen, functools.partial(visit, masked=True), running)
    saw = (running.top > 0.5 * _MASKED) & (queries.request >= 0)
    total = jnp.where(saw, running.total, 1.0)
    for out, piece in zip(running.out, static.pieces, strict=True):
        value = jnp.where(saw[:, None], out / total[:, None], 0.0)
        out_ref[:, pl.ds(*piece)] = value.astype(out_ref.dtype)


Lists = tuple[jax.Array, jax.Array]
"""For each block of queries its key blocks [B, n, m], those seen whole first; how many are seen whole, and how many at
all [B, n, 2]."""


def lists(queries: Queries, keys: Keys, tiles: Tiles) -> Lists:
    return in_lists(relation(queries, keys, tiles.queries, tiles.keys))


def in_lists(related: jax.Array) -> Lists:
    """The lists of blocks that are related so [B, n, m]."""
    counts = jnp.stack([(related == ALL).sum(-1), (related != NOTHING).sum(-1)], axis=-1)
    return jnp.argsort(-related, axis=-1, stable=True).astype(jnp.int32), counts.astype(jnp.int32)


def causal_lists(lengths: jax.Array, n: int, m: int, tiles: Tiles) -> Lists:
    """The lists of plain prompts without context, whose blocks are in order and need no sort."""
    first = jnp.arange(n) * tiles.queries
    counts = jnp.stack([first // tiles.keys, pl.cdiv(first + tiles.queries, tiles.keys)], axis=-1)
    counts = jnp.where((first < lengths[:, None])[..., None], jnp.minimum(counts, m), 0)
    order = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), (lengths.shape[0], n, m))
    return order, counts.astype(jnp.int32)


def stacked(x: Queries | Keys) -> tuple[tuple[str, ...], jax.Array]:
    """The vectors that are not None: their names, and all of them as [B, fields, T]."""
    there = {name: value for name, value in x._asdict().items() if value is not None}
    return tuple(there), jnp.stack(list(there.values()), axis=1)


def fill(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x, with zeros added along `axis` up to a multiple of `multiple`."""
    extra = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)]) if extra else x


def run(call: Arguments, tiles: Tiles | None = None, interpret: bool = False) -> jax.Array:
    """See jgr.ops.segment_attention. tiles: None for the heuristic's. interpret: run on any platform, slowly."""
    batch, count, heads, dim = call.q.shape
    groups = heads // call.k.shape[1]
    prepared, sources = prepare(call)
    if tiles is None:
        longest = max(s.k.shape[2] for s in sources)
        tiles = choose_tiles(count, longest, dim, call.q.dtype.itemsize)
    queries = pad_tokens(prepared, tiles.queries)
    q = fill(call.q, 1, tiles.queries)
    blocks = q.shape[1] // tiles.queries

    # Later blocks of a causal prompt see more: they start first.
    rows = pl.BlockSpec((None, tiles.queries, None, dim), lambda i, h, b: (b, blocks - 1 - i, h, 0))
    query_fields, vectors = stacked(queries)
    operands = [q, vectors]
    specs = [
        rows,
        pl.BlockSpec((None, len(query_fields), tiles.queries), lambda i, h, b: (b, 0, blocks - 1 - i)),
    ]
    key_fields: tuple[str, ...] = ()
    for source in sources:
        padded = pad_tokens(source.keys, tiles.keys)
        key_fields, key_vectors = stacked(padded)
        source_k, source_v = (fill(x, 2, tiles.keys) for x in (source.k, source.v))
        span = source_k.shape[2]
        if call.triangle and isinstance(call.tokens, Causal):
            order, counts = causal_lists(call.tokens.lengths, blocks, span // tiles.keys, tiles)
        else:
            order, counts = lists(queries, padded, tiles)
        operands += [source_k, source_v, key_vectors, order, counts]
        values = pl.BlockSpec((None, None, span, dim), lambda i, h, b: (b, h // groups, 0, 0))
        specs += [
            values,
            values,
            pl.BlockSpec((None, len(key_fields), span), lambda i, h, b: (b, 0, 0)),
            pl.BlockSpec((None, None, span // tiles.keys), lambda i, h, b: (b, blocks - 1 - i, 0)),
            pl.BlockSpec((None, None, 2), lambda i, h, b: (b, blocks - 1 - i, 0)),
        ]
    # A float32 product is made of three TF32 products; for a whole wide head these spill registers.
    pieces = pieces_of(dim, 64 if q.dtype == jnp.float32 else 256)
    scale = dim**-0.5 * math.log2(math.e)
    static = _Static(pieces, scale, tiles, query_fields, key_fields, interpret)
    out = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(blocks, heads, batch),
        in_specs=specs,
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="segment_attention",
    )(*operands)
    return out[:, :count]  # type: ignore[no-any-return]


def segment_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.segment_attention."""
    return run(call)


def interpreted(call: Arguments) -> jax.Array:
    """See jgr.ops.segment_attention. Runs the kernel step by step, on any platform."""
    return run(call, interpret=True)
