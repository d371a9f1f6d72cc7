# SPDX-License-Identifier: Apache-2.0
"""How many cores this process may use: by the cores it may run on, and by its container's limit on CPU time."""

from __future__ import annotations

import math
import os
from pathlib import Path

from jgr.control_groups import control_groups


def cores_here(root: Path = Path("/")) -> int:
    """Cores that this process may use, at least 1. root: of the file system that says so.

    A limit on CPU time counts as the whole cores below it. With more threads than that the time of a period is used up
    before it ends, and all of them stand still for the rest: for up to 100 ms, unless the container says otherwise.
    """
    limits = [limit for group in control_groups("cpu", root) if (limit := _limit(group)) is not None]
    return max(1, min([cores_to_run_on(), *map(math.floor, limits)]))


def cores_to_run_on() -> int:
    """Cores that the system runs this process on, whatever its limit on CPU time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
