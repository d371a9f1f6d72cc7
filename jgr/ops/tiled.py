# SPDX-License-Identifier: Apache-2.0
"""Matrices in bfloat16 as jgr-native multiplies them on a CPU with AMX: two rows side by side, in tiles of 32 rows.

The library can bring a matrix into this order in every call, which costs as much as its product with some hundred rows;
here it is done once, when a model is loaded.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops import native


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["rows", "columns"])
@dataclass(frozen=True)
class Tiled:
    """A matrix, or a stack of them, in the place of an array [..., D, F]."""

    values: Any  # [..., native.tiled_size] bfloat16
    rows: int  # D
    columns: int  # F

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's, [..., D, F]."""
        return (*self.values.shape[:-1], self.rows, self.columns)


def is_wanted(dtype: Any) -> bool:
    """Whether products with matrices of a dtype are the library's here."""
    return dtype == jnp.bfloat16 and bool(native.in_use()) and "bfloat16" in native.library().types


@jax.jit
def tiled(stack: jax.Array) -> Tiled:
    """A stack of matrices [L, D, F] bfloat16, once `is_wanted` holds."""
    count, rows, columns = stack.shape
    size = native.tiled_size(rows, columns)
    (values,) = native.call("pack", [(count, size)], stack)
    return Tiled(values, rows, columns)


def product(x: jax.Array, w: Tiled) -> jax.Array:
    """x [..., D] bfloat16 times w [D, F]: [..., F], summed in float32. Has no gradient."""
    count = math.prod(x.shape[:-1])
    (made,) = native.call("dense", [(count, w.columns)], x.reshape(count, w.rows), w.values)
    return made.reshape(*x.shape[:-1], w.columns)
