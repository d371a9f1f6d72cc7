# SPDX-License-Identifier: Apache-2.0
"""The compiled programs that read and write rows of tables in pages. Tables whose rows are alike share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.models import words
from jgr.models.words import Cells

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]

WRITES = (16, 128, 1024)
"""How many rows a program writes, at most; larger transfers are cut."""
NOWHERE = np.iinfo(np.int32).max
"""A cell that no pool has: nothing is written there."""


class Kind(NamedTuple):
    """What rows are to a program. cells: how they stand in pages. dtype: of their numbers; given_as: of those that a
    program makes of them."""

    cells: Cells
    dtype: np.dtype[Any]
    given_as: np.dtype[Any]


class RowPrograms:
    """array: the shape and placement of the pool's. `compile` makes the programs; the other calls give calls of them
    that are still to be given the pool's array. Any thread may call these."""

    def __init__(self, array: jax.ShapeDtypeStruct) -> None:
        self._array = array
        self._made: dict[tuple[str, Kind, int], jax.stages.Compiled] = {}

    def compile(self, kind: Kind, count: int) -> None:
        """Make the programs that write rows, and those that gather `count` of them."""
        places, cells = _shape(count, np.int32), kind.cells
        for name, staged in (("gather", None), ("staged", _shape((count, cells.words), np.uint32))):
            if (name, kind, count) not in self._made:
                gather = jax.jit(_gather, static_argnames=("cells", "dtype", "given_as"))
                made = gather.lower(self._array, places, staged, **kind._asdict())
                self._made[name, kind, count] = made.compile()
        for size in WRITES:
            if ("write", kind, size) not in self._made:
                write = jax.jit(_write, static_argnames="cells", donate_argnums=0)
                values = _shape((size, cells.words), np.uint32)
                made = write.lower(self._array, _shape(size, np.int32), values, cells=cells)
                self._made["write", kind, size] = made.compile()

    def writes(self, kind: Kind, cells: Int32, values: UInt32) -> Iterator[Callable[[Any], Any]]:
        """The calls that write the first rows of `values` [n, words] to cells [m <= n], in their order."""
        at = 0
        while at < len(cells):
            size = next((size for size in WRITES if size >= len(cells) - at), WRITES[-1])
            some = min(size, len(cells) - at)
            numbers = np.full(size, NOWHERE, np.int32)
            numbers[:some] = cells[at : at + some]
            padded = np.zeros((size, values.shape[1]), np.uint32)
            padded[:some] = values[at : at + some]
            yield _bound(self._made["write", kind, size], numbers, padded)
            at += some

    def gather(self, kind: Kind, places: Int32, staged: UInt32 | None) -> Callable[[Any], Any]:
        """The call that gives the rows [n, width] at places [n]. -1 stands for `staged` [n, words]; None: zeros."""
        name = "gather" if staged is None else "staged"
        return _bound(self._made[name, kind, len(places)], places, staged)


def _shape(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape,) if isinstance(shape, int) else shape, dtype)


def _bound(program: Callable[..., Any], *others: Any) -> Callable[[jax.Array], Any]:
    return lambda array: program(array, *others)


def _gather(
    array: jax.Array,
    places: jax.Array,
    staged: jax.Array | None,
    *,
    cells: Cells,
    dtype: np.dtype[Any],
    given_as: np.dtype[Any],
) -> jax.Array:
    found = words.read(array, *cells.place(jnp.maximum(places, 0)), cells.words)
    there = (places >= 0)[:, None]
    found = jnp.where(there, found, 0 if staged is None else staged)
    return words.seen_as(found, dtype).astype(given_as)


def _write(array: jax.Array, numbers: jax.Array, values: jax.Array, *, cells: Cells) -> jax.Array:
    return words.write(array, *cells.place(numbers), values)
