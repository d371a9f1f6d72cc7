# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a program for several devices, each of which has some of the heads of every layer.

The one idea: such a program is traced under a mesh with the axis AXIS. XLA divides its matmuls by where the weights
stand, and adds what the devices found; it cannot divide a kernel. So an attention is divided here, by heads: each
device runs the op on its own heads, as if there were no others, and the same code picks the same kernel. Where no such
mesh is set, as for one device, all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

AXIS = "tensor"
EVERYWHERE = PartitionSpec()
T = TypeVar("T")


def devices() -> int:
    """How many devices share the program that is traced; 1 within what each of them runs for itself."""
    mesh = jax.sharding.get_abstract_mesh()
    return int(mesh.shape[AXIS]) if AXIS in mesh.auto_axes else 1


def along(axis: int) -> PartitionSpec:
    """An array whose axis of this number is divided over the devices."""
    return PartitionSpec(*[None] * axis, AXIS)


def everywhere(tree: T) -> T:
    """The arrays of a tree, whole on every device."""
    return tree if devices() == 1 else jax.lax.with_sharding_constraint(tree, EVERYWHERE)


def rows(table: jax.Array, at: Any) -> jax.Array:
    """Entries [..., D] of a table [V, D], or [...] of [V], whole on every device, however the table is divided."""
    return everywhere(table[at])


def divided(tree: T, axis: int) -> T:
    """The arrays of a tree, divided over the devices along an axis."""
    return tree if devices() == 1 else jax.lax.with_sharding_constraint(tree, along(axis))


def on_each(call: Callable[..., Any], arguments: tuple[Any, ...], given: Any, made: Any) -> Any:
    """call(*arguments), which each device runs on its parts.

    given, made: the PartitionSpec of each argument and of what is made of them, or trees of such.
    """
    if devices() == 1:
        return call(*arguments)
    return jax.shard_map(call, in_specs=given, out_specs=made, check_vma=False)(*arguments)


def of_heads(count: int, axis: int) -> tuple[PartitionSpec, Callable[[jax.Array], jax.Array]]:
    """How keys or values whose `axis` has `count` heads are given to `on_each`, and what a device takes of its part.

    Where there are fewer heads than devices, every device is given all of them and takes the one that its queries read;
    the number of devices is then a multiple of `count`.
    """
    every = devices()
    if count % every == 0:
        return along(axis), lambda x: x

    def own(x: jax.Array) -> jax.Array:
        at = jax.lax.axis_index(AXIS) * count // every
        return jax.lax.dynamic_slice_in_dim(x, at, 1, axis)

    return EVERYWHERE, own
