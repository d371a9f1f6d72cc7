# SPDX-License-Identifier: Apache-2.0
"""Heaps of the C library, counted by itself while many threads hold memory of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

THREADS = 16
COUNTED = f"""
import ctypes, threading
from jgr.cli.heap import few_heaps

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
there = threading.Barrier({THREADS})

def take():
    libc.malloc(5000)
    there.wait()

{{call}}
threads = [threading.Thread(target=take) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"),  # type: ignore[operator]
    reason="needs glibc",
)


def heaps(call: str, **environment: str) -> int:
    """How many heaps a process has whose threads all took memory at the same time, after a call."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = subprocess.run(
        [sys.executable, "-c", COUNTED.format(call=call)],
        env={**ours, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return sum(line.startswith("Arena ") for line in told.stderr.splitlines())


def test_threads_share_a_heap_for_each_core() -> None:
    most = max(2, os.cpu_count() or 1)
    assert 2 <= heaps("few_heaps()") <= most
    assert heaps("") > most or most > THREADS  # what would be there otherwise


def test_the_environment_is_obeyed() -> None:
    assert heaps("few_heaps()", MALLOC_ARENA_MAX="3") == 3
