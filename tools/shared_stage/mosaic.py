# SPDX-License-Identifier: Apache-2.0
"""The shared stage in Mosaic GPU: two warpgroups compute, a third one loads keys and values ahead of them by TMA.

Both products are wgmma, whose operands stand in shared memory but for the weights, which never leave the registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tools.shared_stage import NOTHING, Tiles, parts_of

COMPUTING = 2
"""Warpgroups that compute; each has `Tiles.rows` rows."""


def supports(q: jax.Array, tiles: Tiles) -> str | None:
    """Why the kernel cannot run, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {q.dtype}, and wgmma here multiplies 16 bits"
    if q.shape[-1] % 64 or q.shape[2] % (COMPUTING * tiles.rows):
        return f"of {q.shape[2:]} rows and head size, one is no multiple of {COMPUTING * tiles.rows} and 64"
    return None


def shared_stage(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, tiles: Tiles, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """See tools.shared_stage. interpret: jax's InterpretGPUParams, to run it step by step on any platform.

    Raises ValueError for what the kernel does not support.
    """
    if (problem := supports(q, tiles)) is not None:
        raise ValueError(problem)
    batch, kv_heads, rows, dim = q.shape
    out, lse = plgpu.kernel(
        functools.partial(_entry, tiles=tiles, dtype=q.dtype, dim=dim),
        out_type=(
            jax.ShapeDtypeStruct((tiles.splits, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((tiles.splits, batch, kv_heads, rows), jnp.float32),
        ),
        grid=(rows // (COMPUTING * tiles.rows), kv_heads * tiles.splits, batch),
        grid_names=("block", "head", "request"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(lengths, q, k, v)
    return out, lse


def product(a_smem: Any, b_smem: Any, shape: tuple[int, int]) -> Any:
    """a b^T of two matrices in shared memory."""

    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # type: ignore[attr-defined]


def plus_product(out: Any, a: Any, b_smem: Any) -> Any:
    """out + a b, of which only b stands in shared memory."""

    def multiply(acc: Any) -> None:
        plgpu.wgmma(acc, a, b_smem)

    return pl.run_state(multiply)(plgpu.ACC.init(out))  # type: ignore[attr-defined]


def _entry(*refs: Any, tiles: Tiles, dtype: Any, dim: int) -> None:
    """Divide shared memory, and set the barriers up."""

    def in_tiles(*shape: int) -> Any:
        """As wgmma and TMA want arrays of 16 bits."""
        return plgpu.SMEM(
            shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        )

    ready = plgpu.Barrier(num_barriers=tiles.stages)
    free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=tiles.stages)
    pl.run_scoped(
        lambda *scoped: _kernel(*refs, *scoped, tiles=tiles, dim=dim),
        in_tiles(COMPUTING, tiles.rows, dim),
        in_tiles(tiles.stages, tiles.tokens, dim),
        in_tiles(tiles.stages, tiles.tokens, dim),
        plgpu.SMEM((COMPUTING, tiles.rows, dim), jnp.float32),
        plgpu.SMEM((COMPUTING, tiles.rows), jnp.float32),
        plgpu.Barrier(num_barriers=COMPUTING),
        ready,
        ready,
        free,
        free,
        collective_axes="warpgroup",
    )


def _kernel(
    lengths_ref: Any,  # [B]
    q_ref: Any,  # [B, K, R, d]
    k_ref: Any,  # [B, T, K, d]
    v_ref: Any,
    out_ref: Any,  # [splits, B, K, R, d]
    lse_ref: Any,  # [splits, B, K, R]
    q_smem: Any,  # [COMPUTING, rows, d]
    k_smem: Any,  # [stages, tokens, d]
    v_smem: Any,
    out_smem: Any,  # [COMPUTING, rows, d]
    lse_smem: Any,  # [COMPUTING, rows]
    q_ready: Any,
    k_ready: Any,
    v_ready: Any,
    k_free: Any,
    v_free: Any,
    *,
    tiles: Tiles,
    dim: int,
) -> None:
    request, head = lax.axis_index("request"), lax.axis_index("head")
    kv_head, split = lax.div(head, jnp.int32(tiles.splits)), lax.rem(head, jnp.int32(tiles.splits))
    group = lax.axis_index("warpgroup")
    start, stop = parts_of(lengths_ref[request], split, k_ref.shape[1], tiles)
    steps = pl.cdiv(stop - start, jnp.int32(tiles.tokens))

    def slot(step: Any) -> Any:
        return lax.rem(step, jnp.int32(tiles.stages))

    @pl.when(group == COMPUTING)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _step(step: Any) -> None:
            tokens = pl.ds(start + step * tiles.tokens, tiles.tokens)
            for ref, smem, ready, free in (
                (k_ref, k_smem, k_ready, k_free),
                (v_ref, v_smem, v_ready, v_free),
            ):
                pl.when(step >= tiles.stages)(functools.partial(plgpu.barrier_wait, free.at[slot(step)]))
                plgpu.copy_gmem_to_smem(
                    ref.at[request, tokens, kv_head], smem.at[slot(step)], ready.at[slot(step)]
                )

    @pl.when(group < COMPUTING)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        here = pl.ds((lax.axis_index("block") * COMPUTING + group) * tiles.rows, tiles.rows)
        own_q = q_smem.at[group]
        plgpu.copy_gmem_to_smem(q_ref.at[request, kv_head, here], own_q, q_ready.at[group])
        plgpu.barrier_wait(q_ready.at[group])

        def step(i: Any, running: Any, masked: bool) -> Any:
            top, total, out = running
            plgpu.barrier_wait(k_ready.at[slot(i)])

            shape = (tiles.rows, tiles.tokens)
            scores = product(own_q, k_smem.at[slot(i)], shape)
            plgpu.barrier_arrive(k_free.at[slot(i)])
            scores = scores * (math.log2(math.e) / math.sqrt(dim))
            if masked:
                token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                scores = jnp.where(start + i * tiles.tokens + token < stop, scores, NOTHING)
            new_top = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, shape, [0]))
            total = total * shrink + weights.sum(axis=1)
            out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
            weights = weights.astype(v_smem.dtype)
            plgpu.barrier_wait(v_ready.at[slot(i)])
            out = plus_product(out, weights, v_smem.at[slot(i)])
            plgpu.barrier_arrive(v_free.at[slot(i)])
            return new_top, total, out

        def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)  # type: ignore[no-any-return]

        by_row = plgpu.Layout.WGMMA.reduce(1)
        running = (
            filled((tiles.rows,), NOTHING, by_row),
            filled((tiles.rows,), 0.0, by_row),
            filled((tiles.rows, dim), 0.0, plgpu.Layout.WGMMA),
        )
        whole = lax.div(stop - start, jnp.int32(tiles.tokens))
        running = lax.fori_loop(0, whole, functools.partial(step, masked=False), running)
        top, total, out = lax.fori_loop(whole, steps, functools.partial(step, masked=True), running)
        # A part without tokens: zeros, of no weight in the merge.
        lse_smem.at[group][...] = jnp.where(total > 0, top + jnp.log2(total), NOTHING)
        total = jnp.where(total > 0, total, 1.0)
        out_smem.at[group][...] = out / lax.broadcast_in_dim(total, out.shape, [0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[group], out_ref.at[split, request, kv_head, here])
        plgpu.copy_smem_to_gmem(lse_smem.at[group], lse_ref.at[split, request, kv_head, here])
        plgpu.wait_smem_to_gmem(0)
