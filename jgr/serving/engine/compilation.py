# SPDX-License-Identifier: Apache-2.0
"""Compilation as a metric: how often XLA compiled in this process, and a cache that makes the second start fast."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_log = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


_thread = threading.local()


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """A context in which what this thread compiles counts as preparing a model; all else counts as a request's."""
    outer = getattr(_thread, "preparing", False)
    _thread.preparing = True
    try:
        yield
    finally:
        _thread.preparing = outer


class CompilationCounter:
    """Counts every XLA compilation of the process from its construction on, also those that a disk cache answers.

    By phase: "load" inside `preparing`, else "request". XLA tells of a compilation in the thread that asked for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"load": 0, "request": 0}
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._counts["load" if getattr(_thread, "preparing", False) else "request"] += 1

    @property
    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in `folder`. The defaults skip what compiles fast; serving wants every profile kept.

    A folder that cannot be made costs a slow start and nothing else: it is logged.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("no compilation cache: %s: %s (model.compilation_cache)", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # or a folder that was used before would stay in use
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
