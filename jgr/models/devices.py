# SPDX-License-Identifier: Apache-2.0
"""The devices that share one model (tensor parallelism), and which part of each parameter stands on which of them.

The one idea: a parameter is divided along the one of its axes that `Spec.axes` names heads, kv_heads or mlp, so that a
layer's matmuls come in pairs, the first divided by its columns and the second by its rows, and what the devices found
is added once for each pair. Tables of tokens or items are divided by rows. What has no such axis stands whole on every
device. XLA divides the programs by where the parameters stand; attention divides itself (jgr.ops.split).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from jgr.config import ConfigError
from jgr.models.params import Spec
from jgr.ops import split

PAIRED = ("heads", "kv_heads", "mlp")
"""Axes along which a layer's parameters are divided. Their sizes must be multiples of the number of devices."""
TABLES = ("vocab", "items")
"""Axes of tables' rows. Where they do not divide, the rows themselves are divided, along the axis `embed`."""
Cfg = TypeVar("Cfg")
_TURN = threading.Lock()


@dataclass(frozen=True)
class Devices:
    """One device, the first, where mesh is None; else those of a mesh with the one axis split.AXIS."""

    mesh: Mesh | None = None

    @classmethod
    def of(cls, count: int) -> Devices:
        """The first `count` devices of this process. ConfigError where there are fewer."""
        found = jax.local_devices()
        if count > len(found):
            raise ConfigError(
                f"model.tensor_parallel: {count}, but this process has {len(found)} "
                f"{'device' if len(found) == 1 else 'devices'} ({found[0].platform})"
            )
        if count == 1:
            return cls()
        return cls(Mesh(np.array(found[:count]), (split.AXIS,), axis_types=(AxisType.Auto,)))

    @property
    def count(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def everywhere(self) -> jax.sharding.Sharding:
        """The sharding of what is whole on every device."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, split.EVERYWHERE)

    def along(self, axis: int) -> jax.sharding.Sharding:
        """The sharding of what is divided along an axis."""
        return self.everywhere if self.mesh is None else NamedSharding(self.mesh, split.along(axis))

    def place(self, tree: Any) -> Any:
        """The arrays of a tree on every device. On one device they stay as they are, and are not bound to it."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        return jax.device_put(tree, self.everywhere)

    def rows(self, table: jax.Array, at: npt.NDArray[np.int32]) -> jax.Array:
        """Rows [n, D] of a table, whole on every device, wherever they stand."""
        if self.mesh is None:
            return table[at]
        with self.turn():
            found: jax.Array = _rows(table, at, self.everywhere)
            return found

    def turn(self) -> AbstractContextManager[Any]:
        """Held while a program with a sum over devices is dispatched: all of them must begin such programs in one
        order, or they wait for each other for ever."""
        return nullcontext() if self.mesh is None else _TURN

    def on_each(
        self, call: Callable[..., jax.Array], arguments: tuple[jax.Array, ...], divided: tuple[bool, ...]
    ) -> jax.Array:
        """call(*arguments), which each device runs on its columns [n, m / devices] of those that are divided; so is
        the result. For jitted functions that sum nothing over devices."""
        if self.mesh is None:
            return call(*arguments)
        given = tuple(split.along(1) if each else split.EVERYWHERE for each in divided)
        run = jax.shard_map(call, mesh=self.mesh, in_specs=given, out_specs=split.along(1), check_vma=False)
        made: jax.Array = run(*arguments)
        return made

    def wait(self, tree: Any) -> None:
        """Wait until every device has made its part of these outputs. For one device reading them is to wait."""
        if self.mesh is not None:
            jax.block_until_ready(tree)


ONE = Devices()


@partial(jax.jit, static_argnums=2)
def _rows(table: jax.Array, at: npt.NDArray[np.int32], where: NamedSharding) -> jax.Array:
    found: jax.Array = jax.lax.with_sharding_constraint(table[at], where)
    return found


@dataclass(frozen=True)
class Placement:
    """Where the parameters of one model go.

    axes: those along which parameters are divided. copies: how often each key/value head is there, with `head` numbers:
    where a model has fewer of them than there are devices, each device has a copy of the one that its queries read.
    """

    devices: Devices = ONE
    axes: tuple[str, ...] = PAIRED
    copies: int = 1
    head: int = 1

    def put(self, spec: Spec, values: npt.NDArray[Any], dtype: Any = None) -> jax.Array:
        """A parameter as it is served, cast to dtype; None: its own. No device is given more than its part."""
        if self.devices.mesh is None:
            return jnp.asarray(values, dtype)
        if self.copies > 1 and "kv_heads" in spec.axes:
            heads = values.reshape(*values.shape[:-1], -1, self.head)
            values = np.repeat(heads, self.copies, axis=-2).reshape(*values.shape[:-1], -1)
        values = np.asarray(values, jax.dtypes.canonicalize_dtype(values.dtype if dtype is None else dtype))
        axis = self.divided(replace(spec, shape=values.shape))
        where = self.devices.everywhere if axis is None else self.devices.along(axis)
        placed: jax.Array = jax.device_put(values, where)
        return placed

    def divided(self, spec: Spec) -> int | None:
        """The number of the axis along which a parameter is divided; None: it is whole on every device."""
        for name in self.axes:
            if name in spec.axes:
                return spec.axes.index(name)
        if any(name in spec.axes for name in TABLES):
            for axis, (name, size) in enumerate(zip(spec.axes, spec.shape, strict=True)):
                if name in (*TABLES, "embed") and size % self.devices.count == 0:
                    return axis
        return None


ON_ONE = Placement()


def of_generator(cfg: Cfg, devices: Devices) -> tuple[Cfg, Placement]:
    """A generator's config as several devices serve it, and where its parameters go.

    ConfigError, which names what does not divide: the devices must have equal parts of the query heads and of the MLP,
    and either equal parts of the key/value heads or equally many devices for each of these.
    """
    count, found = devices.count, cfg
    if count == 1:
        return cfg, ON_ONE
    read: Any = found
    for name in ("heads", "mlp", "expert_mlp"):
        size = getattr(read, name, 0)
        if size % count:
            raise ConfigError(f"model.tensor_parallel: {count} does not divide the model's {name}, {size}")
    keys = read.kv_heads
    if keys % count and count % keys:
        raise ConfigError(
            f"model.tensor_parallel: {count} neither divides the model's kv_heads, {keys}, nor is a multiple of them"
        )
    copies = max(1, count // keys)
    return replace(read, kv_heads=keys * copies), Placement(devices, copies=copies, head=read.head_dim)


def of_tables(devices: Devices) -> Placement:
    """For models whose tables of items are divided, and whose layers stand whole on every device."""
    return Placement(devices, axes=())
