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
from collections.abc import Mapping

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_SETTINGS = {
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", -1),
    _MMAP_MAX: ("MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max", 0),
    _ARENA_MAX: ("MALLOC_ARENA_MAX", "glibc.malloc.arena_max", 1),
}
"""By option: the variable that sets it, its name in GLIBC_TUNABLES, and what is set here."""


def keep_memory(environment: Mapping[str, str]) -> bool:
    """Let this process keep what memory it has taken, until `give_back`; returns whether the C library can.

    To be called before there are other threads. environment: this process's; what MALLOC_TRIM_THRESHOLD_,
    MALLOC_MMAP_MAX_, MALLOC_ARENA_MAX or GLIBC_TUNABLES say there stays. Where the C library is not glibc nothing
    changes.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    tuned = {setting.partition("=")[0] for setting in environment.get("GLIBC_TUNABLES", "").split(":")}
    return all(
        set_option(option, value)
        for option, (name, tunable, value) in _SETTINGS.items()
        if name not in environment and tunable not in tuned
    )


def give_back() -> None:
    """Give the system what is free now, whole pages of it, where the C library can."""
    try:
        trim = ctypes.CDLL(None).malloc_trim  # of glibc
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
