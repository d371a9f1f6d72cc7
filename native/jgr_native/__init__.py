# SPDX-License-Identifier: Apache-2.0
"""Kernels of jgr for CPUs. jgr itself registers and calls them; see jgr.ops.native."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

INTERFACE = 6
"""Raised with every change of what a call takes or gives; jgr uses no library of another number."""


def library() -> ctypes.CDLL:
    """The shared library. OSError where it cannot be loaded."""
    found = importlib.util.find_spec("jgr_native._kernels")
    if found is None or found.origin is None:
        raise OSError(f"no library beside {Path(__file__)}")
    return ctypes.CDLL(found.origin)
