# SPDX-License-Identifier: Apache-2.0
"""The live driver: the only owner of the wall clock and of the futures that callers wait for.

The one idea: the event loop decides (validate, batch, answer) and the worker thread waits for the device;
they exchange whole batches. All state below belongs to the loop.

An engine is one version of one model; a reload (`jgr.serving.deployment`) makes another engine, so nothing in
one engine is ever replaced, and a request ends with the model that it began with.

One request: `submit` translates it to a task and hands a job to the batcher; `_pump` does what the batcher
plans, once per turn of the loop, so that requests that arrived together travel together; `_finished` commits
the batch, starts the next one, and only then makes answers, so that the device does not wait for the host.

Invariants (`check`): a ticket exists exactly for each live job, and its future is pending; nothing accepted
is lost: every future ends with an Answer, a RequestError or ClientGone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import UNSET
from prometheus_client import Histogram

from jgr.cache.meta import CacheMeta
from jgr.catalog import Catalog
from jgr.config import Config
from jgr.data.prefix_tree import PrefixTree
from jgr.serving import translation
from jgr.serving.api import Answer, ModelInfo, Request, RequestError, Timing, invalid
from jgr.serving.caching import Caching, planned
from jgr.serving.engines import ClientGone as ClientGone
from jgr.serving.engines import Rebuild as Rebuild
from jgr.serving.engines import Status as Status
from jgr.serving.metrics import Metrics
from jgr.serving.policies.batching import Batch, Batcher, Job, Reason, Rejected
from jgr.serving.policies.prompt_scheduling import ALL_ITEM_TOKENS
from jgr.serving.translation import Prompts, Task, Translator
from jgr.serving.work import Executor, Outcome, Progress, RecommendOutcome
from jgr.serving.worker import Run, Worker

_log = logging.getLogger(__name__)


class Shadow(NamedTuple):
    """A request that is computed again without the cache, the scores that were answered, and where it is counted how
    far they are apart."""

    task: Task
    scores: npt.NDArray[np.float32]
    drift: Histogram


@dataclass(eq=False)
class Ticket:
    """A request on its way. Times are the engine's clock, in ns."""

    job_id: int
    request_id: str
    task: Task
    answer: asyncio.Future[Answer]
    arrival_ns: int
    submitted_ns: int


class Engine:
    """Serves one model over one catalog.

    executor: its profiles bound the prompts, beam widths and numbers of candidates that are served. metrics: may
    be shared with the engines of other versions. clock: nanoseconds that never go back. revision: what tells the
    model's versions apart. rebuild: None where the catalog cannot be changed. ConfigError where profiles, batching and
    beam width do not fit. caching: None where nothing is cached.
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
    ) -> None:
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
        self.metrics = metrics or Metrics()
        self.status: Status = "starting"
        self.clock = clock
        self._worker = Worker(executor, clock)
        self._default_deadline_ms = config.server.default_deadline_ms
        self._tickets: dict[int, Ticket] = {}
        self._shadows: dict[int, Shadow] = {}
        self._shadow_share, self._shadow_due = config.cache.shadow, 0.0
        self._job_ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop
        self._pump_due = False
        self._wakeup: tuple[int, asyncio.TimerHandle] | None = None
        self._drained: asyncio.Future[None] | None = None

    @property
    def info(self) -> ModelInfo:
        """What is served, and the limits on its requests."""
        return self.translator.info

    @property
    def catalog(self) -> Catalog:
        return self.translator.catalog

    @property
    def meta(self) -> CacheMeta | None:
        """See jgr.serving.engines.AnyEngine."""
        return None if self.caching is None else self.caching.meta

    @property
    def queued(self) -> int:
        """Requests waiting for a batch."""
        return self._batcher.queued

    async def start(self, progress: Progress = lambda done, total, label: None) -> None:
        """Compile every profile; `progress` is called in the worker thread. Raises what warm-up raises."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        try:
            await self._worker.warm_up(self.executor.warm_up, progress)
        except Exception:
            if self.status == "draining":
                return
            self.status = "failed"
            raise
        if self.status == "starting":
            self.status = "ready"

    def submit(self, request: Request, request_id: str = "", arrival_ns: int | None = None) -> Ticket:
        """Accept a request or raise RequestError. arrival_ns: when it came in; deadlines count from it."""
        if self.status != "ready":
            raise RequestError("unavailable", f"the server is {self.status}")
        arrival_ns = self.clock() if arrival_ns is None else arrival_ns
        task = self.translator.prepare(request)
        deadline_ms = request.deadline_ms or self._default_deadline_ms
        deadline_ns = None if deadline_ms is None else arrival_ns + round(deadline_ms * 1e6)
        now_ns = self.clock()
        job = Job(
            next(self._job_ids), task.kind, task.tokens, task.width, arrival_ns, deadline_ns, task.parts
        )
        verdict = self._batcher.submit(job, now_ns)
        if isinstance(verdict, Rejected):
            raise _refusal(verdict.reason, task)
        self.metrics.unknown_items.inc(task.usage.unknown_items)
        ticket = Ticket(job.id, request_id, task, self._loop.create_future(), arrival_ns, now_ns)
        self._tickets[job.id] = ticket
        self._pump_soon()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits any more: queued work never runs. Does nothing where the ticket has already ended."""
        if self._batcher.cancel(ticket.job_id, self.clock()):
            self.metrics.cancelled.inc()
            self._end([ticket.job_id], ClientGone)

    async def answer(self, request: Request, request_id: str = "") -> Answer:
        """Submit and wait. RequestError as in `submit` and for failures; a cancelled caller cancels it."""
        ticket = self.submit(request, request_id)
        try:
            return await ticket.answer
        finally:
            self.cancel(ticket)

    async def drain(self, timeout_s: float | None) -> bool:
        """Refuse new work and finish what was accepted. False: time ran out, and the rest got errors.

        None: there is no limit. An engine that nobody else holds is freed afterwards, its device memory too.
        """
        self.status = "draining"
        self._batcher.drain()
        self._pump()
        if self._tickets or self._shadows or self._batcher.in_flight:
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        left = [*self._tickets, *self._shadows]
        for job_id in left:
            self._batcher.cancel(job_id, self.clock())
        self._end(left, partial(RequestError, "unavailable", "the server stopped before it had the answer"))
        self._worker.stop()
        if self._wakeup is not None:
            self._wakeup[1].cancel()  # the loop would hold the engine until the last deadline has passed
            self._wakeup = None
        return not self._batcher.in_flight

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

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Do what the batcher plans now, and wake up when time alone changes the plan."""
        self._pump_due = False
        now_ns = self.clock()
        while True:
            plan = self._batcher.plan(now_ns)
            self._expire(plan.expired)
            if plan.batch is None:
                break
            tasks = [self._task(job_id) for job_id in plan.batch.jobs]
            works = planned(plan.batch, tasks)
            self._worker.run(plan.batch.profile, works, partial(self._finished, plan.batch))
            real_tokens = sum(task.usage.computed_tokens + task.width for task in tasks)
            self.metrics.observe_batch(plan.batch.profile, len(tasks), real_tokens)
        wakeup_ns = self._batcher.next_wakeup_ns()
        if self._wakeup is not None and self._wakeup[0] != wakeup_ns:
            self._wakeup[1].cancel()
            self._wakeup = None
        if self._wakeup is None and wakeup_ns is not None:
            delay_s = max(0, wakeup_ns - now_ns) / 1e9
            self._wakeup = (wakeup_ns, self._loop.call_later(delay_s, self._wake))

    def _wake(self) -> None:
        self._wakeup = None
        self._pump()

    def _finished(self, batch: Batch, run: Run) -> None:
        committed = self._batcher.commit(batch.id, self.clock(), well=run.error is None)
        if run.error is not None and self.caching is not None:
            self.caching.meta.clear()  # the executor has emptied its pool
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

    def _fail(self, job_ids: Sequence[int], error: Exception) -> None:
        """The executor broke: one traceback in the log, an error for each request, and the engine goes on."""
        self.metrics.executor_failures.inc()
        waited = [job_id for job_id in job_ids if job_id in self._tickets]
        request_ids = ", ".join(self._tickets[job_id].request_id for job_id in waited)
        _log.error("the executor failed; requests: %s", request_ids, exc_info=error)
        self._end(job_ids, partial(RequestError, "internal", "the model failed; see the server's log"))

    def _expire(self, job_ids: Sequence[int]) -> None:
        if job_ids:
            self.metrics.deadline_expired.inc(len(job_ids))
            self._end(job_ids, partial(RequestError, "deadline_exceeded", "the deadline has passed"))

    def _end(self, job_ids: Sequence[int], error: Callable[[], Exception]) -> None:
        """Live requests end without an answer, each with an error of its own."""
        for job_id in job_ids:
            if self._shadows.pop(job_id, None) is not None:
                continue
            answer = self._tickets.pop(job_id).answer
            if not answer.done():
                answer.set_exception(error())
        self._check_drained()

    def _check_drained(self) -> None:
        if self._drained and not (
            self._drained.done() or self._tickets or self._shadows or self._batcher.in_flight
        ):
            self._drained.set_result(None)


def _refusal(reason: Reason, task: Task) -> RequestError:
    if reason == "queue_full":
        return RequestError("overloaded", "too many requests are waiting; try again later")
    if reason == "draining":
        return RequestError("unavailable", "the server is draining")
    size = f"{task.tokens} tokens with a width of {task.width}"
    return invalid("history", f"the prompt has {size}; no compiled profile takes that")
