# SPDX-License-Identifier: Apache-2.0
"""How many cores this process may use: by the cores it may run on, and by its container's limit on CPU time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cores_here(root: Path = Path("/")) -> int:
    """Cores that this process may use, at least 1. root: of the file system that says so.

    A limit on CPU time counts as the whole cores below it. With more threads than that the time of a period is used up
    before it ends, and all of them stand still for the rest: for up to 100 ms, unless the container says otherwise.
    """
    limits = [limit for group in _groups(root) if (limit := _limit(group)) is not None]
    return max(1, min([cores_to_run_on(), *map(math.floor, limits)]))


def cores_to_run_on() -> int:
    """Cores that the system runs this process on, whatever its limit on CPU time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, version 1 and 2, and of those that they lie in.

    In a container the names can be the host's; then the group's own folder is missing, and the limit stands at the top.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(name)
        for each in (group, *group.parents):
            yield root / "sys/fs/cgroup" / controllers / each.relative_to("/")


def _limit(group: Path) -> float | None:
    """The cores whose CPU time a control group may use; None if it says nothing, or sets no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = map(float, (group / "cpu.max").read_text().split())  # "max 100000" is no number
        else:
            quota = float((group / "cpu.cfs_quota_us").read_text())
            period = float((group / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
