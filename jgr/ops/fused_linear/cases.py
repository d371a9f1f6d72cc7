# SPDX-License-Identifier: Apache-2.0
"""Shapes of the fused linear layer for tests, compile checks and timing.

rows, inner, width: the sizes of the product. with_: which optional arrays there are. The widths are those of HSTU (u,
v, q and k side by side), of DLRMv3's STU layers and of Climber.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jgr.ops.fused_linear import fused_linear
from jgr.ops.testing import Case, OpCases, Work

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})
_ALL = ("bias", "scale", "shift", "residual")
_AFFINE = ("bias", "scale", "shift")


def _case(name: str, rows: int, inner: int, width: int, tags: frozenset[str], **options: Any) -> Case:
    return Case(name, dict(rows=rows, inner=inner, width=width, **options), tags)


_CI = frozenset({"ci"})
CASES = (
    _case("all", 37, 96, 80, _CI, with_=_ALL, activation="gelu"),
    _case("plain_norm", 5, 64, 48, _CI, activation="silu"),
    _case("no_norm", 20, 48, 32, _CI, with_=("bias", "residual"), normalize=False, activation="relu"),
    _case("shift_only", 16, 32, 16, _CI, with_=("shift",)),
    _case("hstu_ml20m_b32", 32 * 211, 256, 1024, _BENCH, activation="silu"),
    _case("stu_4k", 4096, 512, 2048, _BENCH | _COMPILE, with_=_AFFINE),
    _case("stu_out_4k", 4096, 1536, 512, _BENCH | _COMPILE, with_=("residual",), normalize=False),
    _case("climber_up", 1024, 128, 128, _BENCH | _COMPILE, with_=_AFFINE, activation="gelu"),
    _case("climber_down", 1024, 128, 128, _BENCH | _COMPILE, with_=("bias", "residual"), normalize=False),
    _case("all_f16", 1000, 480, 1440, _COMPILE, with_=_ALL, activation="silu", dtype="float16"),
    _case("all_f32", 1000, 512, 2048, _COMPILE, with_=_ALL, activation="gelu", dtype="float32"),
    _case("few_rows", 1, 4096, 4096, _COMPILE, with_=_ALL, activation="relu"),
)


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    rows, inner, width = (case.shape[name] for name in ("rows", "inner", "width"))
    shapes = {"x": (rows, inner), "w": (inner, width)}
    optional = {"bias": (width,), "scale": (inner,), "shift": (inner,), "residual": (rows, width)}
    shapes |= {name: optional[name] for name in case.shape.get("with_", ())}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _options(case: Case) -> dict[str, Any]:
    return {name: case.shape[name] for name in ("normalize", "activation") if name in case.shape}


def _work(case: Case, dtype: Any) -> Work:
    """The work of the product; norm and activation are left out."""
    rows, inner, width = (case.shape[name] for name in ("rows", "inner", "width"))
    moved = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in _shapes(case, dtype).values())
    return Work(2.0 * rows * inner * width, float(moved + rows * width * np.dtype(dtype).itemsize))


OP = OpCases("fused_linear", fused_linear, CASES, _shapes, lambda case, rng: {}, _work, _options)
