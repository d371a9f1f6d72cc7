# SPDX-License-Identifier: Apache-2.0
"""What the engines of rcllm_accuracy answered so far, so that a run that was ended goes on with the next engine.

A file belongs to one model, one list of requests, one engine's settings and the code that it ran: where any of them
differs, it is not found, and the engine is asked anew. Nothing is timed in that benchmark, so that an answer is the
same whenever it was given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness, sources
from jgr.config import UserError
from jgr.files import writing

FOLDER = harness.ROOT / "runs" / "rcllm_accuracy"


class Ranked(NamedTuple):
    """best: [e, c], candidates, best first. scores: [e, c], in the retriever's order. approximate: the
    share of the prompts' tokens that are."""

    best: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float64]
    approximate: float = 0.0


def key(described: Iterable[object], arrays: Iterable[npt.NDArray[Any]], code: str) -> str:
    """The name of an engine's file: 24 hex digits of all that its answers depend on. code: the digest of the code."""
    digest = hashlib.sha256(json.dumps([code, *map(str, described)]).encode())
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:24]


def code() -> str:
    """The digest of all code that the benchmark may run."""
    return str(sources.checked_out().digest("benchmarks/rcllm_accuracy.py"))


def answered(
    name: str, methods: Iterable[str], ask: Callable[[], dict[str, Ranked]], folder: Path = FOLDER
) -> tuple[dict[str, Ranked], bool]:
    """Return what `ask` gave for the methods under this name before, or gives now, and whether it was before. Raises
    UserError where the file cannot be written."""
    path = folder / f"{name}.npz"
    if path.is_file():
        with np.load(path, allow_pickle=False) as found:
            return {
                method: Ranked(
                    found[f"{method}/best"], found[f"{method}/scores"], float(found[f"{method}/approximate"])
                )
                for method in methods
            }, True
    given = ask()
    folder.mkdir(parents=True, exist_ok=True)
    with writing(path, UserError) as stream:
        arrays: dict[str, npt.NDArray[Any]] = {
            f"{method}/{field}": np.asarray(value)
            for method, of in given.items()
            for field, value in of._asdict().items()
        }
        np.savez(stream, **arrays)  # type: ignore[arg-type]
    return given, False
