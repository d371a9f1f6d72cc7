# SPDX-License-Identifier: Apache-2.0
"""The library of kernels for CPUs as tests have it: built beside the environment, and there for some tests only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from jgr.ops import native

FOLDER = Path(__file__).resolve().parents[1] / "build" / f"native-{Path(sys.prefix).name}"
"""Where `make installed` puts it: not into the environment, since other tests run as after a plain install."""


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A context in which the library is found and "auto" takes it."""
    sys.path.insert(0, str(FOLDER))
    native.library.cache_clear()
    try:
        assert native.library().problem == ""
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.partition(".")[0] == "jgr_native"]:
            del sys.modules[name]
        native.library.cache_clear()
        native.use(True)
