# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of FLAME's parts share.

They share a model folder that `jgr serve` could serve, the engine that would serve it, and executors that have none of
FLAME's parts, so that baselines run in the same engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, override
from jgr.features.schema import Schema
from jgr.models import params as parameters
from jgr.models import scorers
from jgr.models.climber import ClimberConfig
from jgr.models.params import PyTree
from jgr.models.retrievers import items_digest
from jgr.models.scorers import Candidates, ScorerConfig, Users, rank, scorer
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import Engine
from jgr.serving.policies.jobs import Start
from jgr.serving.scorers.executors import PartWork, ReadWork
from jgr.serving.scorers.serve import ServedScorer
from jgr.serving.scorers.user_block import user_layout
from jgr.serving.versions.loading import load_any

STREAMS = 2
KEPT_PROGRAMS = 16


def save(folder: Path, cfg: ClimberConfig) -> ClimberConfig:
    """Write a folder with drawn weights, over items that are named by their rows; the config that is served."""
    ids = [str(row) for row in range(cfg.n_items)]
    cfg = replace(cfg, items=items_digest(ids))
    catalog = Catalog.build(ids, [(row,) for row in range(cfg.n_items)], [{}] * cfg.n_items)
    weights = parameters.initialize(scorer(cfg).spec(cfg), jax.random.key(0))
    scorers.save(folder, cfg, weights, lambda folder: save_catalog(catalog, folder / "catalog.jsonl"))
    return cfg


def load(folder: Path, *settings: str) -> Engine[ServedScorer]:
    """The folder's engine as `jgr serve` makes it, by the defaults but for the settings. Not yet started."""
    config = override(Config(), f"model.path={folder}", "model.compilation_cache=", *settings)
    engine = load_any(config)
    assert isinstance(engine.served, ServedScorer)
    return engine


def with_executors(engine: Engine[ServedScorer], executors: ShapeOnDemand) -> Engine[ServedScorer]:
    """The same engine with other executors, which compute a user's part in every part; not yet started."""
    return Engine(replace(engine.served, executors=executors, reads=False), None)


class ShapeOnDemand:
    """Executors of a program for each padded number of candidates: the baselines of FLAME-6 and FLAME-13.

    padded: gives the number of candidates that n of them are padded to. ahead: numbers whose programs are compiled at
    the start. largest: the most candidates of a request. kept: how many programs are kept, the last used. schema: of
    the features' records, where there are any. Each request allocates its inputs and scores, and each input crosses by
    itself.
    """

    lanes = STREAMS
    in_flight = 1

    def __init__(
        self,
        cfg: ScorerConfig,
        params: PyTree,
        padded: Callable[[int], int],
        ahead: Sequence[int],
        largest: int,
        kept: int = KEPT_PROGRAMS,
        schema: Schema | None = None,
    ) -> None:
        self._model, self._cfg, self._params = scorer(cfg), cfg, params
        self._needs = self._model.needs(cfg)
        self._layout = user_layout(self._needs)
        self._padded, self._ahead, self._kept, self._schema = padded, ahead, kept, schema
        self.sizes: tuple[int, ...] = (largest,) * STREAMS
        self.costs: Mapping[int, float] = {largest: 1.0}
        self.whole: Mapping[int, float] = {}
        self.shorter: Mapping[int, Mapping[int, float]] = {}
        self.padding = self.pairs = self.compiled = 0
        self._programs: OrderedDict[int, jax.stages.Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def warm_up(self, progress: Progress) -> None:
        """Compile the programs that are compiled ahead."""
        for size in self._ahead:
            self._program(size)

    def bind(self) -> None:
        """The threads run wherever the system puts them."""

    def launch(self, start: Start, work: ReadWork | PartWork) -> npt.NDArray[np.float32]:
        """The scores, waited for: there is no buffer that a later call could collect them from."""
        assert isinstance(work, PartWork)
        return self.score(work)

    def collect(self, start: Start, pending: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """The scores that `launch` returned, as the one outcome of a run."""
        return [pending]

    def score(self, work: PartWork) -> npt.NDArray[np.float32]:
        """The scores of a part's candidates, [c, P] float32."""
        count = len(work.rows)
        size = self._padded(count)
        rows = np.full((1, size), -1, np.int32)
        rows[0, :count] = work.rows
        features = self._features(work.records, size)
        found = self._program(size)(self._params, self._users(work.user), rows, features)
        with self._lock:
            self.pairs += count
            self.padding += size - count
        return np.asarray(found)[0, :count]

    def _users(self, block: npt.NDArray[np.uint8]) -> Users:
        given, places = self._layout.views(block), self._needs.max_items
        of = {
            name: given.get(name, np.zeros(places, np.int32))[None] for name in ("rows", "actions", "times")
        }
        now, scenario = (given.get(name, np.zeros(1, np.int32)) for name in ("now", "scenario"))
        context = given.get("context", np.zeros(0, np.int32))[None]
        return Users(**of, now=now, context=context, scenario=scenario)  # type: ignore[arg-type]

    def _features(self, records: npt.NDArray[np.void] | None, size: int) -> dict[str, npt.NDArray[Any]]:
        """The features that the model reads, by name an array [1, size, width] for each."""
        if self._schema is None:
            return {}
        given = np.zeros(size, self._schema.dtype)
        if records is not None:
            given[: len(records)] = records
        return {name: np.ascontiguousarray(given[name])[None] for name, _ in self._needs.features}

    def _program(self, size: int) -> jax.stages.Compiled:
        with self._lock:
            if size not in self._programs:
                self._programs[size] = self._compile(size)
                self.compiled += 1
            self._programs.move_to_end(size)
            while len(self._programs) > self._kept:
                self._programs.popitem(last=False)
            return self._programs[size]

    def _compile(self, size: int) -> jax.stages.Compiled:
        def call(params: PyTree, users: Users, rows: jax.Array, features: Any) -> jax.Array:
            return rank(self._model, params, self._cfg, users, Candidates(rows, features))

        users = self._users(np.zeros(self._layout.size, np.uint8))
        rows = np.zeros((1, size), np.int32)
        lowered = jax.jit(call).lower(self._params, users, rows, self._features(None, size))
        compiled: jax.stages.Compiled = lowered.compile()
        return compiled
