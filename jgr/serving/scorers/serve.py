# SPDX-License-Identifier: Apache-2.0
"""A scorer as the engine serves it: requests to parts, parts to executors, scores to answers (FLAME-14).

The policy is `policies.orchestration`. A request's features are fetched while it waits for executors and while its
user's part is computed; its parts start once both are there. Their scores are written to their places among the
request's candidates, and the last one that comes in makes the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from jgr.cache.memory import Lease
from jgr.cache.meta import CacheMeta
from jgr.cache.pool import DevicePool
from jgr.catalog.catalog import Catalog
from jgr.config import Config
from jgr.features.cache import FeatureCache
from jgr.features.memory import MISSING, STALE
from jgr.serving.api import Answer, Item, ModelInfo, Request, Reuse
from jgr.serving.degrading import smaller
from jgr.serving.engine.contract import make_ordering
from jgr.serving.engine.metrics import Metrics
from jgr.serving.errors import RequestError, invalid
from jgr.serving.explanations import RankExplanation
from jgr.serving.policies.jobs import Candidates, Job, Start, User, UserPart
from jgr.serving.policies.orchestration import Orchestrator
from jgr.serving.policies.user_cache import UserCache
from jgr.serving.prefill import Asked, Prefill
from jgr.serving.scorers.border_control import BorderControl
from jgr.serving.scorers.executors import PartExecutors, PartWork, Read, ReadWork
from jgr.serving.scorers.paging import Paging
from jgr.serving.scorers.translation import ScorerTask, ScorerTranslator


class PartCosts(msgspec.Struct, frozen=True):
    """Seconds of runs by size: of parts, of parts that compute the user too, and of parts of users of at most so many
    events, by that number."""

    parts: dict[int, float]
    whole: dict[int, float]
    shorter: dict[int, dict[int, float]] = {}


@dataclass(eq=False)
class ServedScorer:
    """See jgr.serving.engine.contract.Served.

    reads: whether the user's part is a run of its own. features: of the candidates; None: the model reads none, or
    there is no store. cache: None where users are not kept; lease: of its entries; pool: what they and rows stand in.
    paging: of the items' embeddings; None: these are parameters. control: moves its border; None: nothing does.
    memory: bytes that its parts take. clock: the engine's.
    """

    translator: ScorerTranslator
    executors: PartExecutors
    config: Config
    reads: bool
    metrics: Metrics = field(default_factory=Metrics)
    features: FeatureCache | None = None
    cache: UserCache | None = None
    lease: Lease[CacheMeta] | None = None
    paging: Paging | None = None
    control: BorderControl | None = None
    pool: DevicePool | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    clock: Callable[[], int] = time.monotonic_ns
    normalize = UNSET
    compares = False
    watch = None

    def __post_init__(self) -> None:
        self.info: ModelInfo = self.translator.info
        self.catalog: Catalog = self.translator.catalog
        self.meta: CacheMeta | None = None if self.cache is None else self.cache.meta
        self.prepare: Callable[..., ScorerTask] = self.translator.prepare
        self.items: Callable[[ScorerTask], list[Item]] = (
            self.translator.items if self.control is None else self._counted_items
        )
        self._parts = {size: self.metrics.parts.labels(str(size)) for size in self.executors.sizes}
        self._handover_s = 0.0
        self._closing: threading.Thread | None = None

    def measured(self) -> PartCosts:
        def with_handover(of: Mapping[int, float]) -> dict[int, float]:
            return {size: seconds + self._handover_s for size, seconds in of.items()}

        parts, whole, shorter = self.executors.costs, self.executors.whole, self.executors.shorter
        by_events = {events: with_handover(costs) for events, costs in shorter.items()}
        return PartCosts(with_handover(parts), with_handover(whole), by_events)

    def policy(self, measured: bytes | None = None) -> Orchestrator:
        costs = self.measured() if measured is None else msgspec.json.decode(measured, type=PartCosts)
        return Orchestrator(
            self.executors.sizes,
            costs.parts,
            max_queue=self.config.batching.max_queue,
            streams=self.config.executors.streams,
            whole=costs.whole,
            shorter=costs.shorter,
            users=self.cache,
            ordering=make_ordering(self.config),
        )

    def _counted_items(self, task: ScorerTask) -> list[Item]:
        assert self.control is not None
        found, usage = self.translator.items(task), task.usage
        cached = usage.cached_tokens > 0
        self.control.answered(task.request.user_id, task.arrival_ns, usage.prompt_tokens, cached)
        return found

    def job(self, task: ScorerTask, job_id: int, arrival_ns: int, deadline_ns: int | None) -> Job:
        count, task.ready_ns, task.arrival_ns = len(task.rows), self.clock(), arrival_ns
        user = None
        if self.reads:
            key = None if self.cache is None else task.key.tobytes()
            user = UserPart(task.user, key, self._within(task.usage.history_items))
        return Job(
            job_id,
            "rank",
            0,
            count,
            arrival_ns,
            deadline_ns,
            user=user,
            waits=self.features is not None and count > 0,
            priority=task.request.priority,
        )

    def _within(self, events: int) -> int:
        """The number of events whose programs are the user's, see `UserPart.within`."""
        return next((most for most in self.executors.shorter if events <= most), 0)

    async def read(self, request: Asked) -> None:
        """A scorer reads no texts."""

    def foreseen(self, task: ScorerTask, now_ns: int) -> tuple[bool, int] | None:
        if self.cache is None:
            return False, 0
        kept = self.cache.holds(UserPart(task.user, task.key.tobytes()))
        return (True, task.usage.prompt_tokens) if kept else None

    def smaller(self, task: ScorerTask) -> Request | None:
        if isinstance(task.request, Prefill):
            return None
        return smaller(task.request, len(task.rows), self.executors.sizes)

    def too_large(self, task: ScorerTask) -> RequestError:
        return invalid("candidates", f"no executor takes {len(task.rows)} candidates")

    async def fetch(self, task: ScorerTask, by_ns: int | None) -> None:
        """The candidates' features."""
        assert self.features is not None
        got = await self.features.get_many_async(task.rows, by_ns)
        task.usage.feature_missing, task.usage.feature_stale = got.missing, got.stale
        task.records, task.ready_ns = got.records, self.clock()
        if self.config.features.tables == "paged":
            task.found = got.states

    def begin(self, start: Start, tasks: Sequence[ScorerTask]) -> ReadWork | PartWork:
        (work,), (task,) = start.work, tasks
        size, metrics = self.executors.sizes[start.lane], self.metrics
        count = work.count if isinstance(work, Candidates) else 0
        self._parts[size].inc()
        metrics.candidate_pairs.inc(count)
        metrics.padding_pairs.inc(size - count)
        metrics.executor_wait.observe((self.clock() - task.ready_ns) / 1e9)
        if isinstance(work, User):
            return ReadWork(task.block, work.place, work.before)
        assert isinstance(work, Candidates)
        here = slice(work.first, work.first + work.count)
        records = None if task.records is None else task.records[here]
        found = None if task.found is None else task.found[here]
        ages = None if task.ages is None else task.ages[here]
        return PartWork(task.rows[here], task.state, records, found, ages)

    def take(self, start: Start, tasks: Sequence[ScorerTask | None], outcomes: Sequence[Any]) -> None:
        (work,), (task,), (outcome,) = start.work, tasks, outcomes
        if self.paging is not None:
            self.paging.border.retry()  # what this run had pinned is free now
        if task is None:
            return
        if isinstance(outcome, Read):
            assert isinstance(work, User)
            task.state, task.kept, task.ready_ns = outcome.state, outcome.kept, self.clock()
            usage = task.usage
            if outcome.cached == "all":
                usage.computed_tokens = 0
            elif outcome.cached == "before":
                usage.computed_tokens = work.grown
            usage.cached_tokens = usage.prompt_tokens - usage.computed_tokens
            return
        assert isinstance(work, Candidates)
        task.scores[work.first : work.first + work.count] = outcome
        assert task.usage.parts is not UNSET
        task.usage.parts += 1
        if task.found is not None:  # some may have gone from the pages since they were looked up
            task.usage.feature_stale = int((task.found == STALE).sum())
            task.usage.feature_missing = int((task.found == MISSING).sum())

    def explain(self, task: ScorerTask) -> list[Reuse]:
        return self.translator.explain(task, task.kept)

    def explanation(self, task: ScorerTask, answer: Answer) -> RankExplanation:
        return RankExplanation(answer=answer, spans=self.translator.spans(task))

    def shadows(self, task: ScorerTask) -> list[tuple[ScorerTask, Callable[[ScorerTask], None]]]:
        """None: what is kept of a user is bit for bit what is computed."""
        return []

    def lost(self, request: Asked) -> None:
        if self.control is not None and not isinstance(request, Prefill):
            self.control.lost(request.user_id)

    def starting(self) -> None:
        if self.paging is not None:
            self.paging.border.start()  # before the warm-up, which times programs with rows in pages

    def started(self, handover_s: float = 0.0) -> None:
        self._handover_s = handover_s
        if self.paging is not None:
            self.paging.rows.start()
            self.metrics.paging = self.paging.counts
        if self.features is not None:
            self.metrics.feature_counts = self.features.counts

    def close(self, idle: bool) -> None:
        if self.features is not None and self._closing is None:
            if self.metrics.feature_counts == self.features.counts:
                self.metrics.feature_counts = None
            # The store may take its time, and nobody is to wait for it.
            self._closing = threading.Thread(
                target=self.features.close, name="jgr-features-close", daemon=True
            )
            self._closing.start()
        if idle and self.paging is not None:
            if self.metrics.paging == self.paging.counts:
                self.metrics.paging = None
            self.paging.close()
        if idle and self.lease is not None:
            self.lease.close()

    def join(self, timeout_s: float) -> bool:
        if self._closing is None:
            return True
        self._closing.join(timeout_s)
        return not self._closing.is_alive()

    def check(self) -> None:
        """The policy audits the cache."""
        if self.paging is not None:
            self.paging.border.check()
