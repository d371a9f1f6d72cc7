# SPDX-License-Identifier: Apache-2.0
"""What a measurement must know of the machine: what it is, which code it runs, and whether others kept it busy.

The one idea: a time counts only where nobody else used the processors meanwhile. The kernel counts the busy time of
all processors and that of each process; what is not of this process and its children is others'. Where the kernel does
not tell (/proc is Linux's), nothing counts as quiet.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jgr.evaluation.processor import processor

MAX_OTHERS_CORES = 0.1
"""How many cores other processes may keep busy while we time."""
_SAMPLE_S = 1.0
_TICKS_S = 0.03  # what the kernel's coarse accounting may make up


class BusyMachine(Exception):
    """Other processes kept the machine busy for as long as we were willing to wait."""


class CpuTimes(NamedTuple):
    """Busy CPU seconds of all processors, those of this process and its children, and the time of the sample in s."""

    busy_s: float
    own_s: float
    at_s: float


def busy_ticks(stat: str) -> int:
    """The busy CPU time since boot in /proc/stat; time stolen by other machines of the host counts as busy."""
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return user + nice + system + irq + softirq + steal


def tree_ticks(stats: Iterable[str], root: int) -> int:
    """The CPU time of process `root` and its descendants, ended ones too, from their /proc/<pid>/stat."""
    parents, ticks = {}, {}
    for stat in stats:
        fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold anything
        pid = int(stat.split(" ", 1)[0])
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_ours(pid: int) -> bool:
        return pid == root or (pid in parents and is_ours(parents[pid]))

    return sum(n for pid, n in ticks.items() if is_ours(pid))


def others_seconds(before: CpuTimes, after: CpuTimes) -> float:
    """CPU seconds that other processes used between two samples."""
    return max(0.0, (after.busy_s - before.busy_s) - (after.own_s - before.own_s))


def cpu_times() -> CpuTimes:
    """A sample of now. Raises OSError where the system has no /proc."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            stats.append(path.read_text())
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    own_s = tree_ticks(stats, os.getpid()) / ticks_per_s
    return CpuTimes(busy_ticks(Path("/proc/stat").read_text()) / ticks_per_s, own_s, time.monotonic())


def is_quiet(before: CpuTimes, after: CpuTimes) -> bool:
    """Whether the machine was left to us between two samples."""
    return others_seconds(before, after) <= MAX_OTHERS_CORES * (after.at_s - before.at_s) + _TICKS_S


class Quiet:
    """Judges whether the machine was left to us; raises BusyMachine when waiting took more than patience_s."""

    def __init__(
        self,
        patience_s: float,
        sample: Callable[[], CpuTimes] = cpu_times,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience_s, self._sample, self._sleep = patience_s, sample, sleep
        self._lost_s = 0.0

    def wait(self) -> CpuTimes:
        """Wait for a quiet second; the sample at its end."""
        while True:
            start = self._sample()
            self._sleep(_SAMPLE_S)
            end = self._sample()
            if self._judge(start, end):
                return end

    def was_quiet_since(self, start: CpuTimes) -> bool:
        """Whether what was timed since `start` counts."""
        return self._judge(start, self._sample())

    def _judge(self, start: CpuTimes, end: CpuTimes) -> bool:
        if is_quiet(start, end):
            return True
        elapsed_s, others_s = end.at_s - start.at_s, others_seconds(start, end)
        self._lost_s += elapsed_s
        if self._lost_s >= self._patience_s:
            raise BusyMachine(
                f"other processes keep {others_s / elapsed_s:.2f} cores busy ({MAX_OTHERS_CORES} is the limit), and "
                f"{self._lost_s:.0f} s were lost on that: no result; stop them and try again"
            )
        return False


def machine() -> dict[str, Any]:
    """The machine in words, without its name: cpu, instructions (its widest vectors), cores, memory_gib, os."""
    cpuinfo = ""
    with contextlib.suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        system = "unknown distribution"
    return {
        **processor(cpuinfo)._asdict(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30),
        "os": f"{system}, {platform.system()} {'.'.join(platform.release().split('.')[:2])}",
    }


def commit(root: Path, *but: str) -> tuple[str | None, bool | None]:
    """The commit that is checked out at `root`, and whether files differ from it; None where git cannot tell.

    but: folders whose files do not count as a difference.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--", ".", *(f":!{folder}" for folder in but))
    return git("rev-parse", "HEAD"), None if status is None else bool(status)
