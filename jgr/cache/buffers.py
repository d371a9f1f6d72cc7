# SPDX-License-Identifier: Apache-2.0
"""All inputs of a program in one transfer to the device (FLAME-6): the host writes them into one byte buffer, which is
used again for every batch, and the program takes them apart.

The one idea: the buffer crosses as 32-bit words, and each array begins at a fixed multiple of 256 bytes. So on the
device a float32 or int32 array is a slice of the words with another type, and nothing is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.models.words import WORD, seen_as

T = TypeVar("T")

ALIGNMENT = 256
_ITEM_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class BufferField:
    """One array in the buffer. offset: of its first byte, a multiple of ALIGNMENT."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def size(self) -> int:
        """The array's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BufferLayout:
    """Where each input of a program stands in its buffer. Fixed; there is one for each shape profile.

    size: the whole buffer's bytes.
    """

    fields: tuple[BufferField, ...]
    size: int

    @classmethod
    def of(cls, inputs: Mapping[str, tuple[Sequence[int], npt.DTypeLike]]) -> BufferLayout:
        """Lay `inputs` (shape and dtype by name) out in their order.

        Raises ValueError for bool, and for a dtype whose size is not 1, 2 or 4 bytes.
        """
        fields, end = [], 0
        for name, (shape, given) in inputs.items():
            dtype = np.dtype(given)
            if dtype.itemsize not in _ITEM_SIZES or (dtype.kind in "bSUV" and dtype.name != "bfloat16"):
                raise ValueError(f"{name}: {dtype} does not cross as it is; numbers of 1, 2 or 4 bytes do")
            field = BufferField(name, tuple(shape), dtype, end)
            fields.append(field)
            end += -(-field.size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), end)

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Each input by its name, as a writable view into `buffer`, [size] uint8."""
        return {
            field.name: buffer[field.offset : field.offset + field.size]
            .view(field.dtype)
            .reshape(field.shape)
            for field in self.fields
        }

    def unpack(self, words: jax.Array) -> dict[str, jax.Array]:
        """Each input by its name, bit for bit as it was written; for jitted functions. words: [size / 4] uint32."""
        words = jax.device_put(
            words, jax.memory.Space.Device
        )  # moves them out of pinned memory; does nothing elsewhere
        return {
            field.name: seen_as(
                words[field.offset // WORD : -(-(field.offset + field.size) // WORD)], field.dtype
            )
            .reshape(-1)[: math.prod(field.shape)]
            .reshape(field.shape)
            for field in self.fields
        }


class Staging:
    """One executor's buffer: the host writes it, it goes to the device in one piece, and it is written again.

    A transfer may go on after the call that started it, and on a CPU the program reads the buffer itself. So a program
    owns the buffer until its outputs are ready, and `views` waits for them.

    device: where the programs run; None: the first one. memory_kind: the kind of memory from which the device reads the
    words; None: page-locked host memory, except on a CPU, which does not need it. The thread that writes the buffer
    must create it, after it was bound to a NUMA node, so that the memory is near (FLAME-5).
    """

    def __init__(
        self, layout: BufferLayout, device: jax.Device | None = None, memory_kind: str | None = None
    ) -> None:
        device = device or jax.devices()[0]
        has = {memory.kind for memory in device.addressable_memories()}
        if memory_kind is None and device.platform != "cpu" and "pinned_host" in has:
            memory_kind = "pinned_host"
        self._pinned = memory_kind is not None
        self._memory = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
        room = np.zeros(layout.size + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self._buffer = room[start : start + layout.size]
        self._words = self._buffer.view(np.uint32)
        self._views = layout.views(self._buffer)
        self._reader: Any = ()

    def views(self) -> dict[str, npt.NDArray[Any]]:
        """Each input by its name, writable; waits until the last program has read the buffer."""
        jax.block_until_ready(self._reader)
        return self._views

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The shape, dtype and placement of the words, for which a program's first argument is compiled."""
        return jax.ShapeDtypeStruct(self._words.shape, jnp.uint32, sharding=self._memory)

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs, which the next call of `views` waits for."""
        # A compiled program takes a NumPy array to its device faster than device_put does.
        words = jax.device_put(self._words, self._memory) if self._pinned else self._words
        out = program(words, *others)
        self._reader = out
        return out
