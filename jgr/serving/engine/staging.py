# SPDX-License-Identifier: Apache-2.0
"""What the host gives a program, in one transfer (FLAME-6), from buffers that are used again.

The one idea: a transfer may go on after the call that started it, and on a CPU the program reads the buffer itself. So
a buffer belongs to one run, from its packing until its outputs are there, and nobody else can get at it meanwhile. A
scorer's executor has one run at a time and one buffer (`Staging`). A decoder's shape may have several runs in flight
(`StagedInputs`), each with a buffer of its own, which `collect` gives back. Of a run that failed it is not given back,
for nobody knows when the device is done with it: the next run gets a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import ALIGNMENT, BufferLayout

T = TypeVar("T")


class Staging:
    """One executor's buffer: the host writes it, it goes to the device in one piece, and it is written again.

    A transfer may go on after the call that started it, and on a CPU the program reads the buffer itself. So a program
    owns the buffer until its outputs are ready, and `views` waits for them.

    device: where the programs run; None: the first one. memory_kind: the kind of memory from which the device reads the
    words; None: page-locked host memory, except on a CPU, which does not need it. pinned: False for the runtime's own
    copy instead. The thread that writes the buffer must create it, after it was bound to a NUMA node, so that the
    memory is near (FLAME-5).
    """

    def __init__(
        self,
        layout: BufferLayout,
        device: jax.Device | None = None,
        memory_kind: str | None = None,
        *,
        pinned: bool = True,
    ) -> None:
        device = device or jax.devices()[0]
        has = {memory.kind for memory in device.addressable_memories()}
        if memory_kind is None and pinned and device.platform != "cpu" and "pinned_host" in has:
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

    def write(self, content: npt.NDArray[np.uint8]) -> None:
        """All inputs at once: [size] uint8, laid out alike. Waits as `views` does."""
        jax.block_until_ready(self._reader)
        self._buffer[:] = content

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The shape, dtype and placement of the words, for which a program's first argument is compiled."""
        return jax.ShapeDtypeStruct(self._words.shape, jnp.uint32, sharding=self._memory)

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs, which the next call of `views` waits for."""
        out = self.start(program, *others)
        self._reader = out
        return out

    def start(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs. The caller knows when the buffer may be written to."""
        # A compiled program takes a NumPy array to its device faster than device_put does.
        words = jax.device_put(self._words, self._memory) if self._pinned else self._words
        return program(words, *others)


Buffer = tuple[Staging, Any]
"""With its arrays as a tree."""


@dataclass(frozen=True)
class TreeLayout:
    """How the arrays of a tree stand in a buffer; a static argument of the functions that read them."""

    buffer: BufferLayout
    tree: Any

    @classmethod
    def of(cls, example: Any) -> TreeLayout:
        """For trees like this one, of arrays of numbers of 1, 2 or 4 bytes."""
        leaves, tree = jax.tree.flatten(example)
        return cls(BufferLayout.of({str(at): (x.shape, x.dtype) for at, x in enumerate(leaves)}), tree)

    def unpack(self, words: jax.Array) -> Any:
        """The tree, bit for bit as it was written; for jitted functions. words: [size / 4] uint32."""
        return jax.tree.unflatten(self.tree, self.buffer.unpack(words).values())


class StagedInputs:
    """The inputs of one compiled shape: trees of arrays like `example`, in as many buffers as runs are in flight."""

    def __init__(self, example: Any) -> None:
        self.layout = TreeLayout.of(example)
        self._free: deque[Buffer] = deque()

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The words for which a program's first argument is compiled."""
        return self._new().example

    def stage(self) -> Staged:
        """A buffer that no run reads, to be written to. Any thread may call it."""
        try:
            buffer = self._free.pop()
        except IndexError:
            staging = self._new()
            buffer = staging, jax.tree.unflatten(self.layout.tree, staging.views().values())
        return Staged(buffer, self._free)

    def _new(self) -> Staging:
        return Staging(self.layout.buffer, pinned=False)


class Staged:
    """One run's inputs. arrays: the tree, with what an earlier run wrote; to be written whole before `run`."""

    def __init__(self, buffer: Buffer, free: deque[Buffer]) -> None:
        self._buffer: Buffer | None = buffer
        self._free = free
        self.arrays = buffer[1]

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs."""
        assert self._buffer is not None, "it may be another run's"
        return self._buffer[0].start(program, *others)

    def give_back(self) -> None:
        """The program's outputs are there, so that it reads the buffer no more. Further calls do nothing."""
        buffer, self._buffer, self.arrays = self._buffer, None, None
        if buffer is not None:
            self._free.append(buffer)
