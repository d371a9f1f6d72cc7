# SPDX-License-Identifier: Apache-2.0
"""Compilation as a metric: how often XLA compiled in this process, and a cache that makes the second start fast."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import jax

_log = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts every XLA compilation of the process from its construction on, also those that a disk cache answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        with self._lock:
            return self._count


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
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
