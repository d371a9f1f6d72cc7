# SPDX-License-Identifier: Apache-2.0
"""What tests, compile checks and benchmarks of the ops share: cases, and arguments drawn for them.

An op lists its shapes once, in its `cases.py`, as an `OpCases` named OP (and others, where the folder holds several):
tests and `jgr bench ops` draw arrays from them, the compile check only needs their shapes.
"""

from __future__ import annotations

import importlib
import pkgutil
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


def all_ops() -> list[OpCases]:
    """Every OpCases of every op's cases.py, by name."""
    ops = importlib.import_module("jgr.ops")
    found = []
    for module in pkgutil.iter_modules(ops.__path__, "jgr.ops."):
        if module.ispkg:
            cases = importlib.import_module(f"{module.name}.cases")
            found += [value for value in vars(cases).values() if isinstance(value, OpCases)]
    return sorted(found, key=lambda op: op.name)
