# SPDX-License-Identifier: Apache-2.0
"""Rankers to test the ranking path with: executors that can be held and broken, and small models in folders.

A fake part's score of an item is its row, plus 1000 times its feature x where there are records, plus the number of
its user's events. A second task's score is minus that.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, override
from jgr.features.cache import FeatureCache
from jgr.models import params, scorers
from jgr.models.hstu import HstuConfig
from jgr.models.retrievers import items_digest
from jgr.models.scorers import Needs, ScorerConfig
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import StuScorerConfig
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import AnyEngine, Engine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.http.listener import Listener
from jgr.serving.policies.jobs import Start
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.policies.user_cache import UserCache
from jgr.serving.scorers.executors import PartWork, Read, ReadWork
from jgr.serving.scorers.serve import ServedScorer
from jgr.serving.scorers.translation import ScorerTranslator
from jgr.serving.scorers.user_block import user_layout
from jgr.serving.versions.loading import load_any
from tests.noise import noisy
from tests.serving.fakes import PATIENCE_S

N_ITEMS = 60
ITEMS = [f"B{row:03}" for row in range(N_ITEMS)]
CATALOG = Catalog.build(
    ITEMS, [(f"<a_{row}>",) for row in range(N_ITEMS)], [{"title": f"Item {row}"} for row in range(N_ITEMS)]
)
NEEDS = Needs(
    5, ("click", "like"), timed=True, dated=True, actions=3, slots=(4, 2), scenarios=3, features=(("x", 1),)
)
MONDAY = 1_700_438_400  # 2023-11-20 00:00 UTC
DAY = 86_400


class FakeExecutors:
    """Executors without a device. Runs wait while `hold` is in force; each takes an error of `errors`, if any."""

    costs: Mapping[int, float] = {4: 1.0e-9, 8: 1.5e-9}
    in_flight = 1

    def __init__(self, reads: bool) -> None:
        self.sizes = (USER_PART, USER_PART, 4, 4, 8) if reads else (4, 4, 8)
        self.lanes = len(self.sizes)
        self.states = None
        self.whole: dict[int, float] = {}
        self.shorter: dict[int, dict[int, float]] = {}
        self.works: list[ReadWork | PartWork] = []
        self.errors: dict[int, Exception] = {}
        self._planned = 0
        self._open = threading.Event()
        self._open.set()
        self._entered = threading.Semaphore(0)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def wait_entered(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S)

    def warm_up(self, progress: Progress) -> None: ...

    def bind(self) -> None: ...

    def fail(self, error: Exception) -> None:
        """The next run raises it: runs are numbered in the order in which they are planned."""
        self.errors[self._planned] = error

    def launch(self, start: Start, work: ReadWork | PartWork) -> Any:
        self.works.append(work)
        self._planned = max(self._planned, start.run + 1)
        self._entered.release()
        assert self._open.wait(PATIENCE_S)
        if start.run in self.errors:
            raise self.errors.pop(start.run)
        if isinstance(work, ReadWork):
            new = work.place is not None and work.place.new
            return Read(
                events(work.block), "nothing" if work.place is None or new else "all", work.place is not None
            )
        user = work.user if isinstance(work.user, int) else events(work.user)
        score = (work.rows + user).astype(np.float32)
        if work.records is not None:
            score = score + 1000 * work.records["x"][:, 0]
        return np.stack([score, -score], axis=1)

    def collect(self, start: Start, pending: Any) -> list[Any]:
        return [pending]


def events(block: Any) -> int:
    return int((user_layout(NEEDS).views(block)["rows"] >= 0).sum())


def fake_engine(
    *settings: str,
    reads: bool = False,
    features: FeatureCache | None = None,
    pages: int = 0,
    wall: float = MONDAY + 10 * DAY,
) -> tuple[Engine[ServedScorer], FakeExecutors]:
    """Over CATALOG, of a model with NEEDS. pages: of a cache for users; 0: none."""
    config = override(Config(), "executors.streams=3", *settings)
    layout = user_layout(NEEDS)
    executors = FakeExecutors(reads)
    cache = None
    if pages:
        cache = UserCache(CacheMeta(Pages(pages, 1), {"user": Room(1)}))
    translator = ScorerTranslator("fake", CATALOG, NEEDS, layout, config, wall=lambda: wall)
    served = ServedScorer(
        translator, executors, config, reads=reads, features=features, cache=cache, metrics=Metrics()
    )
    return Engine(served, config.server.default_deadline_ms), executors


HSTU = HstuConfig(
    n_items=N_ITEMS, max_items=6, hidden=8, layers=2, heads=2, qk_dim=4, v_dim=4, length=17,
    items=items_digest(CATALOG.item_ids), bias="times",
)  # fmt: skip
STU = StuScorerConfig(
    stack=StuConfig(hidden=8, layers=2, heads=2, qk_dim=4, v_dim=4, length=16, contextual=2),
    n_items=N_ITEMS, max_items=6, item_dim=8, actions=3, action_dim=2, slots=(4, 2), mlp=8,
    position_rows=16, time_rows=32, tasks=("click", "like"), items=items_digest(CATALOG.item_ids),
)  # fmt: skip


def draw(cfg: ScorerConfig, seed: int = 0) -> Any:
    """Parameters that are far from nothing, so that scores differ."""
    return noisy(params.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(seed)), 0.3)


def make_folder(folder: Path, cfg: ScorerConfig, *settings: str, catalog: Catalog = CATALOG) -> Config:
    """A model folder, and the configuration that serves it."""
    scorers.save(folder, cfg, draw(cfg), lambda folder: save_catalog(catalog, folder / "catalog.jsonl"))
    return override(
        Config(),
        f"model.path={folder}",
        "model.name=tiny",
        "model.compilation_cache=",
        "executors.sizes=4,8",
        "server.port=0",
        *settings,
    )


class ScorerServer:
    """A model folder behind the whole server, in a thread of this process. A context manager; leaving it drains."""

    def __init__(self, config: Config, engine: AnyEngine | None = None) -> None:
        self._ready = threading.Event()
        self.engine = engine or load_any(config)
        self._listener = Listener(self.engine, config, on_ready=lambda url: self._ready.set())
        self._thread = threading.Thread(target=self._listener.serve_until_stopped, daemon=True)

    def __enter__(self) -> ScorerServer:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.engine.join(PATIENCE_S)
        self.engine.check()

    @property
    def url(self) -> str:
        return self._listener.url

    def call(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Status and JSON."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._listener.url + path, content, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def rank(self, **body: Any) -> Any:
        status, answer = self.call("/v1/rank", body)
        assert status == 200, answer
        return answer

    def metric(self, series: str) -> float:
        """Of a series by its full name; 0 where there is none."""
        with urllib.request.urlopen(f"{self._listener.url}/metrics", timeout=PATIENCE_S) as reply:
            lines = reply.read().decode().splitlines()
        return next(
            (float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series), 0.0
        )
