# SPDX-License-Identifier: Apache-2.0
"""What tells the machine that this process runs on, since it was started, from all others."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def boot_id() -> str:
    """The kernel's name for this run of this machine, whose processes share one clock; "" where it has none. Its
    containers need not share /dev/shm."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
