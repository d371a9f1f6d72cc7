# SPDX-License-Identifier: Apache-2.0
"""All inputs of a program in one transfer to the device (FLAME-6): the host writes them into one byte buffer, which is
used again for every batch (`jgr.serving.scorers.executors.Staging`), and the program takes them apart.

The one idea: the buffer crosses as 32-bit words, and each array begins at a fixed multiple of 256 bytes. So on the
device a float32 or int32 array is a slice of the words with another type, and nothing is converted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jgr.models.words import WORD, seen_as

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

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the whole buffer, as one record with these inputs."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [(field.dtype, field.shape) for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.size,
            }
        )

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
