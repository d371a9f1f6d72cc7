# SPDX-License-Identifier: Apache-2.0
"""Programs of Debian's that tests run: those on the path, else those that `make installed` unpacks."""

from __future__ import annotations

import shutil
from pathlib import Path

UNPACKED = Path(__file__).resolve().parents[1] / "build" / "debian" / "usr" / "bin"


def program(name: str) -> str:
    """The path of a program; "" where there is none."""
    return shutil.which(name) or shutil.which(name, path=str(UNPACKED)) or ""


PROMETHEUS, PROMTOOL = program("prometheus"), program("promtool")
CHROMIUM = program("chromium")
ZSH, FISH = program("zsh"), program("fish")
