# SPDX-License-Identifier: Apache-2.0
"""A table of embeddings of more than 10 GB, served with a device budget of 256 MB (HLEM-1, HLEM-2).

The engine of `jgr serve` in this process: SASRec over a million items with rows of 2560 float32, whose table stays in
its file. What a row holds follows from its number, so that every answer is compared with the scores that the model
gives for rows computed anew, without a table. Before requests come the kernel is told to forget the file's pages, and
what was read from the disk while they were answered is counted. No speed is claimed.

    python -m benchmarks.hlem_table [--quick]       needs 11 GB of disk where temporary files go
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import flame_serving, harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.models import checkpoint, scorers, table_file, tables
from jgr.models import params as parameters
from jgr.models.model_files import ModelFiles
from jgr.models.retrievers import items_digest
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import Candidates, Users
from jgr.serving.api import RankRequest

DEVICE_MB = 256
HISTORY, CANDIDATES = 16, 32
PART = 20_000
TOLERANCE = 1e-4


class Setting(NamedTuple):
    items: int = 1_000_000
    width: int = 2560
    requests: int = 400


def rows_of(numbers: npt.NDArray[Any], width: int) -> npt.NDArray[np.float32]:
    """What the table has in these rows [n], f32 [n, width] in [-.05, .05)."""
    mixed = numbers.astype(np.uint32)[:, None] * np.uint32(2_654_435_761) + np.arange(
        width, dtype=np.uint32
    ) * np.uint32(2_246_822_519)
    mixed ^= mixed >> np.uint32(15)
    return (
        (mixed & np.uint32(0xFFFF)).astype(np.float32) / np.float32(65536) - np.float32(0.5)
    ) * np.float32(0.1)


def write_model(folder: Path, setting: Setting) -> tuple[SasrecConfig, Any]:
    """A model folder whose table is written by parts: the config, and the parameters without it."""
    ids = [str(row) for row in range(setting.items)]
    cfg = SasrecConfig(
        n_items=setting.items, max_items=HISTORY, hidden=setting.width, layers=1, heads=2, mlp=64,
        items=items_digest(ids),
    )  # fmt: skip
    small = dataclasses.replace(cfg, n_items=2)
    drawn = parameters.initialize(scorers.scorer(small).spec(small), jax.random.key(0))
    weights = dataclasses.replace(drawn, embed=None)

    def parts() -> Iterator[npt.NDArray[np.float32]]:
        for first in range(0, setting.items, PART):
            yield rows_of(np.arange(first, min(first + PART, setting.items)), setting.width)

    def beside(folder: Path) -> None:
        catalog = Catalog.build(ids, [(row,) for row in range(setting.items)], [{}] * setting.items)
        save_catalog(catalog, folder / "catalog.jsonl")
        table_file.write(
            folder / tables.path_of(tables.ITEMS), tables.ITEMS, parts(), width=setting.width, dtype="float32",
            model=ModelFiles(folder).identity(),
        )  # fmt: skip

    checkpoint.write(folder, {"model_type": "sasrec", **dataclasses.asdict(cfg)}, weights, beside)
    return cfg, weights


def forget(path: Path) -> None:
    """Have the kernel drop what it keeps of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def read_from_disk() -> int:
    """Bytes that this process had read from disks so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def reference(cfg: SasrecConfig, weights: Any) -> Any:
    """(history rows [HISTORY], candidates [CANDIDATES]) -> scores [CANDIDATES], from rows that are computed anew."""

    @jax.jit
    def scores(weights: Any, embed: Any) -> Any:
        one = jnp.zeros(1, np.int32)
        history = jnp.arange(HISTORY, dtype=np.int32)[None]
        same = jnp.zeros_like(history)
        users = Users(history, same, same, one, jnp.zeros((1, 0), np.int32), one)
        asked = Candidates(HISTORY + jnp.arange(CANDIDATES, dtype=np.int32)[None], {})
        given = tables.replaced(weights, {tables.ITEMS: embed})
        return scorers.rank(scorers.scorer(cfg), given, cfg, users, asked)[0, :, 0]

    def run(history: npt.NDArray[Any], candidates: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        embed = rows_of(np.concatenate([history, candidates]), cfg.hidden)
        return np.asarray(scores(weights, embed))

    return run


def measure(quick: bool, quiet: Quiet) -> Measured:
    del quiet
    setting = Setting(2_000, 256, 20) if quick else Setting()
    size = setting.items * setting.width * 4
    if shutil.disk_usage(tempfile.gettempdir()).free < 1.1 * size:
        raise Missing(
            f"{tempfile.gettempdir()} needs {1.1 * size / 1e9:.1f} GB of free disk (TMPDIR names another)"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        cfg, weights = write_model(folder, setting)
        table = folder / tables.path_of(tables.ITEMS)
        engine = flame_serving.load(
            folder,
            "embeddings.tables=paged",
            "executors.share_user=part",
            f"executors.sizes={CANDIDATES}",
            "executors.number=1",
            f"cache.device_mb={1 if quick else DEVICE_MB}",
            "model.name=sasrec",
        )
        expected = reference(cfg, weights)
        forget(table)
        before = read_from_disk()
        with asyncio.Runner() as runner:
            runner.run(engine.start())
            answers = [_ask(runner, engine, seed, setting) for seed in range(setting.requests)]
            paging = engine.served.paging
            assert paging is not None
            counts, pool = dict(paging.rows.counts(tables.ITEMS)), paging.rows.pool.nbytes
            read = read_from_disk() - before
            paging.rows.check()
            runner.run(engine.drain(0.0))
            engine.join(10.0)
        bytes_ = table.stat().st_size
        errors = [
            np.abs(scores - expected(history, candidates)).max() for history, candidates, scores, _ in answers
        ]
    ms = [each[3] for each in answers]
    row: Row = {
        "table_gb": rounded(bytes_ / 1e9),
        "rows": setting.items,
        "width": setting.width,
        "pool_mb": rounded(pool / 2**20),
        "requests": setting.requests,
        "row_hits": counts["hits"],
        "row_misses": counts["misses"],
        "sent_gb": rounded(counts["bytes"] / 1e9),
        "read_from_disk_gb": rounded(read / 1e9),
        "past_the_pool": counts.get("past", 0),
        "largest_error": rounded(float(max(errors))),
        "p50_ms": rounded(float(np.median(ms))),
        "p99_ms": rounded(float(np.percentile(ms, 99))),
    }
    wrong = sum(error > TOLERANCE for error in errors)
    return Measured(
        [
            Claim("hlem-table-gb", row["table_gb"], "GB", "higher", 10.0),
            Claim("hlem-table-device-mb", row["pool_mb"], "MB", "lower", float(DEVICE_MB)),
            Claim("hlem-table-wrong-answers", int(wrong), "answers", "lower", 0),
        ],
        [row],
    )


def _ask(runner: asyncio.Runner, engine: Any, seed: int, setting: Setting) -> tuple[Any, Any, Any, float]:
    """One request: its rows, their scores in order, and ms."""
    random = np.random.default_rng(seed)
    drawn = np.unique((random.zipf(1.05, 20 * (HISTORY + CANDIDATES)) * 7919) % setting.items)
    rows = random.permutation(drawn)[: HISTORY + CANDIDATES]
    history, candidates = rows[:HISTORY], rows[HISTORY:]
    start = time.perf_counter()
    answer = runner.run(
        engine.answer(RankRequest(history=list(map(str, history)), candidates=list(map(str, candidates))))
    )
    took = (time.perf_counter() - start) * 1e3
    scores = {item.item_id: item.score for item in answer.items}
    return history, candidates, np.array([scores[str(row)] for row in candidates]), took


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "hlem_table",
            measure,
            ("jax", "jaxlib", "numpy"),
            (Path(__file__), Path(flame_serving.__file__)),
            device=jax.default_backend(),
        )
    )
