# SPDX-License-Identifier: Apache-2.0
"""The heads as a GPU kernel: a program has one head of some tokens.

Tokens after the last one repeat it, so no store needs a mask.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.turned_heads.arguments import Arguments

_TOKENS = 32
_MAX_ELEMENTS = 2**31 - 1  # the kernel's offsets are int32


def supports(call: Arguments) -> str | None:
    """Why the kernel cannot run, or None."""
    half, optional = call.head // 2, (call.bias, call.q_norm, call.k_norm)
    if call.head % 2 or half < 16 or half & (half - 1):
        return f"the head size is {call.head}, not a power of two from 32 on"
    if call.x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {call.x.dtype}"
    if any(y is not None and y.dtype != call.x.dtype for y in optional):
        return f"bias and scales are not all {call.x.dtype}, as x is"
    if not 0 < math.prod(call.x.shape) <= _MAX_ELEMENTS:
        return f"there are {math.prod(call.x.shape)} numbers, which an int32 must count"
    return None


class _Static(NamedTuple):
    """What the kernel knows at trace time."""

    heads: int
    kv_heads: int
    half: int
    eps: float
    has_bias: bool
    has_norm: bool


def _kernel(
    x_ref: Any,  # [T, (H + 2 K) d]
    cos_ref: Any,  # [T, d / 2]
    sin_ref: Any,
    *refs: Any,  # where there are any, bias [(H + 2 K) d], scales of q and k [d]; then q [T * H, d], k and v [T * K, d]
    static: _Static,
) -> None:
    *optional, q_ref, k_ref, v_ref = refs
    (heads, kv_heads, half), count = static[:3], x_ref.shape[0]
    head, row = pl.program_id(1), pl.program_id(0) * _TOKENS + jnp.arange(_TOKENS)
    row = jnp.minimum(row, count - 1)
    sides = [head * 2 * half + start for start in (0, half)]
    given = [x_ref[row, pl.ds(start, half)] for start in sides]
    if static.has_bias:
        bias_ref = optional.pop(0)
        given = [x + bias_ref[pl.ds(start, half)][None, :] for x, start in zip(given, sides, strict=True)]

    def turned(scale: int) -> list[jax.Array]:
        x = [y.astype(jnp.float32) for y in given]
        if static.has_norm:
            squares = (x[0] * x[0]).sum(axis=1) + (x[1] * x[1]).sum(axis=1)
            inverse = jax.lax.rsqrt(squares / (2 * half) + static.eps)[:, None]
            scales = [optional[scale][pl.ds(start, half)][None, :] for start in (0, half)]
            x = [(y * inverse).astype(s.dtype) * s for y, s in zip(x, scales, strict=True)]
        a, b = (y.astype(jnp.float32) for y in x)
        cos, sin = cos_ref[row, :], sin_ref[row, :]
        return [a * cos - b * sin, b * cos + a * sin]

    def store(ref: Any, at: jax.Array, values: list[jax.Array]) -> None:
        for value, start in zip(values, (0, half), strict=True):
            ref[at, pl.ds(start, half)] = value.astype(ref.dtype)

    @pl.when(head < heads)
    def _() -> None:
        store(q_ref, row * heads + head, turned(0))

    @pl.when((head >= heads) & (head < heads + kv_heads))
    def _() -> None:
        store(k_ref, row * kv_heads + head - heads, turned(1))

    @pl.when(head >= heads + kv_heads)
    def _() -> None:
        store(v_ref, row * kv_heads + head - heads - kv_heads, given)


def run(call: Arguments, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See jgr.ops.turned_heads. interpret: run on any platform, slowly."""
    (batch, count, width), dim = call.x.shape, call.head
    heads, kv_heads, half = call.heads, call.kv_heads, call.head // 2
    operands = [call.x, *(y.reshape(batch, count, half) for y in (call.cos, call.sin))]
    specs = [pl.BlockSpec((None, count, n), lambda i, h, b: (b, 0, 0)) for n in (width, half, half)]
    if call.bias is not None:
        operands, specs = [*operands, call.bias], [*specs, pl.BlockSpec()]
    if call.q_norm is not None and call.k_norm is not None:
        operands, specs = [*operands, call.q_norm, call.k_norm], [*specs, pl.BlockSpec(), pl.BlockSpec()]
    static = _Static(heads, kv_heads, half, call.eps, call.bias is not None, call.q_norm is not None)
    sizes = [count * n for n in (heads, kv_heads, kv_heads)]
    q, k, v = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(pl.cdiv(count, _TOKENS), heads + 2 * kv_heads, batch),
        in_specs=specs,
        out_specs=[pl.BlockSpec((None, n, dim), lambda i, h, b: (b, 0, 0)) for n in sizes],
        out_shape=[jax.ShapeDtypeStruct((batch, n, dim), call.x.dtype) for n in sizes],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="turned_heads",
    )(*operands)
    return tuple(y.reshape(batch, count, -1, dim) for y in (q, k, v))


def turned_heads(call: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See jgr.ops.turned_heads."""
    return run(call)


def interpreted(call: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See jgr.ops.turned_heads. Runs the kernel step by step, on any platform."""
    return run(call, interpret=True)
