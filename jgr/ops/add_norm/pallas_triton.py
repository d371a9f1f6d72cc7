# SPDX-License-Identifier: Apache-2.0
"""The sum and its norm as a GPU kernel: a program has some rows, reads them once, and writes both results.

Rows after the last one repeat it, so no store needs a mask.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.pieces import pieces_of

_MAX_ELEMENTS = 2**31 - 1  # the kernel's offsets are int32
_ELEMENTS = 4096
"""About so many numbers of a row, or of some rows, fit into the registers of one program."""
_MAX_WIDTH = 16_384


def supports(x: jax.Array, added: jax.Array | None, scale: jax.Array, eps: float) -> str | None:
    """Why the kernel cannot run, or None."""
    if x.shape[-1] % 16 or x.shape[-1] > _MAX_WIDTH:
        return f"rows have {x.shape[-1]} numbers, not a multiple of 16 up to {_MAX_WIDTH}"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {x.dtype}"
    if scale.dtype != x.dtype or (added is not None and added.dtype != x.dtype):
        return f"scale and what is added are not both {x.dtype}, as x is"
    if not 0 < math.prod(x.shape) <= _MAX_ELEMENTS:
        return f"there are {math.prod(x.shape)} numbers, which an int32 must count"
    return None


def _kernel(
    scale_ref: Any,  # [D]
    x_ref: Any,  # [N, D]
    *refs: Any,  # [N, D] each: what is added, and the sum, where there is a sum; then the norm
    rows: int,
    eps: float,
) -> None:
    *sides, normed_ref = refs
    count, width = x_ref.shape
    row = jnp.minimum(pl.program_id(0) * rows + jnp.arange(rows), count - 1)
    pieces = [pl.ds(*piece) for piece in pieces_of(width)]
    sums = [x_ref[row, piece] for piece in pieces]
    if sides:
        both = zip(sums, (sides[0][row, piece] for piece in pieces), strict=True)
        sums = [(x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype) for x, y in both]
    wide = [total.astype(jnp.float32) for total in sums]
    squares = functools.reduce(jnp.add, [(total * total).sum(axis=1) for total in wide])
    inverse = jax.lax.rsqrt(squares / width + eps)[:, None]
    for total, exact, piece in zip(sums, wide, pieces, strict=True):
        if sides:
            sides[1][row, piece] = total
        normed_ref[row, piece] = (exact * inverse).astype(total.dtype) * scale_ref[piece][None, :]


def run(
    x: jax.Array, added: jax.Array | None, scale: jax.Array, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See jgr.ops.add_norm; x and added are [N, D]. interpret: run on any platform, slowly."""
    count, width = x.shape
    rows = max(1, _ELEMENTS // pl.next_power_of_2(width))
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sides = () if added is None else (added,)
    made: list[jax.Array] = pl.pallas_call(
        functools.partial(_kernel, rows=rows, eps=eps),
        grid=(pl.cdiv(count, rows),),
        out_shape=[whole for _ in (*sides, x)],
        compiler_params=plt.CompilerParams(num_warps=4 if width <= _ELEMENTS else 8, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(scale, x, *sides)
    return (made[0] if sides else x), made[-1]


def add_norm(
    x: jax.Array, added: jax.Array | None, scale: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See jgr.ops.add_norm; x and added are [N, D]."""
    return run(x, added, scale, eps)


def interpreted(
    x: jax.Array, added: jax.Array | None, scale: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See jgr.ops.add_norm. Runs the kernel step by step, on any platform."""
    return run(x, added, scale, eps, interpret=True)
