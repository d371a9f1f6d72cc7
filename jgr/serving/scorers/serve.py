# SPDX-License-Identifier: Apache-2.0
"""The live driver of rankers: requests to parts, parts to executors, scores to answers (FLAME-14).

The policy is `policies.orchestration`; what all drivers share is in `jgr.serving.engine.engine`. A request's features
are fetched while it waits for executors and while its user's part is computed; its parts start once both are there.
Their scores are written to their places among the request's candidates, and the last one that comes in makes the
answer.

Invariant (`check`), besides the drivers': an entry of the cache is pinned while a run reads or writes it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from jgr.cache.memory import Lease
from jgr.cache.meta import CacheMeta
from jgr.catalog.catalog import Catalog
from jgr.config import Config
from jgr.features.cache import FeatureCache
from jgr.serving.api import Answer, ModelInfo, Request, Timing
from jgr.serving.engine.contract import Progress, Rebuild
from jgr.serving.engine.engine import BaseTicket, Driver, Policy, refusal
from jgr.serving.engine.metrics import Metrics
from jgr.serving.known_items import user_entry
from jgr.serving.policies.batching import Rejected
from jgr.serving.policies.orchestration import Job, Orchestrator, Start
from jgr.serving.policies.user_cache import Found, UserCache
from jgr.serving.scorers.executors import PartExecutors, PartWork, Ran, Read, ReadWork
from jgr.serving.scorers.translation import ScorerTask, ScorerTranslator


@dataclass(eq=False)
class Ticket(BaseTicket):
    """A request on its way. ready_ns: since when its runs wait for executors only.

    user: what its parts are given of the user. records: of the candidates' features, once they are there.
    """

    task: ScorerTask
    scores: npt.NDArray[np.float32]
    user: Any
    ready_ns: int
    records: npt.NDArray[np.void] | None = None
    fetching: asyncio.Task[None] | None = None
    started_ns: int | None = None
    ended_ns: int = 0
    kept: bool = False


@dataclass(eq=False)
class ScorerEngine(Driver[Ticket]):
    """Serves one ranker over one catalog; see jgr.serving.engine.contract.AnyEngine.

    tasks: the number of the model's. reads: whether the user's part is a run of its own. features: of the candidates;
    None: the model reads none, or there is no store. cache: None where users' parts are not kept; lease: of
    its entries; epoch: reads the pool's. memory: bytes that its parts take. clock: as of Engine.
    """

    translator: ScorerTranslator
    executors: PartExecutors
    config: Config
    tasks: int
    reads: bool
    metrics: Metrics = field(default_factory=Metrics)
    features: FeatureCache | None = None
    cache: UserCache | None = None
    lease: Lease | None = None
    epoch: Callable[[], int] = lambda: 0
    memory: Mapping[str, int] = field(default_factory=dict)
    rebuild: Rebuild | None = None
    clock: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        super().__init__(self.metrics, self.clock, self.config.server.default_deadline_ms)
        self._orchestrator = self._new_orchestrator()
        self._readings: dict[int, Found] = {}
        self._closing: threading.Thread | None = None

    @property
    def info(self) -> ModelInfo:
        return self.translator.info

    @property
    def catalog(self) -> Catalog:
        return self.translator.catalog

    @property
    def meta(self) -> CacheMeta | None:
        return None if self.cache is None else self.cache.meta

    @property
    def _policy(self) -> Policy:
        return self._orchestrator

    async def _warm_up(self, progress: Progress) -> None:
        await self.executors.start(progress)
        self._orchestrator = self._new_orchestrator()  # the sizes' costs are known now
        if self.features is not None:
            self.metrics.feature_counts = self.features.counts

    def submit(self, request: Request, request_id: str = "", arrival_ns: int | None = None) -> Ticket:
        """See AnyEngine."""
        arrival_ns, deadline_ns = self._admit(request, arrival_ns)
        task = self.translator.prepare(request)
        now_ns = self.clock()
        count, waits = len(task.rows), self.features is not None
        job = Job(next(self._job_ids), count, arrival_ns, deadline_ns, self.reads, waits)
        verdict = self._orchestrator.submit(job, now_ns)
        if isinstance(verdict, Rejected):
            raise refusal(verdict.reason)
        task.usage.parts = len(self._orchestrator.parts(count, self.reads)[1])
        self.metrics.unknown_items.inc(task.usage.unknown_items)
        scores = np.zeros((count, self.tasks), np.float32)
        ticket = Ticket(
            job.id, request_id, self._loop.create_future(), arrival_ns, now_ns, task, scores, task.block, now_ns
        )  # fmt: skip
        self._tickets[job.id] = ticket
        if self.features is not None:
            ticket.fetching = self._loop.create_task(self._fetch(ticket, self.features, deadline_ns))
        self._pump_soon()
        return ticket

    def _stop(self) -> None:
        self.executors.stop()
        if self.features is not None and self._closing is None:
            if self.metrics.feature_counts == self.features.counts:
                self.metrics.feature_counts = None
            # The store may take its time, and nobody is to wait for it.
            self._closing = threading.Thread(
                target=self.features.close, name="jgr-features-close", daemon=True
            )
            self._closing.start()
        if self.lease is not None and not self._orchestrator.in_flight:
            self.lease.close()

    def join(self, timeout_s: float) -> bool:
        """See AnyEngine."""
        if self._closing is not None:
            self._closing.join(timeout_s)
        return self.executors.join(timeout_s)

    def forget(self, user_id: str) -> int:
        """See AnyEngine."""
        return 0 if self.cache is None else self.cache.forget(user_entry(user_id))

    def check(self) -> None:
        """See AnyEngine."""
        self._orchestrator.check()
        assert self._tickets.keys() == self._orchestrator.jobs, "tickets and live jobs differ"
        assert not any(t.answer.done() for t in self._tickets.values()), "an answered ticket is kept"
        if self.cache is not None:
            self.cache.meta.check()
            read = {found.entry for found in self._readings.values()}
            read |= {found.before.entry for found in self._readings.values() if found.before is not None}
            assert all(entry.pins for entry in read), "a run reads or writes an entry that is not pinned"

    def _new_orchestrator(self) -> Orchestrator:
        return Orchestrator(
            self.executors.sizes,
            self.executors.costs,
            max_queue=self.config.batching.max_queue,
            streams=self.config.executors.streams,
            whole=self.executors.whole,
        )

    async def _fetch(self, ticket: Ticket, features: FeatureCache, deadline_ns: int | None) -> None:
        """The candidates' features. Of the time that the parts leave of the deadline, half is for waiting here."""
        if deadline_ns is not None:
            costs, now_ns = self.executors.costs, self.clock()
            parts_s = sum(costs[size] for size in self._orchestrator.parts(len(ticket.task.rows), False)[1])
            deadline_ns = now_ns + (deadline_ns - now_ns - round(parts_s * 1e9)) // 2
        try:
            got = await features.get_many_async(ticket.task.rows, deadline_ns)
        except Exception as error:  # not the store's, which are counted
            if self._orchestrator.cancel(ticket.job_id, self.clock()):
                self._fail([ticket.job_id], error)
            return
        usage = ticket.task.usage
        usage.feature_missing, usage.feature_stale = got.missing, got.stale
        ticket.records, ticket.fetching = got.records, None
        ticket.ready_ns = self.clock()
        self._orchestrator.ready(ticket.job_id)
        self._pump_soon()

    def _do_planned(self, now_ns: int) -> None:
        if self.cache is not None:
            self.cache.meta.renew(self.epoch())
        plan = self._orchestrator.plan(now_ns)
        self._expire(plan.expired)
        for start in plan.starts:
            ticket = self._tickets[start.job]
            work = self._work(start, ticket)
            ticket.started_ns = now_ns if ticket.started_ns is None else ticket.started_ns
            size = self.executors.sizes[start.executor]
            self.metrics.observe_part(size, start.count, (now_ns - ticket.ready_ns) / 1e9)
            self.executors.run(start.executor, work, partial(self._finished, start))

    def _work(self, start: Start, ticket: Ticket) -> ReadWork | PartWork:
        task = ticket.task
        if start.count:
            here = slice(start.first, start.first + start.count)
            records = None if ticket.records is None else ticket.records[here]
            return PartWork(task.rows[here], ticket.user, records)
        found = None if self.cache is None else self.cache.find(task.user, task.block)
        if found is None:
            return ReadWork(task.block)
        self._readings[start.run] = found
        return ReadWork(task.block, found.place, None if found.before is None else found.before.place)

    def _finished(self, start: Start, ran: Ran) -> None:
        now_ns = self.clock()
        found = self._readings.pop(start.run, None)
        if found is not None and self.cache is not None:
            self.cache.end(found, ran.error is None and ran.value.kept)
        committed = self._orchestrator.commit(start.run, now_ns, well=ran.error is None)
        ticket = None if committed.job is None else self._tickets[committed.job]
        if ticket is not None and ran.error is None:
            self._note(ticket, start, ran, now_ns, found)
        self._pump()
        if ran.error is not None:
            self._fail([] if ticket is None else [start.job], ran.error)
        elif ticket is not None and committed.end == "expired":
            self._expire([ticket.job_id])
        elif ticket is not None and committed.end == "done":
            self._answer(ticket)
        self._check_drained()

    def _note(self, ticket: Ticket, start: Start, ran: Ran, now_ns: int, found: Found | None) -> None:
        """What came of a run is the request's."""
        if isinstance(ran.value, Read):
            ticket.user, ticket.kept = ran.value.state, ran.value.kept
            ticket.ready_ns = now_ns
            usage = ticket.task.usage
            if ran.value.cached == "all":
                usage.computed_tokens = 0
            elif ran.value.cached == "before" and found is not None and found.before is not None:
                usage.computed_tokens = found.before.events
            usage.cached_tokens = usage.prompt_tokens - usage.computed_tokens
        else:
            ticket.scores[start.first : start.first + start.count] = ran.value
        ticket.ended_ns = ran.end_ns

    def _answer(self, ticket: Ticket) -> None:
        task, info = ticket.task, self.info
        try:
            items = self.translator.items(task, ticket.scores)
        except Exception as error:
            return self._fail([ticket.job_id], error)
        del self._tickets[ticket.job_id]
        assert ticket.started_ns is not None
        timing = Timing(
            queue=(ticket.started_ns - ticket.submitted_ns) / 1e6,
            prepare=(ticket.submitted_ns - ticket.arrival_ns) / 1e6,
            device=(ticket.ended_ns - ticket.started_ns) / 1e6,
            total=(self.clock() - ticket.arrival_ns) / 1e6,
        )
        self.metrics.observe_stages("rank", timing)
        self.metrics.observe_usage(task.usage)
        answer = Answer(
            id=ticket.request_id,
            model=info.version,
            catalog_version=info.catalog_version,
            items=items,
            usage=task.usage,
            timing_ms=timing,
            explain=self.translator.explain(task, ticket.kept) if task.request.explain else UNSET,
        )
        if not ticket.answer.done():
            ticket.answer.set_result(answer)

    def _close(self, job_id: int) -> asyncio.Future[Answer]:
        ticket = self._tickets.pop(job_id)
        if ticket.fetching is not None:
            ticket.fetching.cancel()
        return ticket.answer
