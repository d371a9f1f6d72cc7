# SPDX-License-Identifier: Apache-2.0
"""Biased attention as a GPU kernel (FLAME-8), with softmax or SiLU. As in segment attention, only blocks of keys in
which something is seen are visited; the bias of a block is looked up in its tables.

One program owns a block of queries of one head, and gets for each source of keys the list of blocks to visit. With SiLU
the weighted values are summed as they are, with softmax as an online softmax in units of log2. Where the bias is looked
up already, `pallas_rows` computes the call.

Invariants: arrays are padded to whole blocks, with tokens of no request; a row that sees nothing is 0; logits, weights
and accumulators are float32. There are no gradients.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.biased_attention import pallas_rows
from jgr.ops.biased_attention.bias import Activation, Places, Problem, bucket, entry
from jgr.ops.pieces import Pieces, pieces_of
from jgr.ops.segment_attention.pallas_triton import (
    Tiles,
    causal_lists,
    dot,
    fill,
    lists,
)
from jgr.ops.segment_attention.visibility import Keys, Queries, pad_tokens, visible

_MASKED = -1e30  # finite, so that differences are never NaN
_MAX_ELEMENTS = 2**31 - 1  # the kernel's offsets are int32
_LOG2_E = math.log2(math.e)


def choose_tiles(queries: int, keys: int, dim: int, itemsize: int, biased: bool) -> Tiles:
    """The largest tiles that spill no register when compiled for an H200 (`make compile-gpu`); not timed on one."""
    rows, columns, warps, stages = 128, 32 if biased and dim > 96 else 64, 8, 2
    if itemsize > 2 and dim > (64 if biased else 128):
        rows, columns, stages = 16, 32, 1
    elif itemsize > 2:
        rows, columns = 32 if biased else 64, 32
    elif dim > 128:
        rows, columns = 64, 32
    if queries <= rows // 2:
        rows, warps = max(16, pl.next_power_of_2(queries)), min(warps, 4)
    return Tiles(rows, min(columns, max(16, pl.next_power_of_2(keys))), warps, stages)


def supports(problem: Problem) -> str | None:
    """Why no kernel can run, or None."""
    q = problem.q
    for name, dim in (("query", q.shape[-1]), ("value", problem.sources[0].v.shape[-1])):
        if dim % 16 or dim > 256:
            return f"the {name} head size is {dim}, not a multiple of 16 up to 256"
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries are {q.dtype}"
    arrays = [q, *(x for s in problem.sources for x in (s.k, s.v))]
    if not all(x.dtype == q.dtype for x in arrays):
        return f"keys and values are not all {q.dtype}, as the queries are"
    if not all(x.size for x in arrays):
        return "an array is empty"
    if max(x.size for x in arrays) > _MAX_ELEMENTS:
        return "an array has more elements than an int32 can count"
    return pallas_rows.supports(problem) if problem.in_rows else None


class _Static(NamedTuple):
    """What the kernel knows at trace time. query_fields, key_fields: the names of the stacked vectors. entries: the
    size of the table of positions, 0 for none; buckets: that of the table of times."""

    activation: Activation
    divisor: float
    qk_pieces: Pieces
    v_pieces: Pieces
    tiles: Tiles
    query_fields: tuple[str, ...]
    key_fields: tuple[str, ...]
    entries: int
    buckets: int
    interpret: bool


class _Running(NamedTuple):
    """The running result: weighted values of each piece of the head [R, size]; for softmax maximum and sum [R]."""

    out: tuple[jax.Array, ...]
    top: jax.Array | None
    total: jax.Array | None


Vectors = dict[str, jax.Array]


def _bias(rows: Vectors, columns: Vectors, tables: tuple[Any, ...], static: _Static) -> Any:
    """The bias of the block: [R, C]."""
    if not static.entries:
        return 0.0
    at = entry(rows["position"][:, None], columns["position"][None, :], static.entries)
    found = tables[0][at]
    if static.buckets:
        found += tables[1][bucket(rows["time"][:, None] - columns["time"][None, :], static.buckets)]
    return found


def _add(running: _Running, logits: jax.Array, values: list[jax.Array], static: _Static) -> _Running:
    """Add the values [C, size] of a block, weighted by its logits [R, C], which are _MASKED where nothing is seen."""

    def weighted(weights: jax.Array) -> list[jax.Array]:
        return [dot(weights.astype(x.dtype), x, static.interpret) for x in values]

    if running.top is None or running.total is None:
        weights = logits / (1.0 + jnp.exp2(logits * -_LOG2_E))
        out = tuple(o + x for o, x in zip(running.out, weighted(weights), strict=True))
        return running._replace(out=out)
    top = jnp.maximum(running.top, logits.max(axis=1))
    shrink, weights = jnp.exp2(running.top - top), jnp.exp2(logits - top[:, None])
    out = tuple(o * shrink[:, None] + x for o, x in zip(running.out, weighted(weights), strict=True))
    return _Running(out, top, running.total * shrink + weights.sum(axis=1))


def _visit(
    at: Any,
    running: _Running,
    q: list[jax.Array],
    rows: Vectors,
    scale: jax.Array,
    tables: tuple[Any, ...],
    source: tuple[Any, ...],
    masked: bool,
    static: _Static,
) -> _Running:
    """Add the at-th block of keys in the list."""
    k_ref, v_ref, keys_ref, list_ref, _ = source
    here = pl.ds(list_ref[at] * static.tiles.keys, static.tiles.keys)
    parts = [
        dot(q[c], k_ref[here, pl.ds(*piece)].T, static.interpret) for c, piece in enumerate(static.qk_pieces)
    ]
    product = functools.reduce(jnp.add, parts)
    values = [v_ref[here, pl.ds(*piece)] for piece in static.v_pieces]
    columns = {name: keys_ref[f, here] for f, name in enumerate(static.key_fields)}
    bias = _bias(rows, columns, tables, static)
    if static.activation == "softmax":
        logits = (product + bias) * (scale * _LOG2_E)
    else:
        logits = product * scale + bias
    if masked:
        keys, queries = _of(Keys, columns), _of(Queries, rows)
        seen = visible(jax.tree.map(lambda x: x[:, None], queries), jax.tree.map(lambda x: x[None, :], keys))
        logits = jnp.where(seen, logits, _MASKED)
        # Padding may hold NaN, which a weight of zero does not remove.
        values = [jnp.where((keys.request >= 0)[:, None], x, jnp.zeros_like(x)) for x in values]
    return _add(running, logits, values, static)


def _of(kind: Any, vectors: Vectors) -> Any:
    return kind(**{name: x for name, x in vectors.items() if name in kind._fields})


def _kernel(
    q_ref: Any,  # [R, dq]
    queries_ref: Any,  # [query fields, R]
    scale_ref: Any,  # [1]
    *refs: Any,  # tables [n]; of each source k, v [S, d], keys [fields, S], list [S / block], counts [2]; out [R, dv]
    static: _Static,
) -> None:
    given = (static.entries > 0) + (static.buckets > 0)
    tables, sources, out_ref = refs[:given], refs[given:-1], refs[-1]
    count = static.tiles.queries
    q = [q_ref[:, pl.ds(*piece)] for piece in static.qk_pieces]
    rows = {name: queries_ref[f, :] for f, name in enumerate(static.query_fields)}
    softmax = static.activation == "softmax"
    running = _Running(
        tuple(jnp.zeros((count, size), jnp.float32) for _, size in static.v_pieces),
        jnp.full((count,), _MASKED, jnp.float32) if softmax else None,
        jnp.zeros((count,), jnp.float32) if softmax else None,
    )
    for source in (tuple(sources[i : i + 5]) for i in range(0, len(sources), 5)):
        visit = functools.partial(
            _visit, q=q, rows=rows, scale=scale_ref[0], tables=tables, source=source, static=static
        )
        whole, seen = source[4][0], source[4][1]
        running = jax.lax.fori_loop(0, whole, functools.partial(visit, masked=False), running)
        running = jax.lax.fori_loop(whole, seen, functools.partial(visit, masked=True), running)
    total: Any = jnp.full((count,), static.divisor, jnp.float32)
    saw = rows["request"] >= 0
    if running.top is not None and running.total is not None:
        saw &= running.top > 0.5 * _MASKED
        total = jnp.where(saw, running.total, 1.0)
    for out, piece in zip(running.out, static.v_pieces, strict=True):
        value = jnp.where(saw[:, None], out / total[:, None], 0.0)
        out_ref[:, pl.ds(*piece)] = value.astype(out_ref.dtype)


def _stacked(
    tokens: Queries | Keys, places: Places, biased: bool, multiple: int
) -> tuple[tuple[str, ...], jax.Array]:
    """The vectors that are not None, filled up: their names, and all of them as [B, fields, n]."""
    vectors = tokens._asdict() | (places._asdict() if biased else {})
    there = {name: fill(value, 1, multiple) for name, value in vectors.items() if value is not None}
    return tuple(there), jnp.stack(list(there.values()), axis=1)


def _per_head(x: jax.Array) -> pl.BlockSpec:
    """The block [n] of an array [1 or B, 1 or H, n] that belongs to the program's row and head."""
    batched, headed = x.shape[0] > 1, x.shape[1] > 1
    return pl.BlockSpec(
        (None, None, x.shape[2]), lambda i, h, b: (b if batched else 0, h if headed else 0, 0)
    )


def run(problem: Problem, tiles: Tiles | None = None, interpret: bool = False) -> jax.Array:
    """See jgr.ops.biased_attention; the bias is in tables, or None. tiles: None for the heuristic's. interpret: run on
    any platform, slowly."""
    assert not isinstance(problem.bias, jax.Array)
    _, count, heads, dim = problem.q.shape
    v_dim = problem.sources[0].v.shape[3]
    if tiles is None:
        longest = max(s.k.shape[2] for s in problem.sources)
        tiles = choose_tiles(
            count, longest, max(dim, v_dim), problem.q.dtype.itemsize, problem.bias is not None
        )
    q, queries = fill(problem.q, 1, tiles.queries), pad_tokens(problem.queries, tiles.queries)
    batch, padded = q.shape[:2]
    blocks = padded // tiles.queries

    def of_block(size: int) -> pl.BlockSpec:  # later blocks of a history see more: they start first
        return pl.BlockSpec((None, tiles.queries, None, size), lambda i, h, b: (b, blocks - 1 - i, h, 0))

    biased = problem.bias is not None
    query_fields, vectors = _stacked(queries, problem.places, biased, tiles.queries)
    scale = problem.scale[:, :, None]
    tables = [x.astype(jnp.float32) for x in problem.bias or () if x is not None]
    operands = [q, vectors, scale, *tables]
    specs = [
        of_block(dim),
        pl.BlockSpec((None, len(query_fields), tiles.queries), lambda i, h, b: (b, 0, blocks - 1 - i)),
        *(_per_head(x) for x in (scale, *tables)),
    ]
    key_fields: tuple[str, ...] = ()
    for source in problem.sources:
        keys = pad_tokens(source.keys, tiles.keys)
        key_fields, key_vectors = _stacked(keys, source.places, biased, tiles.keys)
        k, v = (fill(x, 2, tiles.keys) for x in (source.k, source.v))
        span = k.shape[2]
        if problem.triangle:
            lengths = (problem.queries.request >= 0).sum(1)
            order, counts = causal_lists(lengths, blocks, span // tiles.keys, tiles)
        else:
            order, counts = lists(queries, keys, tiles)
        operands += [k, v, key_vectors, order, counts]
        specs += [
            *(pl.BlockSpec((None, None, span, size), lambda i, h, b: (b, h, 0, 0)) for size in (dim, v_dim)),
            pl.BlockSpec((None, len(key_fields), span), lambda i, h, b: (b, 0, 0)),
            pl.BlockSpec((None, None, span // tiles.keys), lambda i, h, b: (b, blocks - 1 - i, 0)),
            pl.BlockSpec((None, None, 2), lambda i, h, b: (b, blocks - 1 - i, 0)),
        ]
    # A float32 product is made of three TF32 products; for a whole wide head these spill registers.
    most = 64 if q.dtype == jnp.float32 else 256
    entries, buckets = [*(x.shape[2] for x in tables), 0, 0][:2]
    static = _Static(
        problem.activation,
        problem.divisor,
        pieces_of(dim, most),
        pieces_of(v_dim, most),
        tiles,
        query_fields,
        key_fields,
        entries,
        buckets,
        interpret,
    )
    out = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(blocks, heads, batch),
        in_specs=specs,
        out_specs=of_block(v_dim),
        out_shape=jax.ShapeDtypeStruct((batch, padded, heads, v_dim), q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="biased_attention",
    )(*operands)
    return out[:, :count]  # type: ignore[no-any-return]


def biased_attention(problem: Problem) -> jax.Array:
    """See jgr.ops.biased_attention."""
    return pallas_rows.run(problem) if problem.in_rows else run(problem)


def interpreted(problem: Problem) -> jax.Array:
    """See jgr.ops.biased_attention. Runs the kernel step by step, on any platform."""
    return (pallas_rows.run if problem.in_rows else run)(problem, interpret=True)
