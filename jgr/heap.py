# SPDX-License-Identifier: Apache-2.0
"""How a process that computes holds the C library's memory.

Each run of a program takes and gives back the same tens of megabytes. By default glibc takes large blocks from the
system by mmap and gives them back at once, and the system clears every page anew. Kept, they are taken once.

All threads share one heap. Otherwise glibc gives new threads up to eight for each core: those of other threads than the
first go back to the system when they are empty, whatever is set; and a load, which starts threads and compiles in them,
leaves pieces in all of them, so that they grow with each reload or new catalog. Python takes its objects from a heap of
its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_SETTINGS = {
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", -1),
    _MMAP_MAX: ("MALLOC_MMAP_MAX_", 0),
    _ARENA_MAX: ("MALLOC_ARENA_MAX", 1),
}


def keep_memory(environment: Container[str]) -> bool:
    """Let this process keep what memory it has taken, until `give_back`; returns whether the C library can.

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


def give_back() -> None:
    """Give the system what is free now, whole pages of it, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
