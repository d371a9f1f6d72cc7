# SPDX-License-Identifier: Apache-2.0
"""How a training holds the C library's memory.

Each step of a training takes and gives back the same tens of megabytes. By default glibc takes large blocks from the
system by mmap and gives them back at once, and the system clears every page anew. Kept, they are taken once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_SETTINGS = {
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", -1),
    _MMAP_MAX: ("MALLOC_MMAP_MAX_", 0),
    # Threads otherwise have arenas of their own: heaps of 64 MiB that go back when they are empty, whatever is set.
    _ARENA_MAX: ("MALLOC_ARENA_MAX", 1),
}


def keep_memory(environment: Container[str]) -> bool:
    """Let this process keep what memory it has taken, for as long as it runs; returns whether the C library can.

    To be called before there are other threads. environment: the names that are set in it; what MALLOC_TRIM_THRESHOLD_,
    MALLOC_MMAP_MAX_ or MALLOC_ARENA_MAX says stays. Where the C library is not glibc nothing changes.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(
        set_option(option, value) for option, (name, value) in _SETTINGS.items() if name not in environment
    )
