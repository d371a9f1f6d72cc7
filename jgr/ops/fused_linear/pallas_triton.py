# SPDX-License-Identifier: Apache-2.0
"""A fused linear layer as a GPU kernel (FLAME-9): norm in the prologue, matrix product, the rest in the epilogue.

One program owns a tile of the result. It goes over its rows of x piece by piece, first for their mean and variance,
then for the product of the normalised values. Neither these values nor the product are ever stored.

Invariants: the inner size and the width are multiples of the tile's; rows are padded; statistics, accumulator and
epilogue are float32. There are no gradients.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.fused_linear.arguments import ACTIVATIONS, EPS, Activation, Layer, gelu_by_series
from jgr.ops.segment_attention.pallas_triton import dot, fill

_MAX_ELEMENTS = 2**31 - 1  # the kernel's offsets are int32


@dataclass(frozen=True)
class Tiles:
    """rows, columns: a tile of the result; inner: columns of a piece of x; warps, stages: as Triton calls them."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def choose_tiles(rows: int, inner: int, width: int, itemsize: int) -> Tiles:
    """The largest tiles that spill no register when compiled for an H200 (`make compile-gpu`); not timed on one."""
    most_rows, most_columns, most_inner = (64, 64, 32) if itemsize > 2 else (128, 128, 64)
    return Tiles(
        min(most_rows, max(16, pl.next_power_of_2(rows))),
        math.gcd(width, most_columns),
        math.gcd(inner, most_inner),
        warps=8,
        stages=3,
    )


def supports(layer: Layer) -> str | None:
    """Why the kernel cannot run, or None."""
    inner, width = layer.w.shape
    for name, size in (("inner size", inner), ("width", width)):
        if size % 16:
            return f"the {name} is {size}, not a multiple of 16"
    if layer.x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {layer.x.dtype}"
    if layer.w.dtype != layer.x.dtype:
        return f"w is {layer.w.dtype}, and x is {layer.x.dtype}"
    if not layer.x.size or not layer.w.size:
        return "an array is empty"
    if max(layer.x.size, layer.w.size, layer.x.shape[0] * width) > _MAX_ELEMENTS:
        return "an array has more elements than an int32 can count"
    return None


@dataclass(frozen=True)
class _Static:
    """What the kernel knows at trace time. given: the names of the optional arrays, in order of their references."""

    inner: int
    tiles: Tiles
    given: tuple[str, ...]
    normalize: bool
    activation: Activation
    interpret: bool


def _activate(x: jax.Array, activation: Activation) -> jax.Array:
    return gelu_by_series(x, jnp.exp) if activation == "gelu" else ACTIVATIONS[activation](x)


def _statistics(x_ref: Any, static: _Static) -> tuple[jax.Array, jax.Array]:
    """Mean and 1 / standard deviation of each row [R]."""
    size = static.tiles.inner

    def merge(at: Any, known: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Mean, and sum of squares around it, of the first `at` pieces and one more."""
        mean, squares = known
        x = x_ref[:, pl.ds(at * size, size)].astype(jnp.float32)
        own = x.sum(axis=1) / size
        off = x - own[:, None]
        away = own - mean
        share = 1.0 / (at + 1).astype(jnp.float32)
        squares += (off * off).sum(axis=1) + away * away * (size * at.astype(jnp.float32) * share)
        return mean + away * share, squares

    zeros = jnp.zeros((static.tiles.rows,), jnp.float32)
    mean, squares = jax.lax.fori_loop(0, static.inner // size, merge, (zeros, zeros))
    return mean, jax.lax.rsqrt(squares / static.inner + EPS)


def _kernel(x_ref: Any, w_ref: Any, *refs: Any, static: _Static) -> None:
    """refs: those that are given of bias [C], scale [D], shift [D], residual [R, C]; last out [R, C]. x_ref: [R, D]."""
    given, out_ref, size = dict(zip(static.given, refs[:-1], strict=True)), refs[-1], static.tiles.inner
    mean, deviation = _statistics(x_ref, static) if static.normalize else (None, None)

    def multiply(at: Any, total: jax.Array) -> jax.Array:
        here = pl.ds(at * size, size)
        x = x_ref[:, here]
        if mean is not None and deviation is not None:
            x = (x.astype(jnp.float32) - mean[:, None]) * deviation[:, None]
            if "scale" in given:
                x *= given["scale"][here].astype(jnp.float32)[None, :]
            if "shift" in given:
                x += given["shift"][here].astype(jnp.float32)[None, :]
        return total + dot(x.astype(w_ref.dtype), w_ref[here, :], static.interpret)

    zeros = jnp.zeros((static.tiles.rows, static.tiles.columns), jnp.float32)
    out = jax.lax.fori_loop(0, static.inner // size, multiply, zeros)
    if "bias" in given:
        out += given["bias"][:].astype(jnp.float32)[None, :]
    out = _activate(out, static.activation)
    if "residual" in given:
        out += given["residual"][:, :].astype(jnp.float32)
    out_ref[:, :] = out.astype(out_ref.dtype)


def run(layer: Layer, tiles: Tiles | None = None, interpret: bool = False) -> jax.Array:
    """See jgr.ops.fused_linear. tiles: None for the heuristic's. interpret: run on any platform, slowly."""
    count, inner = layer.x.shape
    width = layer.w.shape[1]
    tiles = tiles or choose_tiles(count, inner, width, layer.x.dtype.itemsize)
    tile = pl.BlockSpec((tiles.rows, tiles.columns), lambda j, i: (i, j))
    whole = pl.BlockSpec((inner,), lambda j, i: (0,))
    optional = {
        "bias": (layer.bias, pl.BlockSpec((tiles.columns,), lambda j, i: (j,))),
        "scale": (layer.scale, whole),
        "shift": (layer.shift, whole),
        "residual": (None if layer.residual is None else fill(layer.residual, 0, tiles.rows), tile),
    }
    given = {name: (array, spec) for name, (array, spec) in optional.items() if array is not None}
    x = fill(layer.x, 0, tiles.rows)
    static = _Static(inner, tiles, tuple(given), layer.normalize, layer.activation, interpret)
    out = pl.pallas_call(
        functools.partial(_kernel, static=static),
        # Programs that run at the same time share rows of x, which each of them reads twice.
        grid=(width // tiles.columns, x.shape[0] // tiles.rows),
        in_specs=[
            pl.BlockSpec((tiles.rows, inner), lambda j, i: (i, 0)),
            pl.BlockSpec((inner, tiles.columns), lambda j, i: (0, j)),
            *(spec for _, spec in given.values()),
        ],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="fused_linear",
    )(x, layer.w, *(array for array, _ in given.values()))
    return out[:count]  # type: ignore[no-any-return]


def fused_linear(layer: Layer) -> jax.Array:
    """See jgr.ops.fused_linear."""
    return run(layer)


def interpreted(layer: Layer) -> jax.Array:
    """See jgr.ops.fused_linear. Runs the kernel step by step, on any platform."""
    return run(layer, interpret=True)
