# SPDX-License-Identifier: Apache-2.0
"""Beam keys and values moved in place after a selection (XGR-4, direct indices): row w then holds row parents[w].

The alternative to a table of ancestors: attention reads row w and nothing else, at the price of copying the slots in
every step. The kernel needs no second buffer: it goes over the one buffer twice, upwards over the rows whose parent
stands above them, then downwards over those whose parent stands below. No row is overwritten before it is read if
`parents` never decreases. So the beams must first be put in the order of their parents (a stable argsort), and in the
order of their scores at the end only. Other orders give wrong values, and nothing checks it, since the parents are
known on the device alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.dispatch import Implementation, dispatch, kernel

_ROWS_IN_FLIGHT = 8  # loads before the first store: the loop is bound by latency
_COLUMNS = 512


def _supports(kv: jax.Array, parents: jax.Array) -> str | None:
    if math.prod(kv.shape[-2:]) % 16:
        return f"a row has {math.prod(kv.shape[-2:])} values, not a multiple of 16"
    return "there is nothing to move" if kv.size == 0 else None


def _take(kv: jax.Array, parents: jax.Array) -> jax.Array:
    """Copy the rows by index; here the parents may come in any order."""
    index = parents.reshape(*(1,) * (kv.ndim - 5), parents.shape[0], 1, parents.shape[1], 1, 1)
    return jnp.take_along_axis(kv, index, axis=-3)


def _move(
    parents_ref: Any,  # [B, W]
    _kv_ref: Any,  # the same memory as out_ref
    out_ref: Any,  # [W, columns]
    *,
    requests: int,
) -> None:
    """Move the rows. A program owns some columns of all rows of a slot, a thread some of those, so order is kept."""
    width = out_ref.shape[0]
    request = pl.program_id(2) % requests

    def move(first: Any, step: int) -> None:
        rows, values = [], []
        for i in range(_ROWS_IN_FLIGHT):
            # the last row again, where the count is not a multiple
            row = jnp.clip(first + step * i, 0, width - 1)
            parent = parents_ref[request, row]
            moves = parent > row if step > 0 else parent < row
            rows.append(row)
            values.append(out_ref[jnp.where(moves, parent, row), :])
        for row, value in zip(rows, values, strict=True):
            out_ref[row, :] = value

    blocks = pl.cdiv(width, _ROWS_IN_FLIGHT)

    @pl.loop(0, blocks)
    def _up(i: Any) -> None:
        move(i * _ROWS_IN_FLIGHT, 1)

    @pl.loop(0, blocks)
    def _down(i: Any) -> None:
        move(width - 1 - i * _ROWS_IN_FLIGHT, -1)


def run(kv: jax.Array, parents: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See reorder_beam_kv."""
    *leading, slots, width, kv_heads, dim = kv.shape
    values = kv_heads * dim
    columns = math.gcd(values, _COLUMNS)
    flat = kv.reshape(math.prod(leading), slots, width, values)
    block = pl.BlockSpec((None, None, width, columns), lambda c, s, n: (n, s, 0, c))
    moved = pl.pallas_call(
        functools.partial(_move, requests=parents.shape[0]),
        grid=(values // columns, slots, flat.shape[0]),
        in_specs=[pl.BlockSpec(), block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(flat.shape, kv.dtype),
        input_output_aliases={1: 0},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="reorder_beam_kv",
    )(parents, flat)
    return moved.reshape(kv.shape)  # type: ignore[no-any-return]


def _kernel(kv: jax.Array, parents: jax.Array) -> jax.Array:
    return run(kv, parents)


def _interpreted(kv: jax.Array, parents: jax.Array) -> jax.Array:
    return run(kv, parents, interpret=True)


IMPLEMENTATIONS = (*kernel(_kernel, _interpreted, _supports), Implementation("xla", _take))


def reorder_beam_kv(kv: jax.Array, parents: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """Give row w of every slot the content that row parents[w] had.

    Args:
        kv: [B, S, W, K, d], or with more axes in front (layers). Donate it: the kernel then needs no second buffer.
        parents: [B, W] int32, never decreasing along W.

    Returns:
        kv with its rows moved.
    """
    out: jax.Array = dispatch("reorder_beam_kv", IMPLEMENTATIONS, implementation, kv, parents)
    return out
