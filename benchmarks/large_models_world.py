# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/large_models.py asks: catalogs and models on disk, a server in a process of its own, and its memory.

Items are named by their rows, so an answer is checked without the server: the small catalog has the first items of the
large one, with the same ids and semantic ids, and each tenth item of both is in the segment SEGMENT.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

import jgr
from benchmarks import first_answer
from benchmarks.harness import Missing
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.catalog.text_table import TextTable
from jgr.models import decoder, hf, params
from jgr.models.decoder import DecoderConfig
from jgr.models.shapes import LEVELS

Int32 = npt.NDArray[np.int32]

SEGMENT, SEGMENT_EVERY = "tenth", 10
TAGGED, PLAIN = b'{"segments":"tenth"}\n', b"{}\n"
LOADED = "is being compiled"
"""In the line of the log that says that the model and its catalog are there, and the warm-up begins."""
POLL_S = 0.02
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
"""What JAX_PLATFORMS calls a backend."""


class WrongAnswer(Exception):
    """A server returned items that it must not return, or not in the order of their scores."""


# ---- catalogs and models -----------------------------------------------------------------------------------------


def draw_codes(items: int, level_size: int) -> Int32:
    """Distinct semantic ids in random order, [items, LEVELS]."""
    rng, flat = np.random.default_rng(0), np.zeros(0, np.int64)
    while len(flat) < items:
        flat = np.union1d(flat, rng.integers(0, level_size**LEVELS, items + items // 100))
    chosen = rng.permutation(flat)[:items]
    return np.stack(np.unravel_index(chosen, (level_size,) * LEVELS), axis=1).astype(np.int32)


def save(path: Path, codes: Int32, digits: int, level_size: int, first_token: int) -> None:
    """Write the catalog of these codes. digits: of the item ids."""
    count, ranks, levels = len(codes), np.empty_like(codes), []
    for level in range(LEVELS):
        used = np.flatnonzero(np.bincount(codes[:, level], minlength=level_size))
        rank_of = np.zeros(level_size, np.int32)
        rank_of[used] = np.arange(len(used), dtype=np.int32)
        ranks[:, level] = rank_of[codes[:, level]]
        levels.append((first_token + level * level_size + used).tolist())
    texts = np.char.zfill(np.arange(count).astype(f"S{digits}"), digits)
    ids = TextTable(texts.view(np.uint8), np.arange(count + 1, dtype=np.int64) * digits)
    tagged = np.arange(count) % SEGMENT_EVERY == 0
    ends = np.cumsum(np.where(tagged, len(TAGGED), len(PLAIN)))
    lines = (TAGGED + PLAIN * (SEGMENT_EVERY - 1)) * -(-count // SEGMENT_EVERY)
    metadata = TextTable(np.frombuffer(lines, np.uint8)[: ends[-1]], np.concatenate([[0], ends]))
    save_catalog(Catalog.of_arrays(ids, ranks, levels, metadata), path)


def _export(folder: Path, cfg: DecoderConfig, platform: str) -> None:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", _PLATFORMS[platform])
    hf.export(folder, cfg, params.initialize(decoder.spec(cfg), jax.random.key(0), jnp.bfloat16))


def export(folder: Path, cfg: DecoderConfig, platform: str = "cpu") -> None:
    """Write a model of random weights in bfloat16, as the published ones are stored, from a process of its own, whose
    memory goes with it. platform: what draws them."""
    process = multiprocessing.get_context("spawn").Process(target=_export, args=(folder, cfg, platform))
    process.start()
    process.join()
    if process.exitcode:
        raise Missing(f"a model could not be written to {folder}; its own words are above")


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# ---- memory ------------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Bytes of a process: resident ones, and these with shared pages divided among those who share them."""

    rss: int
    pss: int


def taken(process: int) -> Taken:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":", 1) for line in lines)}
    return Taken(sizes["Rss"], sizes["Pss"])


def peak_rss(process: int) -> int:
    """The most resident bytes that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def _resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- a server ----------------------------------------------------------------------------------------------------


def environment(platform: str) -> dict[str, str]:
    """That of first_answer, where other packages are found, such as jgr-native, and how a GPU's memory is taken."""
    found = first_answer.environment()
    found |= {name: text for name, text in os.environ.items() if name.startswith("XLA_PYTHON_CLIENT")}
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join(filter(None, (found["PYTHONPATH"], inherited)))
    return {**found, "PYTHONPATH": paths, "JAX_PLATFORMS": _PLATFORMS[platform]}


@dataclass(frozen=True)
class Asked:
    """One kind of request: a prompt of `tokens`, `width` beams, the `top_k` best items, and what it may not get."""

    tokens: int
    width: int
    top_k: int
    filter: str = "none"
    excluded: frozenset[int] = frozenset()

    def fields(self, digits: int) -> dict[str, Any]:
        filters: dict[str, Any] | None = {"segments": [SEGMENT]} if self.filter == "segment" else None
        if self.excluded:
            filters = {"exclude": names(self.excluded, digits)}
        return {"top_k": self.top_k, "beam_width": self.width, "filters": filters}

    def check(self, found: Sequence[tuple[str, float]], items: int) -> None:
        """WrongAnswer unless (id, score) are as many items as were asked for, best first, all of them legal."""
        rows, scores = [int(item) for item, _ in found], np.array([score for _, score in found])
        if len(set(rows)) != self.top_k or len(rows) != self.top_k:
            raise WrongAnswer(f"{len(rows)} items, {len(set(rows))} of them different, for {self.top_k}")
        if not np.isfinite(scores).all() or (np.diff(scores) > 0).any():
            raise WrongAnswer("the scores do not descend")
        outside = [row for row in rows if not 0 <= row < items or row in self.excluded]
        if self.filter == "segment":
            outside += [row for row in rows if row % SEGMENT_EVERY]
        if outside:
            raise WrongAnswer(f"items that the request may not get: {outside[:5]}")


def names(rows: Iterable[int], digits: int) -> list[str]:
    return [f"{row:0{digits}}" for row in rows]


class Server:
    """`jgr serve` in a process of its own, from the start of the process until the context ends.

    items: of its catalog. loaded: its memory when the warm-up began; None where no such line was in the log.
    """

    def __init__(self, arguments: Sequence[str], items: int, digits: int, platform: str = "cpu") -> None:
        self.items, self.digits, self.loaded_s = items, digits, 0.0
        self.loaded: Taken | None = None
        self._begun, self._log = time.perf_counter(), list[str]()
        self._process = subprocess.Popen(
            [*first_answer.JGR, "serve", *arguments, "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(platform),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.ready_s = time.perf_counter() - self._begun
        if not self.url:
            self._end()
            raise Missing("the server did not start: " + " / ".join(self._log[-3:]))
        self.client = jgr.Client(self.url, timeout_s=first_answer.PATIENCE_S)
        self.warm, self.peak = taken(self._process.pid), peak_rss(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self._end()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line.strip())
            if LOADED in line:
                self.loaded_s = time.perf_counter() - self._begun
                self.loaded = taken(self._process.pid)

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    @property
    def since_start_s(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def kernels(self) -> str:
        """What computes: "native-" and an instruction set, or "xla"."""
        return self.client.info.kernels

    def parts(self) -> dict[str, int]:
        """The bytes of the engine's parts, as its metrics have them."""
        found, begin = {}, 'jgr_memory_bytes{part="'
        for line in self.client.read("/metrics").decode().splitlines():
            if line.startswith(begin):
                name, value = line.removeprefix(begin).split('"} ')
                found[name] = int(float(value))
        return found

    def ask(self, asked: Asked, history: Iterable[int]) -> float:
        """Milliseconds of a request at the client. Raises WrongAnswer."""
        body = names(history, self.digits), asked.fields(self.digits)
        start = time.perf_counter()
        answer = self.client.recommend(body[0], **body[1])
        ms = (time.perf_counter() - start) * 1e3
        asked.check([(item.item_id, item.score) for item in answer.items], self.items)
        return ms

    def difference_from_rank(self, asked: Asked, history: Iterable[int]) -> float:
        """The largest difference of a search's scores from those that /v1/rank gives the same items."""
        given = names(history, self.digits)
        found = self.client.recommend(given, **asked.fields(self.digits)).items
        ranked = self.client.rank(given, [item.item_id for item in found]).items
        again = {item.item_id: item.score for item in ranked}
        return max(abs(again[item.item_id] - item.score) for item in found)

    def ask_without_best(self, asked: Asked, history: Iterable[int]) -> None:
        """Exclude the best items of a request, and ask again. Raises WrongAnswer where one of them comes back."""
        found = self.client.recommend(names(history, self.digits), **asked.fields(self.digits)).items
        self.ask(replace(asked, excluded=frozenset(int(item.item_id) for item in found)), history)

    def growth(self, asked: Asked, histories: Sequence[Iterable[int]]) -> int:
        """By how many bytes the resident memory is larger, at most, while these histories are in flight at once."""
        process = self._process.pid
        before = most = _resident(process)
        with ThreadPoolExecutor(len(histories)) as pool:
            left = {pool.submit(self.ask, asked, history) for history in histories}
            while not all(one.done() for one in left):
                most = max(most, _resident(process))
                time.sleep(POLL_S)
            for one in left:
                one.result()
        return most - before
