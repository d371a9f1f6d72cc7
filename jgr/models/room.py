# SPDX-License-Identifier: Apache-2.0
"""Whether the host has room for weights, asked before they are read.

A failed allocation inside XLA ends the process, and a host without memory may end any of its processes. So a model for
which there is no room is refused while that is still possible, and what is served goes on.

A container's limit counts as well: beyond it, the kernel ends a process although the machine has memory.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import jax

from jgr.control_groups import control_groups
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


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that the host can give to this process, swap included. None: this system does not say.

    root: where the system's files are.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(value.split()[0]) << 10 for name, value in (line.split(":", 1) for line in lines)}
        swap = sizes["SwapFree"]
        groups = [limit - used + swap for limit, used in _groups(root)]
        return min([sizes["MemAvailable"] + swap, *groups])
    except (OSError, ValueError, KeyError, IndexError):
        return None


def host_bytes(root: Path = Path("/")) -> int:
    """All memory that this process may ever have, without swap: the machine's, or its container's. root: see above."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _groups(root))])


_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""By the version of control groups: the files of limit and use, and what of memory.stat is given back on demand."""


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group with a limit that this process is in, as far as it may see them."""
    for group in control_groups("memory", root):
        if (found := _group(group, *(_V2 if (group / _V2[0]).exists() else _V1))) is not None:
            yield found


def _group(group: Path, limit: str, used: str, given_back: str) -> tuple[int, int] | None:
    """A group's limit, and what it uses that is not given back on demand. None: it has no limit, or is hidden."""
    try:
        most = (group / limit).read_text()
        if most.strip() == "max":
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(most), int((group / used).read_text()) - int(stat.get(given_back, 0))
    except (OSError, ValueError):
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
