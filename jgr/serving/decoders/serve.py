# SPDX-License-Identifier: Apache-2.0
"""The live driver of decoders: the loop validates, batches and answers; one worker thread waits for the device.

They exchange whole batches; what all drivers share is in `jgr.serving.engine.engine`. An engine is one version of one
model; a reload (`jgr.serving.versions.deployment`) makes another engine, so nothing in one engine is ever replaced, and
a request ends with the model that it began with.

One request: `submit` translates it to a task and hands a job to the batcher, `_do_planned` gives a batch to the
worker, and `_finished` commits it, starts the next one, and only then makes answers, so that the device does not wait
for the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import UNSET
from prometheus_client import Histogram

from jgr.cache.meta import CacheMeta
from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config
from jgr.serving.api import Answer, ModelInfo, Request, RequestError, Timing, invalid
from jgr.serving.decoders import translation
from jgr.serving.decoders.caching import Caching, planned
from jgr.serving.decoders.translation import Prompts, Task, Translator
from jgr.serving.decoders.work import Executor, Outcome, RecommendOutcome, Run, Worker
from jgr.serving.engine.contract import Progress, Rebuild
from jgr.serving.engine.engine import BaseTicket, Driver, Policy, refusal
from jgr.serving.engine.metrics import Metrics
from jgr.serving.policies.batching import Batch, Batcher, Job, Rejected
from jgr.serving.policies.prompt_scheduling import ALL_ITEM_TOKENS


class Shadow(NamedTuple):
    """A request that is computed again without the cache, the scores that were answered, and where it is counted how
    far they are apart."""

    task: Task
    scores: npt.NDArray[np.float32]
    drift: Histogram


@dataclass(eq=False)
class Ticket(BaseTicket):
    """A request on its way."""

    task: Task


class Engine(Driver[Ticket]):
    """Serves one model over one catalog.

    executor: its profiles bound the prompts, beam widths and numbers of candidates that are served. metrics: may
    be shared with the engines of other versions. clock: nanoseconds that never go back. revision: what tells the
    model's versions apart. rebuild: None where the catalog cannot be changed. ConfigError where profiles, batching and
    beam width do not fit. caching: None where nothing is cached.
    memory: bytes that its parts take.
    """

    def __init__(
        self,
        name: str,
        catalog: Catalog,
        tree: PrefixTree,
        prompts: Prompts,
        executor: Executor,
        config: Config,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        revision: str = "",
        rebuild: Rebuild | None = None,
        caching: Caching | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(metrics or Metrics(), clock, config.server.default_deadline_ms)
        self.memory = memory or {}
        self._batcher = Batcher(
            executor.profiles,
            max_tokens=config.batching.max_tokens,
            max_wait_ns=round(config.batching.max_wait_ms * 1e6),
            max_queue=config.batching.max_queue,
            groupings=None if caching is None else caching.groupings,
        )
        self.translator = Translator(
            name,
            catalog,
            tree,
            prompts,
            config,
            revision=revision,
            max_beam_width=self._batcher.max_width("recommend"),
            max_candidates=self._batcher.max_width("rank"),
            segments=None if caching is None else caching.segments,
            cached=caching is not None and "recommend" in caching.groupings,
        )
        self.caching = caching
        self.executor = executor
        self.rebuild = rebuild
        self._worker = Worker(executor, clock)
        self._shadows: dict[int, Shadow] = {}
        self._shadow_share, self._shadow_due = config.cache.shadow, 0.0

    @property
    def info(self) -> ModelInfo:
        """What is served, and the limits on its requests."""
        return self.translator.info

    @property
    def catalog(self) -> Catalog:
        return self.translator.catalog

    @property
    def meta(self) -> CacheMeta | None:
        """See jgr.serving.engine.contract.AnyEngine."""
        return None if self.caching is None else self.caching.meta

    @property
    def _policy(self) -> Policy:
        return self._batcher

    async def _warm_up(self, progress: Progress) -> None:
        if self.caching is not None:
            self.caching.start()
        self._worker.start()
        await self._worker.warm_up(self.executor.warm_up, progress)

    def submit(self, request: Request, request_id: str = "", arrival_ns: int | None = None) -> Ticket:
        """See jgr.serving.engine.contract.AnyEngine."""
        arrival_ns, deadline_ns = self._admit(request, arrival_ns)
        task = self.translator.prepare(request)
        now_ns = self.clock()
        job = Job(
            next(self._job_ids), task.kind, task.tokens, task.width, arrival_ns, deadline_ns, task.parts
        )
        verdict = self._batcher.submit(job, now_ns)
        if isinstance(verdict, Rejected):
            raise _too_large(task) if verdict.reason == "too_large" else refusal(verdict.reason)
        self.metrics.unknown_items.inc(task.usage.unknown_items)
        ticket = Ticket(job.id, request_id, self._loop.create_future(), arrival_ns, now_ns, task)
        self._tickets[job.id] = ticket
        self._pump_soon()
        return ticket

    def join(self, timeout_s: float) -> bool:
        """After `drain`: wait for the worker thread. False where the device still holds it."""
        return self._worker.join(timeout_s)

    def forget(self, user_id: str) -> int:
        """Erase a user's cache entries; how many there were."""
        return 0 if self.caching is None else self.caching.forget(user_id)

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        self._batcher.check()
        owned = len(self._tickets) + len(self._shadows)
        assert owned == self._batcher.live, "tickets and live jobs differ in number"
        for job_id, ticket in self._tickets.items():
            assert self._batcher.state(job_id) is not None, "a ticket outlived its job"
            assert not ticket.answer.done(), "an answered ticket is kept"

    def _stop(self) -> None:
        self._worker.stop()
        if self.caching is not None and not self._batcher.in_flight:
            self.caching.lease.close()

    def _do_planned(self, now_ns: int) -> None:
        if self.caching is not None:
            self.caching.renew()
        while True:
            plan = self._batcher.plan(now_ns)
            self._expire(plan.expired)
            if plan.batch is None:
                return
            tasks = [self._task(job_id) for job_id in plan.batch.jobs]
            works = planned(plan.batch, tasks, self.caching)
            self._worker.run(plan.batch.profile, works, partial(self._finished, plan.batch))
            real_tokens = sum(task.usage.computed_tokens + task.width for task in tasks)
            self.metrics.observe_batch(plan.batch.profile, len(tasks), real_tokens)

    def _finished(self, batch: Batch, run: Run) -> None:
        committed = self._batcher.commit(batch.id, self.clock(), well=run.error is None)
        self._expire(committed.expired)
        self._pump()
        if run.error is not None:
            self._fail(committed.done, run.error)
        else:
            outcomes = dict(zip(batch.jobs, run.outcomes, strict=True))
            for job_id in committed.done:
                if job_id in self._shadows:
                    self._compare(job_id, outcomes[job_id])
                else:
                    self._answer(job_id, outcomes[job_id], run)
        self._check_drained()

    def _answer(self, job_id: int, outcome: Outcome, run: Run) -> None:
        ticket, info = self._tickets[job_id], self.info
        task = ticket.task
        try:
            items = self.translator.items(task, outcome)
        except Exception as error:
            return self._fail([job_id], error)
        del self._tickets[job_id]
        if isinstance(outcome, RecommendOutcome):
            self.metrics.dead_beams.inc(task.width - len(outcome.leaves))
        timing = Timing(
            queue=(run.start_ns - ticket.submitted_ns) / 1e6,
            prepare=(ticket.submitted_ns - ticket.arrival_ns) / 1e6,
            device=(run.end_ns - run.start_ns) / 1e6,
            total=(self.clock() - ticket.arrival_ns) / 1e6,
        )
        self.metrics.observe_stages(task.kind, timing)
        answer = Answer(
            id=ticket.request_id,
            model=info.version,
            catalog_version=info.catalog_version,
            normalize=info.normalize,
            items=items,
            usage=task.usage,
            timing_ms=timing,
        )
        self.metrics.observe_usage(task.usage)
        if self.caching is not None and task.usage.cached_tokens:
            self._shadow(task, outcome)
        if task.request.explain:
            answer.explain = self.translator.explain(task)
        if not ticket.answer.done():
            ticket.answer.set_result(answer)

    def _task(self, job_id: int) -> Task:
        ticket = self._tickets.get(job_id)
        return self._shadows[job_id].task if ticket is None else ticket.task

    def _shadow(self, task: Task, outcome: Outcome) -> None:
        """Compute the configured share of what was reused again, while nobody waits."""
        self._shadow_due = min(
            1.0, self._shadow_due + self._shadow_share
        )  # what a busy time skipped is not made up
        if self._shadow_due < 1 or self._batcher.queued or self.status != "ready":
            return
        self._shadow_due -= 1
        now_ns = self.clock()
        shadows = [Shadow(translation.shadow(task), outcome.scores, self.metrics.drift)]
        if task.usage.repaired_tokens is not UNSET:
            causal = translation.shadow(task, ALL_ITEM_TOKENS)
            shadows.append(Shadow(causal, outcome.scores, self.metrics.repair_drift))
        for shadow in shadows:
            again = shadow.task
            job = Job(next(self._job_ids), again.kind, again.tokens, again.width, now_ns, None, again.parts)
            if not isinstance(self._batcher.submit(job, now_ns), Rejected):
                self._shadows[job.id] = shadow
                self._pump_soon()

    def _compare(self, job_id: int, outcome: Outcome) -> None:
        _, answered, drift = self._shadows.pop(job_id)
        count = min(len(answered), len(outcome.scores))
        drift.observe(float(np.abs(answered[:count] - outcome.scores[:count]).max(initial=0)))

    def _live(self) -> list[int]:
        return [*self._tickets, *self._shadows]

    def _close(self, job_id: int) -> asyncio.Future[Answer] | None:
        return None if self._shadows.pop(job_id, None) is not None else super()._close(job_id)


def _too_large(task: Task) -> RequestError:
    size = f"{task.tokens} tokens with a width of {task.width}"
    return invalid("history", f"the prompt has {size}; no compiled profile takes that")
