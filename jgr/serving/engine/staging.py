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

    def write(self, content: npt.NDArray[np.uint8]) -> None:
        """All inputs at once: [size] uint8, laid out alike. Waits as `views` does."""
        jax.block_until_ready(self._reader)
        self._buffer[:] = content

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The shape, dtype and placement of the words, for which a program's first argument is compiled."""
        return jax.ShapeDtypeStruct(self._words.shape, jnp.uint32, sharding=self._memory)

    def forget(self) -> None:
        """The last program has ended, as somebody else knows: its outputs are not held any longer."""
        self._reader = ()

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs, which the next call of `views` waits for."""
        # A compiled program takes a NumPy array to its device faster than device_put does.
        words = jax.device_put(self._words, self._memory) if self._pinned else self._words
        out = program(words, *others)
        self._reader = out
        return out


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
        self._free: deque[Staging] = deque()

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The words for which a program's first argument is compiled."""
        return Staging(self.layout.buffer).example

    def stage(self, inputs: Any) -> Staged:
        """Write a run's inputs into a buffer that no run reads. Any thread may call it."""
        try:
            staging = self._free.pop()
        except IndexError:
            staging = Staging(self.layout.buffer)
        leaves, tree = jax.tree.flatten(inputs)
        if tree != self.layout.tree:
            raise ValueError(f"inputs {tree} for a program of {self.layout.tree}")
        for view, leaf in zip(staging.views().values(), leaves, strict=True):
            view[...] = leaf
        return Staged(staging, self._free)


class Staged:
    """One run's inputs."""

    def __init__(self, staging: Staging, free: deque[Staging]) -> None:
        self._staging: Staging | None = staging
        self._free = free

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs."""
        assert self._staging is not None, "its buffer may be another run's"
        return self._staging.run(program, *others)

    def give_back(self) -> None:
        """The program's outputs are there, so that it reads the buffer no more. Further calls do nothing."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.forget()
            self._free.append(staging)
