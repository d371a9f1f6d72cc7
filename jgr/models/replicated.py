# SPDX-License-Identifier: Apache-2.0
"""Devices of one process that each have the whole model and a row of every batch (data parallelism).

The one idea: a program is that of one device, run by each on its own row under `jax.shard_map`. What the rows are made
of is divided along the first axis, weights and tables are whole everywhere, and nothing is added over devices: so an
answer is one device's, kernel by kernel. It is compiled once, and the host dispatches it once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jgr.config import ConfigError
from jgr.models.devices import Devices

AXIS = "data"
WHOLE, ROWS, SECOND = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)
"""What is whole on every device; what is divided along its first axis, or along its second one."""


@dataclass(frozen=True)
class Replicated(Devices):
    """The devices of a mesh with the one axis AXIS. `everywhere` and `place` are those of Devices."""

    @classmethod
    def of(cls, count: int) -> Replicated:
        """The first `count` devices of this process, two at least. ConfigError where there are fewer."""
        found = jax.local_devices()
        if count > len(found):
            raise ConfigError(
                f"data_parallel.devices: {count}, but this process has {len(found)} "
                f"{'device' if len(found) == 1 else 'devices'} ({found[0].platform})"
            )
        return cls(Mesh(np.array(found[:count]), (AXIS,), axis_types=(AxisType.Auto,)))

    @property
    def rows_of_each(self) -> NamedSharding:
        """The sharding of what is divided along its first axis."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, ROWS)

    @property
    def each(self) -> list[jax.Device]:
        """The devices, in the order of their rows."""
        assert self.mesh is not None
        return list(self.mesh.devices.flat)

    def spread(self, call: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        """`call` as each device runs it on its part. given, made: the PartitionSpec of each argument and of what is
        made of them, or of trees of such."""
        return jax.shard_map(call, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)

    def parts(self, array: jax.Array) -> list[jax.Array]:
        """What each device has of an array that is divided along its first axis, in the order of the devices."""
        there = {part.device: part.data for part in array.addressable_shards}
        return [there[device] for device in self.each]

    def whole(self, parts: list[jax.Array]) -> jax.Array:
        """The array of such parts."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.rows_of_each, parts)


def exchange(sent: jax.Array, axis: str = AXIS) -> jax.Array:
    """What each device has for each other one [D, Q, E], and then what each got from each other one; within shard_map
    over the axis."""
    received: jax.Array = jax.lax.all_to_all(sent, axis, split_axis=0, concat_axis=0, tiled=True)
    return received
