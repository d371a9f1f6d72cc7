# SPDX-License-Identifier: Apache-2.0
"""All inputs of a program in one transfer (FLAME-6): a byte buffer that is written again and again, and taken apart
on the device.

The one idea: the buffer crosses as 32-bit words, each array beginning at a multiple of 256 bytes that never changes, so
that a float32 or int32 array is a slice of it, seen as another type, and nothing is converted.
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
class Place:
    """An array in the buffer: offset in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where each input of a program stands in its buffer; static, one for each profile. size: of the buffer, bytes."""

    places: tuple[Place, ...]
    size: int

    @classmethod
    def of(cls, inputs: Mapping[str, tuple[Sequence[int], npt.DTypeLike]]) -> Layout:
        """inputs: shape and dtype by name. ValueError for a dtype that has not 1, 2 or 4 bytes, and for bool."""
        places, end = [], 0
        for name, (shape, given) in inputs.items():
            dtype = np.dtype(given)
            if dtype.itemsize not in _ITEM_SIZES or (dtype.kind in "bSUV" and dtype.name != "bfloat16"):
                raise ValueError(f"{name}: {dtype} does not cross as it is; numbers of 1, 2 or 4 bytes do")
            place = Place(name, tuple(shape), dtype, end)
            places.append(place)
            end += -(-place.size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), end)

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """The inputs in a buffer of [size] bytes, to be written to."""
        return {
            place.name: buffer[place.offset : place.offset + place.size]
            .view(place.dtype)
            .reshape(place.shape)
            for place in self.places
        }

    def unpack(self, words: jax.Array) -> dict[str, jax.Array]:
        """The inputs, bit by bit as they were written, inside a jitted function. words: [size / 4] uint32."""
        words = jax.device_put(words, jax.memory.Space.Device)  # from pinned memory; else it is there already
        return {
            place.name: seen_as(
                words[place.offset // WORD : -(-(place.offset + place.size) // WORD)], place.dtype
            )
            .reshape(-1)[: math.prod(place.shape)]
            .reshape(place.shape)
            for place in self.places
        }


class Staging:
    """The buffer of one executor: written by the host, taken to the device in one piece, written again.

    device: of the programs. memory_kind: that the device reads the words from; None: its page-locked host memory, which
    a CPU does not need. Made by the thread that writes to it, after that was bound (FLAME-5).

    A transfer may go on after the call that started it, and on a CPU the device reads the buffer itself. So a buffer is
    lent to a program until its outputs are there, and `views` waits for them.
    """

    def __init__(
        self, layout: Layout, device: jax.Device | None = None, memory_kind: str | None = None
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
        """The inputs, to be written to, once the last program has read them."""
        jax.block_until_ready(self._reader)
        return self._views

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """What a program is compiled for, in the place of its first argument."""
        return jax.ShapeDtypeStruct(self._words.shape, jnp.uint32, sharding=self._memory)

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """program(words, *others), whose outputs are waited for before the buffer is written again."""
        # A compiled program takes a NumPy array to its device faster than device_put does.
        words = jax.device_put(self._words, self._memory) if self._pinned else self._words
        out = program(words, *others)
        self._reader = out
        return out
