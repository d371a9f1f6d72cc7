# SPDX-License-Identifier: Apache-2.0
"""What tests, compile checks and benchmarks of the ops share: cases, and arguments drawn for them.

An op lists its shapes once, in its `cases.py`, as an `OpCases` named OP (and others, where the folder holds several):
tests and `jgr bench ops` draw arrays from them, the compile check only needs their shapes.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Case:
    """A named set of op arguments (shapes and options).

    tags: "ci" runs in the tests, "compile" is compiled for a GPU by `make compile-gpu`, "bench" is timed.
    """

    name: str
    shape: Mapping[str, Any]
    tags: frozenset[str] = field(default_factory=lambda: frozenset({"ci"}))


class Work(NamedTuple):
    """The least that a call must do: multiply-adds counted twice, and bytes read and written once each."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class OpCases:
    """An op and its cases.

    call: the public function; it takes implementation=. shapes(case, dtype): the arrays among its arguments, by name,
    as shapes without values. integers(case, rng): the values of those arrays that are not floats. work(case, dtype):
    the least that a call must do. options(case): static keyword arguments. timed: the implementations that
    `jgr bench ops` times; "pallas" on GPUs only, "native" where
    jgr-native is installed.
    """

    name: str
    call: Callable[..., Any]
    cases: tuple[Case, ...]
    shapes: Callable[[Case, Any], dict[str, jax.ShapeDtypeStruct]]
    integers: Callable[[Case, np.random.Generator], dict[str, npt.NDArray[Any]]]
    work: Callable[[Case, Any], Work]
    options: Callable[[Case], dict[str, Any]] = lambda case: {}
    timed: tuple[str, ...] = ("pallas", "xla")

    def tagged(self, tag: str) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if tag in case.tags)

    def draw(self, case: Case, dtype: Any, seed: int = 0) -> dict[str, jax.Array]:
        """The arrays of a case with values: floats from a normal distribution, all others from `integers`."""
        rng = np.random.default_rng(seed)
        given = self.integers(case, rng)
        return {
            name: jnp.asarray(
                given[name] if name in given else rng.standard_normal(shape.shape, np.float32), shape.dtype
            )
            for name, shape in self.shapes(case, dtype).items()
        }


class Check(NamedTuple):
    """One comparison of what "auto" runs on a device with the plain form in float32 there."""

    op: OpCases
    case: Case
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.case.name} {self.dtype}"

    def compiled(self) -> tuple[Any, Any]:
        """The two programs, plain and "auto"."""
        shapes = self.op.shapes(self.case, jnp.dtype(self.dtype))
        wide = {
            name: jax.ShapeDtypeStruct(x.shape, jnp.float32) if x.dtype == self.dtype else x
            for name, x in shapes.items()
        }
        call = functools.partial(self.op.call, **self.op.options(self.case))
        plain = "xla" if self.op.name == "reorder_beam_kv" else "reference"
        # A kernel says itself how exact a product is. That of a beam step is XLA's: TF32 unless more is asked for.
        asked = "highest" if self.op.name == "constrained_topk" else None
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(functools.partial(call, implementation=plain)).lower(**wide).compile()
        with jax.default_matmul_precision(asked):
            return exact, jax.jit(functools.partial(call, implementation="auto")).lower(**shapes).compile()

    def distance(self, programs: tuple[Any, Any] | None = None) -> float:
        """||got - exact|| / ||exact|| over what is finite; infinity where not the same places are.

        programs: what `compiled` gave. What padding gets after a plain prompt is anybody's, and is left out.
        """
        plain, auto = programs or self.compiled()
        arrays = self.op.draw(self.case, jnp.dtype(self.dtype), seed=zlib.crc32(self.case.name.encode()))
        wide = {name: x.astype(jnp.float32) if x.dtype == self.dtype else x for name, x in arrays.items()}
        exact, got = plain(**wide), auto(**arrays)
        if self.op.name == "segment_attention" and "lengths" in arrays:
            real = np.arange(exact.shape[1]) < np.asarray(arrays["lengths"])[:, None]
            got, exact = (np.asarray(x.astype(jnp.float32))[real] for x in (got, exact))
        both = zip(*map(jax.tree.leaves, (got, exact)), strict=True)
        return max(_distance(x, y) for x, y in both if jnp.issubdtype(y.dtype, jnp.floating))


def _distance(got: Any, exact: Any) -> float:
    x, y = (np.asarray(z, np.float64) for z in (got, exact))
    there = np.isfinite(y)
    if not np.array_equal(np.isfinite(x), there):
        return float("inf")
    return float(np.linalg.norm(x[there] - y[there]) / (np.linalg.norm(y[there]) or 1.0))


FARTHEST = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
"""The most that a Check's distance may be. One pass of TF32 is near 3e-4, and is not float32."""


def checks() -> list[Check]:
    """Every case of every op that a GPU has a form for, in 16 and in 32 bits where the case leaves that open.

    The plain form of a beam step has a score for every item and beam: too much for the cases that are timed.
    """
    return [
        Check(op, case, dtype)
        for op in all_ops()
        if "pallas" in op.timed or op.name == "constrained_topk"
        for case in op.cases
        if op.name != "constrained_topk" or "ci" in case.tags
        for dtype in ([case.shape["dtype"]] if "dtype" in case.shape else ["bfloat16", "float32"])
    ]


def all_ops() -> list[OpCases]:
    """Every OpCases of every op's cases.py, by name."""
    ops = importlib.import_module("jgr.ops")
    found: list[OpCases] = []
    for module in pkgutil.iter_modules(ops.__path__, "jgr.ops."):
        if module.ispkg:
            cases = importlib.import_module(f"{module.name}.cases")
            own = [value for value in vars(cases).values() if isinstance(value, OpCases)]
            found += [
                op for op in own if all(op is not other for other in found)
            ]  # another's may be imported
    return sorted(found, key=lambda op: op.name)
