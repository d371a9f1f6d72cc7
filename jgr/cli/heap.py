# SPDX-License-Identifier: Apache-2.0
"""How the C library divides a server's heap.

glibc gives each new thread the next of up to eight heaps (arenas) for each core. A load starts threads, compiles in
them, and keeps some of what they took, in pieces all over their heaps. So the heaps of a server with two small models
on two cores grew by some 240 KB with each reload or new catalog, though what was in use did not; with one heap for each
core they kept their size through fifty of these. Python takes its objects from a heap of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

M_ARENA_MAX = -8
"""The parameter's number in glibc's malloc.h."""
LEAST = 2


def few_heaps(environment: Mapping[str, str] = os.environ) -> None:
    """Have one heap for each core, and LEAST of them. Before threads are started: what is there stays.

    Nothing happens where MALLOC_ARENA_MAX says how many there may be, or the C library has no such parameter.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in environment:
        mallopt(M_ARENA_MAX, max(LEAST, os.cpu_count() or 1))
