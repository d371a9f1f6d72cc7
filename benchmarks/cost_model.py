# SPDX-License-Identifier: Apache-2.0
"""How well fitted costs predict the time of runs that were not measured, for every family of models (SIM-10, SIM-15).

Weights are random and shapes realistic, though small: a decoder of 4 layers of 256, which generates in rows and, with
cached tokens, generates and ranks in packed rows; OneRec's lazy decoder, which generates and ranks by likelihood; HSTU,
the STU, FLAME's base Climber, SASRec and LRURec.
`jgr profile --costs` measures and fits; each point is predicted by a fit to the points without it (five folds).
Claimed is the mean error of each family's worst kind of work.

    python -m benchmarks.cost_model [--quick]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.cache.pool import DevicePool
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import CacheConfig
from jgr.models import climber, params
from jgr.models.beam import catalog_tables
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.generators import GeneratorConfig, generator, laid_out
from jgr.models.hstu import EXTRA_POSITIONS, HstuConfig
from jgr.models.lazy_decoder import LazyConfig
from jgr.models.lru_rec import LruRecConfig
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import ScorerConfig, scorer
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import StuScorerConfig
from jgr.serving.decoders import cost_grid as decoder_grid
from jgr.serving.decoders.caching import kv_cells
from jgr.serving.decoders.paged_executor import DecoderExecutors, PagedExecutor
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.engine import cost_profile
from jgr.serving.engine.cost_profile import Timed, Trial
from jgr.serving.policies.jobs import Profile
from jgr.serving.scorers import cost_grid as scorer_grid

PROGRAMS, QUICK_PROGRAMS = 10, 4
"""The most programs of one kind of work."""
TARGET = 10.0
"""Percent, SIM-15's for the mean error on shared CPU machines."""
N_ITEMS, LEVEL_SIZE, LARGEST = 20_000, 256, 512

DENSE = DecoderConfig("qwen3", 1024, 256, 4, 8, 4, 32, 768, 1e6, 1e-6, tied=True, max_position=4096)
LAZY = LazyConfig(
    3 * LEVEL_SIZE, (0, LEVEL_SIZE, 2 * LEVEL_SIZE), (LEVEL_SIZE,) * 3, 512, 256, 4, 8, 8, 32, 1024
)
ROWS = (Profile("recommend", 4, 512, 128), Profile("rank", 4, 512, 128))
PACKED = (
    Profile("rank", 4, 1024, 64, packed=True, context=1024),
    Profile("recommend", 2, 512, 64, packed=True, context=512),
)
CELL_TOKENS, PAGE_BYTES, PAGES = 16, 1 << 18, 64
SCORERS: dict[str, ScorerConfig] = {
    "hstu": HstuConfig(
        N_ITEMS, 512, 128, 4, 4, 32, 32, 512 + EXTRA_POSITIONS, "", bias="times", concat_ua=True
    ),
    "stu": StuScorerConfig(
        StuConfig(128, 4, 4, 32, 32, length=1024, contextual=2),
        N_ITEMS,
        512,
        64,
        actions=4,
        action_dim=8,
        slots=(10, 10),
        mlp=256,
        position_rows=1024,
        time_rows=256,
        tasks=("click", "like"),
        items="",
    ),
    "climber": replace(climber.BASE, n_items=N_ITEMS),
    "sasrec": SasrecConfig(N_ITEMS, 256, 128, 4, 4, 512, ""),
    "lrurec": LruRecConfig(N_ITEMS, 256, 128, 4, 512, ""),
}


def _silent(done: int, total: int, label: str) -> None:
    pass


def decoder_trials(cfg: GeneratorConfig, most: int) -> list[Trial]:
    """The runs of a decoder with random weights over a catalog of random semantic ids."""
    weights = laid_out(params.initialize(generator(cfg).spec(cfg), jax.random.key(0)))
    codes = np.random.default_rng(0).integers(0, LEVEL_SIZE, (N_ITEMS, 3)).astype(np.int32)
    tokens = tuple(np.arange(LEVEL_SIZE, dtype=np.int32) + LEVEL_SIZE * level for level in range(3))
    tables = catalog_tables(PrefixTree.build(np.unique(codes, axis=0)), tokens, weights, growing=True)
    rows: tuple[Profile, ...] = ROWS
    paged = None
    if isinstance(cfg, DecoderConfig) and isinstance(weights, DecoderParams):
        kv = kv_cells(CacheConfig(cell_tokens=CELL_TOKENS), cfg, "float32", 4, PAGE_BYTES)
        pool, rows = DevicePool(PAGES, PAGE_BYTES), ROWS[:1]
        paged = PagedExecutor(cfg, weights, tables, PACKED, pool, kv, 512, "valid")
    return decoder_grid.trials(
        DecoderExecutors(RowExecutor(cfg, weights, tables, rows, "valid"), paged), _silent, most
    )


def scorer_trials(cfg: ScorerConfig, most: int) -> list[Trial]:
    """The runs of a scorer with random weights."""
    weights = params.initialize(scorer(cfg).spec(cfg), jax.random.key(0))
    return scorer_grid.trials(cfg, weights, LARGEST, _silent, most=most)


FAMILIES: dict[str, Callable[[int], list[Trial]]] = {
    "decoder": lambda most: decoder_trials(DENSE, most),
    "onerec": lambda most: decoder_trials(LAZY, most),
    **{name: lambda most, cfg=cfg: scorer_trials(cfg, most) for name, cfg in SCORERS.items()},  # type: ignore[misc]
}


def time_quietly(trials: Sequence[Trial], quiet: Quiet, rounds: int) -> list[Timed]:
    """The trials' times, measured again where the machine was not quiet."""
    while True:
        start = quiet.wait()
        timed = cost_profile.measure(trials, rounds=rounds)
        if quiet.was_quiet_since(start):
            return timed


def row(family: str, timed: Sequence[Timed]) -> Row:
    """A family's result: the errors of each kind of work, and the host's part."""
    report = cost_profile.report(timed, cost_profile.fit(timed, family))

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        return harness.rounded(value) if isinstance(value, float) else value

    return {
        "family": family,
        "spread": harness.rounded(report["spread"]),
        "kinds": {kind: short(found) for kind, found in report["kinds"].items()},
        "hosts": {kind: short(found) for kind, found in report["hosts"].items()},
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Claim the held-out error of each family's kind of work that is predicted worst."""
    return [
        Claim(
            f"cost-model-{row['family']}-held-out-error",
            harness.rounded(100 * max(found["held_out"]["mean"] for found in row["kinds"].values()), 3),
            "%",
            "lower",
            TARGET,
        )
        for row in rows
    ]


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Each family's errors; quick: of a scorer alone, with few programs."""
    rows = []
    for family in ("sasrec",) if quick else FAMILIES:
        trials = FAMILIES[family](QUICK_PROGRAMS if quick else PROGRAMS)
        harness.note(f"{family}: {len(trials)} runs compiled")
        rows.append(row(family, time_quietly(trials, quiet, 3 if quick else cost_profile.ROUNDS)))
    return Measured(claims(rows), rows)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "cost_model", measure, packages=("jax", "jaxlib", "numpy", "scipy"), sources=[Path(__file__)]
        )
    )
