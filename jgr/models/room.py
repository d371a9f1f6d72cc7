# SPDX-License-Identifier: Apache-2.0
"""Whether the host has room for weights, asked before they are read.

A failed allocation inside XLA ends the process, and a host without memory may end any of its processes. So a model for
which there is no room is refused while that is still possible, and what is served goes on.
"""

from __future__ import annotations

import resource
from pathlib import Path

import jax

from jgr.models.params import CheckpointError

SPARE_BYTES = 64 << 20
"""What a load takes beside the weights: catalog tables, buffers, compilation."""
SPARE_ADDRESSES = 512 << 20
"""Address space beside the weights: threads reserve much more of it than they use."""


def require_memory(resident: int, read: int) -> None:
    """Raise CheckpointError unless weights fit into the host's free memory and the process's address space.

    resident: bytes of all arrays as they are served, which lie on the host only where that is the device. read: bytes
    that are on the host at a time while they are read.
    """
    needed = read + (resident if jax.default_backend() == "cpu" else 0)
    rooms = [
        (free_bytes(), needed + SPARE_BYTES, "of memory"),
        (free_addresses(), needed + SPARE_ADDRESSES, "of address space (RLIMIT_AS)"),
    ]
    for free, wanted, what in rooms:
        if free is not None and free < wanted:
            raise CheckpointError(
                f"there is no room for this model: it needs {wanted / 2**20:.0f} MB {what}, "
                f"{max(0, free) / 2**20:.0f} MB are free"
            )


def free_bytes() -> int | None:
    """Bytes that the host can give to a process, swap included. None: this system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(value.split()[0]) << 10 for name, value in (line.split(":", 1) for line in lines)}
        return sizes["MemAvailable"] + sizes["SwapFree"]
    except (OSError, ValueError, KeyError, IndexError):
        return None


def free_addresses() -> int | None:
    """Bytes of address space that this process may still take. None: it has no limit, or the system does not say."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return limit - pages * resource.getpagesize()
