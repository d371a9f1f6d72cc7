# SPDX-License-Identifier: Apache-2.0
"""Programs that are compiled once for all who run them, how often XLA compiled, and a cache for the second start.

The one idea of `compiled`: a program is held by those who run it, and by nobody else. So new weights of the same shapes
find the programs of the old ones, whose engine still serves, and a program is freed with the last engine that runs it.
JAX's own caches would keep each program with the function that it is made of, for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jgr import stopping
from jgr.config import UserError
from jgr.ops import native, split

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


_programs: weakref.WeakValueDictionary[Hashable, jax.stages.Compiled] = weakref.WeakValueDictionary()


def compiled(
    function: Callable[..., Any],
    *arguments: Any,
    key: Hashable = None,
    donate: tuple[int, ...] = (),
    keep_unused: bool = False,
    options: Mapping[str, bool] | None = None,
    **static: Hashable,
) -> jax.stages.Compiled:
    """The program of function(*arguments, **static), which takes the arguments alone.

    It is compiled unless somebody has one of equal shapes, dtypes, placements and static arguments. key: what the
    program depends on besides these, where that is more than the function. donate, keep_unused: see jax.jit. options:
    XLA's; programs of equal arguments have the same. Where arguments stand on the devices of a mesh, these share the
    program (jgr.ops.split).
    """
    leaves, tree = jax.tree.flatten(arguments)
    shapes = tuple((x.shape, np.dtype(x.dtype), getattr(x, "sharding", None)) for x in leaves)
    whole = (
        function if key is None else key,
        donate,
        keep_unused,
        tuple(sorted(static.items())),
        tree,
        shapes,
        native.in_use(),
    )
    program = _programs.get(whole)
    if program is None:
        stopping.check()
        fresh = partial(inspect.unwrap(function), **static)  # JAX forgets what it made of it when it is gone
        with _shared_by(leaves):
            lowered = jax.jit(fresh, donate_argnums=donate, keep_unused=keep_unused).lower(*arguments)
        program = _programs[whole] = lowered.compile(dict(options) if options else None)
        _thread.compiled = getattr(_thread, "compiled", 0) + 1
    return program


def _shared_by(leaves: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mesh of the devices that share the arguments, under which their program is traced."""
    for leaf in leaves:
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and split.AXIS in mesh.axis_names:
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """A context that logs at its end how many programs this thread compiled in it; others that it runs were there."""
    before = getattr(_thread, "compiled", 0)
    yield
    count = getattr(_thread, "compiled", 0) - before
    _log.info(
        "%s compiled or read from disk", "1 program was" if count == 1 else f"{count or 'no'} programs were"
    )


def check_scores(program: str, scores: npt.ArrayLike) -> None:
    """Raise UserError where the scores of a program's probe are such as no sound weights give.

    These are NaN and +infinity, and no finite score at all; -infinity is the score of what cannot be generated.
    """
    found = np.asarray(scores)
    if not np.isfinite(found).any() or np.isnan(found).any() or np.isposinf(found).any():
        raise UserError(
            f"model.path: {program} gives scores that are no finite numbers: the weights are damaged, or too large "
            "for model.dtype"
        )


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
    with contextlib.suppress(
        OSError
    ):  # one that cannot be written to, or another process's look at the same time
        _drop_torn(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # or a folder that was used before would stay in use
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _drop_torn(folder: Path) -> None:
    """Delete the programs that a kill or a full disk cut short. Only those written since the last look are read.

    JAX does not write to a file that is there: it would compile the program at every start, for ever. Files that are
    not packed by zlib, as where zstandard is installed, are left alone unless they are empty.
    """
    looking, looked = folder / ".looking", folder / ".looked"
    since_ns = looked.stat().st_mtime_ns if looked.exists() else 0
    looking.touch()
    torn = [
        path
        for path in folder.glob("*-cache")
        if path.stat().st_mtime_ns >= since_ns and not _is_whole(path.read_bytes())
    ]
    for path in torn:
        path.unlink(missing_ok=True)
    looking.replace(looked)
    if torn:
        _log.warning("model.compilation_cache: %d programs were cut short, and are compiled again", len(torn))


def _is_whole(entry: bytes) -> bool:
    if entry[:1] == b"\x78":
        try:
            zlib.decompress(entry)
        except zlib.error:
            return False
    return bool(entry)
