# SPDX-License-Identifier: Apache-2.0
"""How a command that computes for long holds the C library's memory.

Each step of a training takes and gives back the same tens of megabytes. By default glibc takes large blocks from the
system by mmap and gives them back at once, and the system clears every page anew. Kept, they are taken once.
"""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_SETTINGS = {
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", -1),
    _MMAP_MAX: ("MALLOC_MMAP_MAX_", 0),
    # Threads otherwise have arenas of their own: heaps of 64 MiB that go back when they are empty, whatever is set.
    _ARENA_MAX: ("MALLOC_ARENA_MAX", 1),
}


def keep_memory() -> bool:
    """Let this process keep what memory it has taken, for as long as it runs; returns whether the C library can.

    To be called before there are other threads. What the environment sets (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_MAX_,
    MALLOC_ARENA_MAX) stays as it is. Where the C library is not glibc nothing changes.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    given = os.environ.keys()
    return all(set_option(option, value) for option, (name, value) in _SETTINGS.items() if name not in given)
