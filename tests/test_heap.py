# SPDX-License-Identifier: Apache-2.0
"""Memory that is kept: glibc's own count of what it has taken, read in a process of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from jgr import heap

MIB = 1 << 20
READ = f"""
import ctypes, os, threading
from jgr.heap import keep_memory
class Found(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Found
print(keep_memory(os.environ))
def take():
    blocks = [libc.malloc({8 * MIB}) for _ in range(12)]
    print(libc.mallinfo2().hblkhd)
    for block in blocks:
        libc.free(block)
    print(libc.mallinfo2().arena)
taking = threading.Thread(target=take)  # computing threads have arenas of their own by default
taking.start()
taking.join()
"""


def kept(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is no glibc")
def test_glibc_keeps_what_it_has_taken() -> None:
    said, mapped, arena = kept()
    assert said == "True" and int(mapped) < MIB and int(arena) >= 96 * MIB
    said, mapped, arena = kept(MALLOC_MMAP_MAX_="65536", MALLOC_MMAP_THRESHOLD_=str(MIB))
    assert (
        said == "True" and int(mapped) >= 96 * MIB and int(arena) < 96 * MIB
    )  # the environment's word stands


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is no glibc")
def test_what_glibcs_tunables_say_stays() -> None:
    tunables = f"glibc.malloc.mmap_max=65536:glibc.malloc.mmap_threshold={MIB}"
    said, mapped, arena = kept(GLIBC_TUNABLES=tunables)
    assert said == "True" and int(mapped) >= 96 * MIB and int(arena) < 96 * MIB


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert heap.keep_memory({}) is False
    heap.give_back()


THREADS = 16
COUNTED = f"""
import ctypes, os, threading
from jgr.heap import keep_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
there = threading.Barrier({THREADS})

def take():
    libc.malloc(5000)
    there.wait()

keep_memory(os.environ)
threads = [threading.Thread(target=take) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="the C library is no glibc")
@pytest.mark.parametrize(("environment", "heaps"), [({}, 1), ({"MALLOC_ARENA_MAX": "3"}, 3)])
def test_all_threads_share_the_heaps_that_there_may_be(environment: dict[str, str], heaps: int) -> None:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = subprocess.run(
        [sys.executable, "-c", COUNTED], env=ours | environment, capture_output=True, text=True, check=True
    )
    assert sum(line.startswith("Arena ") for line in told.stderr.splitlines()) == heaps
