# SPDX-License-Identifier: Apache-2.0
"""Biased attention with a bias that is looked up already, as a GPU kernel (FLAME-8), of a history or of targets.

Which keys a query sees follows from the numbers of its block's rows and columns and from two lengths. So a call needs
no other program before it, which on a short history would take longer than the attention. One program owns a block of
queries of one head. Blocks of keys in which nothing is seen are not visited; a target begins with its own key, and
visits only the context's blocks.

Invariants: arrays are padded to whole blocks; logits, weights and accumulators are float32; rows of padding are 0.
There are no gradients.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.biased_attention.bias import Activation, Problem
from jgr.ops.segment_attention.pallas_triton import Tiles, dot, fill

_MASKED = -1e30  # finite, so that differences are never NaN
_LOG2_E = math.log2(math.e)
MOST_DIM = 128


def choose_tiles(queries: int, keys: int, itemsize: int, dim: int) -> Tiles:
    """The largest tiles that spill no register when compiled for an H200 (`make compile-gpu`); not timed on one."""
    rows, columns = (64, 64) if itemsize == 2 else (32, 32)
    rows = min(rows, max(16, pl.next_power_of_2(queries)))
    return Tiles(rows, min(columns, max(16, pl.next_power_of_2(keys))), warps=4, stages=1 if dim > 64 else 2)


class _Static(NamedTuple):
    """What the kernel knows at trace time. keys: places for keys in the context; biased: whether there is a bias."""

    activation: Activation
    divisor: float
    tiles: Tiles
    keys: int
    targets: bool
    biased: bool
    interpret: bool


class _Running(NamedTuple):
    """The running result: weighted values [R, dv]; for softmax the maximum and the sum [R], in units of log2."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def _logits(product: jax.Array, bias: Any, scale: jax.Array, static: _Static) -> Any:
    if static.activation == "softmax":
        return (product + bias) * (scale * _LOG2_E)
    return product * scale + bias


def _silu(logits: jax.Array) -> jax.Array:
    return logits / (1.0 + jnp.exp2(logits * -_LOG2_E))


def _visit(
    at: Any,
    running: _Running,
    q: jax.Array,
    rows: jax.Array,
    there: jax.Array,
    scale: jax.Array,
    refs: tuple[Any, Any, Any],
    masked: bool,
    static: _Static,
) -> _Running:
    """Add the at-th block of keys."""
    k_ref, v_ref, bias_ref = refs
    size = static.tiles.keys
    here = pl.ds(at * size, size)
    product, v = dot(q, k_ref[here, :].T, static.interpret), v_ref[here, :]
    logits = _logits(product, bias_ref[:, here] if static.biased else 0.0, scale, static)
    if masked:
        columns = at * size + jnp.arange(size)
        real = columns < there
        seen = real[None, :] if static.targets else real[None, :] & (columns[None, :] <= rows[:, None])
        logits = jnp.where(seen, logits, _MASKED)
        v = jnp.where(real[:, None], v, jnp.zeros_like(v))  # NaN stays NaN with a weight of 0
    if static.activation == "silu":
        return running._replace(out=running.out + dot(_silu(logits).astype(v.dtype), v, static.interpret))
    top = jnp.maximum(running.top, logits.max(axis=1))
    shrink, weights = jnp.exp2(running.top - top), jnp.exp2(logits - top[:, None])
    out = running.out * shrink[:, None] + dot(weights.astype(v.dtype), v, static.interpret)
    return _Running(out, top, running.total * shrink + weights.sum(axis=1))


def _begin(
    q: jax.Array, scale: jax.Array, bias_ref: Any, own: tuple[Any, ...], v_dim: int, static: _Static
) -> _Running:
    """The state before the first block: nothing is seen yet, or targets have seen their own keys."""
    if not own:
        nothing = jnp.zeros((static.tiles.queries,), jnp.float32)
        return _Running(jnp.zeros((static.tiles.queries, v_dim), jnp.float32), nothing + _MASKED, nothing)
    k, v = (ref[:, :].astype(jnp.float32) for ref in own)
    product = (q.astype(jnp.float32) * k).sum(axis=1)
    logits = _logits(product, bias_ref[0, static.keys] if static.biased else 0.0, scale, static)
    if static.activation == "silu":
        return _Running(_silu(logits)[:, None] * v, logits, logits)
    return _Running(v, logits, jnp.ones_like(logits))


def _kernel(
    q_ref: Any,  # [R, dq]
    k_ref: Any,  # [S, dq]
    v_ref: Any,  # [S, dv]
    scale_ref: Any,  # [1]
    asked_ref: Any,  # [1], queries that are no padding
    there_ref: Any,  # [1], keys of the first source that are no padding
    *refs: Any,  # bias [1 or R, S + targets] where there is one; own k [R, dq] and v [R, dv] of targets; out [R, dv]
    static: _Static,
) -> None:
    bias_ref, own, out_ref = refs[0], refs[static.biased : -1], refs[-1]
    size, columns = static.tiles.queries, static.tiles.keys
    block = pl.num_programs(0) - 1 - pl.program_id(0)
    q, scale, there = q_ref[:, :], scale_ref[0], there_ref[0]
    rows = block * size + jnp.arange(size)
    running = _begin(q, scale, bias_ref, own, v_ref.shape[1], static)
    visit = functools.partial(
        _visit, q=q, rows=rows, there=there, scale=scale, refs=(k_ref, v_ref, bias_ref), static=static
    )
    first, last = (there, there) if static.targets else (block * size, (block + 1) * size)
    whole = jnp.minimum(first, there) // columns
    seen = pl.cdiv(jnp.minimum(last, there), columns)
    running = jax.lax.fori_loop(0, whole, functools.partial(visit, masked=False), running)
    running = jax.lax.fori_loop(whole, seen, functools.partial(visit, masked=True), running)
    real = rows < asked_ref[0]
    total: Any = static.divisor
    if static.activation == "softmax":
        total = jnp.where(real, running.total, 1.0)[:, None]
    out_ref[:, :] = jnp.where(real[:, None], running.out / total, 0.0).astype(out_ref.dtype)


def supports(problem: Problem) -> str | None:
    """Why this kernel cannot run, though the arrays suit a GPU kernel; or None."""
    if problem.lengths is None:
        return "the bias is looked up already, and the tokens are neither a history nor targets"
    dim = max(problem.q.shape[-1], problem.sources[0].v.shape[-1])
    return f"the head size is {dim}, more than {MOST_DIM}" if dim > MOST_DIM else None


def _per_head(x: jax.Array) -> pl.BlockSpec:
    """The block of an array [1 or B, 1 or H, ...] that belongs to the program's row and head."""
    batched, headed = x.shape[0] > 1, x.shape[1] > 1
    rest = x.shape[2:]
    return pl.BlockSpec(
        (None, None, *rest), lambda i, h, b: (b if batched else 0, h if headed else 0, *[0] * len(rest))
    )


def run(problem: Problem, tiles: Tiles | None = None, interpret: bool = False) -> jax.Array:
    """See jgr.ops.biased_attention. tiles: None for the heuristic's. interpret: run on any platform, slowly."""
    assert problem.lengths is not None and not isinstance(problem.bias, tuple)
    source, targets = problem.sources[0], problem.targets
    batch, count, heads, dim = problem.q.shape
    keys, v_dim = source.v.shape[2:]
    if tiles is None:
        tiles = choose_tiles(count, keys, problem.q.dtype.itemsize, max(dim, v_dim))
    q, k, v = fill(problem.q, 1, tiles.queries), fill(source.k, 2, tiles.keys), fill(source.v, 2, tiles.keys)
    blocks, rows = q.shape[1] // tiles.queries, tiles.queries

    def of_block(size: int) -> pl.BlockSpec:  # later blocks of a history see more: they start first
        return pl.BlockSpec((None, rows, None, size), lambda i, h, b: (b, blocks - 1 - i, h, 0))

    scale, lengths = problem.scale[:, :, None], [x.astype(jnp.int32) for x in problem.lengths]
    operands = [q, k, v, scale, *lengths]
    a_row = pl.BlockSpec((1,), lambda i, h, b: (b,))
    specs = [of_block(dim), _per_head(k), _per_head(v), _per_head(scale), a_row, a_row]
    if problem.bias is not None:
        bias = problem.bias
        extra = max(0, k.shape[2] - bias.shape[3])
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra else bias
        each = bias.shape[2] > 1
        bias = fill(bias, 2, rows) if each else bias
        batched, headed = bias.shape[0] > 1, bias.shape[1] > 1
        operands.append(bias)
        specs.append(
            pl.BlockSpec(
                (None, None, rows if each else 1, bias.shape[3]),
                lambda i, h, b: (b if batched else 0, h if headed else 0, blocks - 1 - i if each else 0, 0),
            )
        )
    if targets:
        for own in (problem.sources[1].k, problem.sources[1].v):
            operands.append(fill(own, 2, rows))
            specs.append(
                pl.BlockSpec((None, None, rows, own.shape[3]), lambda i, h, b: (b, h, blocks - 1 - i, 0))
            )
    static = _Static(
        problem.activation, problem.divisor, tiles, keys, targets, problem.bias is not None, interpret
    )
    out = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(blocks, heads, batch),
        in_specs=specs,
        out_specs=of_block(v_dim),
        out_shape=jax.ShapeDtypeStruct((batch, q.shape[1], heads, v_dim), q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="biased_attention_rows",
    )(*operands)
    return out[:, :count]  # type: ignore[no-any-return]
