# SPDX-License-Identifier: Apache-2.0
"""Attention mass as two GPU kernels: what each query's weights sum up to, then what each key gets of them.

In the first one a program owns a block of queries of one head, in the second a block of keys. Each gets a list of the
blocks of the other side in which something is seen, those seen whole first, for which no mask is computed. Scores are
computed twice, so that none is ever written.

Invariants: as in segment attention; queries and keys of padding are 0; a query that sees nothing has a sum that makes
all its weights 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.pieces import Pieces, pieces_of
from jgr.ops.segment_attention import pallas_triton as segments
from jgr.ops.segment_attention.pallas_triton import Tiles, choose_tiles, dot, fill, stacked
from jgr.ops.segment_attention.visibility import (
    Arguments,
    Keys,
    Queries,
    pad_tokens,
    prepare,
    relation,
    visible,
)

_MASKED = -1e30  # finite, so that differences are never NaN
_NOTHING_SEEN = 1e30

_MOST_FLOAT32 = 64
"""The widest heads of float32: kernels for wider ones spill registers when compiled for an H200."""


def supports(call: Arguments) -> str | None:
    """Why the kernel cannot run, or None."""
    if call.q.dtype == jnp.float32 and call.q.shape[-1] > _MOST_FLOAT32:
        return f"float32 heads are larger than {_MOST_FLOAT32}"
    return segments.supports(call)


class _Static(NamedTuple):
    """What the kernels know at trace time. query_fields, key_fields: the names of the stacked vectors."""

    pieces: Pieces
    scale: float
    tiles: Tiles
    query_fields: tuple[str, ...]
    key_fields: tuple[str, ...]
    interpret: bool

    def scores(self, q: list[jax.Array], k: list[jax.Array]) -> jax.Array:
        parts = [dot(rows, columns.T, self.interpret) for rows, columns in zip(q, k, strict=True)]
        return functools.reduce(jnp.add, parts) * self.scale

    def seen(self, queries: list[jax.Array], keys: list[jax.Array]) -> jax.Array:
        """Which of the queries see which of the keys, [R, C]; given are their vectors, [R] and [C] each."""
        rows = Queries(**{name: queries[f][:, None] for f, name in enumerate(self.query_fields)})
        columns = Keys(**{name: keys[f][None, :] for f, name in enumerate(self.key_fields)})
        return visible(rows, columns)


def _load(ref: Any, here: Any, pieces: Pieces) -> list[jax.Array]:
    return [ref[here, pl.ds(*piece)] for piece in pieces]


def _vectors(ref: Any, here: Any, fields: tuple[str, ...]) -> list[jax.Array]:
    return [ref[f, here] for f in range(len(fields))]


def _totals(
    q_ref: Any,  # [R, d]
    queries_ref: Any,  # [query fields, R]
    k_ref: Any,  # [S, d]
    keys_ref: Any,  # [key fields, S]
    list_ref: Any,  # [key blocks]
    counts_ref: Any,  # [2]
    out_ref: Any,  # [R]
    *,
    static: _Static,
) -> None:
    """The logarithm, base 2, of the sum over each query's exponentials."""
    every = pl.ds(0, static.tiles.queries)
    q, queries = _load(q_ref, every, static.pieces), _vectors(queries_ref, every, static.query_fields)

    def visit(at: Any, running: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
        old, total = running
        here = pl.ds(list_ref[at] * static.tiles.keys, static.tiles.keys)
        scores = static.scores(q, _load(k_ref, here, static.pieces))
        if masked:
            keys = _vectors(keys_ref, here, static.key_fields)
            scores = jnp.where(static.seen(queries, keys), scores, _MASKED)
        top = jnp.maximum(old, scores.max(axis=1))
        return top, total * jnp.exp2(old - top) + jnp.exp2(scores - top[:, None]).sum(axis=1)

    none = jnp.zeros((static.tiles.queries,), jnp.float32)
    whole, some = counts_ref[0], counts_ref[1]
    running = jax.lax.fori_loop(0, whole, functools.partial(visit, masked=False), (none + _MASKED, none))
    top, total = jax.lax.fori_loop(whole, some, functools.partial(visit, masked=True), running)
    saw = (top > 0.5 * _MASKED) & (queries[0] >= 0)
    out_ref[...] = jnp.where(saw, top + jnp.log2(jnp.where(saw, total, 1.0)), _NOTHING_SEEN)


def _gains(
    k_ref: Any,  # [C, d]
    keys_ref: Any,  # [key fields, C]
    q_ref: Any,  # [T, d]
    queries_ref: Any,  # [query fields, T]
    totals_ref: Any,  # [T]
    list_ref: Any,  # [query blocks]
    counts_ref: Any,  # [2]
    mass_ref: Any,  # [C]
    seen_ref: Any,  # [C]
    *,
    static: _Static,
) -> None:
    """What each key gets of one head's queries, and how many queries see it."""
    every = pl.ds(0, static.tiles.keys)
    k, keys = _load(k_ref, every, static.pieces), _vectors(keys_ref, every, static.key_fields)

    def visit(at: Any, running: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
        mass, seen_by = running
        here = pl.ds(list_ref[at] * static.tiles.queries, static.tiles.queries)
        scores = static.scores(_load(q_ref, here, static.pieces), k)
        queries = _vectors(queries_ref, here, static.query_fields)
        if masked:
            seen = static.seen(queries, keys)
            scores = jnp.where(seen, scores, _MASKED)
            seers = seen.astype(jnp.int32).sum(axis=0)
        else:
            seers = jnp.zeros_like(seen_by) + (queries[0] >= 0).astype(jnp.int32).sum()
        return mass + jnp.exp2(scores - totals_ref[here][:, None]).sum(axis=0), seen_by + seers

    begin = jnp.zeros((static.tiles.keys,), jnp.float32), jnp.zeros((static.tiles.keys,), jnp.int32)
    whole, some = counts_ref[0], counts_ref[1]
    running = jax.lax.fori_loop(0, whole, functools.partial(visit, masked=False), begin)
    mass_ref[...], seen_ref[...] = jax.lax.fori_loop(
        whole, some, functools.partial(visit, masked=True), running
    )


def run(call: Arguments, tiles: Tiles | None = None, interpret: bool = False) -> jax.Array:
    """See jgr.ops.attention_mass. tiles: None for the heuristic's. interpret: run on any platform, slowly."""
    batch, count, heads, dim = call.q.shape
    groups = heads // call.k.shape[1]
    queries, (source,) = prepare(call)
    if tiles is None:
        tiles = choose_tiles(count, count, dim, call.q.dtype.itemsize)
    zero = jnp.zeros((), call.q.dtype)
    q = fill(jnp.where(queries.request[:, :, None, None] >= 0, call.q, zero), 1, tiles.queries)
    k = fill(jnp.where(source.keys.request[:, None, :, None] >= 0, call.k, zero), 2, tiles.keys)
    queries, keys = pad_tokens(queries, tiles.queries), pad_tokens(source.keys, tiles.keys)
    query_fields, of_queries = stacked(queries)
    key_fields, of_keys = stacked(keys)
    pieces = pieces_of(dim, 64 if q.dtype == jnp.float32 else 256)
    scale = dim**-0.5 * math.log2(math.e)
    static = _Static(pieces, scale, tiles, query_fields, key_fields, interpret)
    rows, columns = q.shape[1], k.shape[2]
    related = relation(queries, keys, tiles.queries, tiles.keys)
    n, m = related.shape[1:]

    def spec(sides: tuple[int | None, ...], at: Any) -> pl.BlockSpec:
        return pl.BlockSpec(sides, lambda i, h, b: at(i, h, b))

    options: dict[str, Any] = {
        "compiler_params": plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        "interpret": interpret,
    }
    totals = pl.pallas_call(
        functools.partial(_totals, static=static),
        grid=(n, heads, batch),
        in_specs=[
            spec((None, tiles.queries, None, dim), lambda i, h, b: (b, i, h, 0)),
            spec((None, len(query_fields), tiles.queries), lambda i, h, b: (b, 0, i)),
            spec((None, None, columns, dim), lambda i, h, b: (b, h // groups, 0, 0)),
            spec((None, len(key_fields), columns), lambda i, h, b: (b, 0, 0)),
            spec((None, None, m), lambda i, h, b: (b, i, 0)),
            spec((None, None, 2), lambda i, h, b: (b, i, 0)),
        ],
        out_specs=spec((None, None, tiles.queries), lambda i, h, b: (b, h, i)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
        name="attention_mass_totals",
        **options,
    )(q, of_queries, k, of_keys, *segments.in_lists(related))
    # A block of keys is owned by each query head, so that as many programs run as there are heads.
    of_head = spec((None, None, tiles.keys), lambda j, h, b: (b, h, j))
    mass, seen_by = pl.pallas_call(
        functools.partial(_gains, static=static),
        grid=(m, heads, batch),
        in_specs=[
            spec((None, None, tiles.keys, dim), lambda j, h, b: (b, h // groups, j, 0)),
            spec((None, len(key_fields), tiles.keys), lambda j, h, b: (b, 0, j)),
            spec((None, rows, None, dim), lambda j, h, b: (b, 0, h, 0)),
            spec((None, len(query_fields), rows), lambda j, h, b: (b, 0, 0)),
            spec((None, None, rows), lambda j, h, b: (b, h, 0)),
            spec((None, None, n), lambda j, h, b: (b, j, 0)),
            spec((None, None, 2), lambda j, h, b: (b, j, 0)),
        ],
        out_specs=[of_head, of_head],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, columns), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, columns), jnp.int32),
        ],
        name="attention_mass",
        **options,
    )(k, of_keys, q, of_queries, totals, *segments.in_lists(related.swapaxes(1, 2)))
    found: jax.Array = mass.sum(1) / jnp.maximum(seen_by[:, 0], 1)
    return found[:, :count]


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    return run(call)


def interpreted(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass. Runs the kernels step by step, on any platform."""
    return run(call, interpret=True)
