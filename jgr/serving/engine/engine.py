# SPDX-License-Identifier: Apache-2.0
"""The engine: one version of one model over one catalog, behind the life of a request that all models share.

The one idea: the event loop decides, by a pure policy, and other threads wait for the device. The engine does what the
policy plans once per turn of the loop, so that requests that arrived together travel together, and again when time
alone changes the plan. All state belongs to the loop. What differs between decoders and scorers is in `Served`.

One request: `enter` waits for its turn; `submit` translates it to a task and hands a job to the policy; `_pump` gives
planned runs to their lanes; `_finished` commits a run, starts the next ones, and only then makes answers, so that the
device does not wait for the host. A reload makes another engine, and a request ends with the model that it began with.

Invariants (`check`): a ticket exists exactly for each live job, and its future is pending; nothing accepted is lost:
every future ends with an Answer, a RequestError or ClientGone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, overload

from msgspec import UNSET
from msgspec.structs import replace

from jgr.cache.pool import PoolLost
from jgr.catalog.catalog import Catalog
from jgr.serving.api import Answer, ModelInfo, Request
from jgr.serving.engine import failures
from jgr.serving.engine.contract import Progress, Served, Status
from jgr.serving.engine.host import HINTS_YIELD, Host, refusal
from jgr.serving.engine.journal import journal_at
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.opening import Again
from jgr.serving.engine.threads import Abandoned, Lanes, Run
from jgr.serving.engine.ticket import ClientGone, Ticket
from jgr.serving.errors import RequestError
from jgr.serving.known_items import user_entry
from jgr.serving.policies.jobs import Job, Outcome, Rejected, Sort, Start
from jgr.serving.policies.policy import Policy
from jgr.serving.policies.soundness import broken
from jgr.serving.prefill import Asked, Prefill, Prefilled

S = TypeVar("S", bound=Served[Any])


@dataclass(frozen=True)
class Rebuild:
    """How a model is served over another catalog. check: raises UserError where that cannot be.

    engine: makes the catalog's engine, not started; raises as `check` does. Both take long and run in a thread.
    again: how this version is loaded once more; None: it was not loaded from a folder.
    """

    check: Callable[[Catalog], object]
    engine: Callable[[Catalog], AnyEngine]
    again: Again | None = None


class Engine(Generic[S]):
    """All methods but `join` are called on the event loop that `start` was called on.

    default_deadline_ms: of requests that name none; None: they have none. clock: nanoseconds that never go back.
    rebuild: None where the catalog cannot be changed. journal: where the policy's calls are written; "": nowhere.
    """

    def __init__(
        self,
        served: S,
        default_deadline_ms: float | None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        rebuild: Rebuild | None = None,
        journal: str = "",
    ) -> None:
        self.served, self.clock, self.rebuild = served, clock, rebuild
        self.metrics: Metrics = served.metrics  # may be shared with the engines of other versions
        self.info: ModelInfo = served.info  # what is served, and the limits on its requests
        self.catalog: Catalog = served.catalog
        self.meta = served.meta  # of its cache; None where nothing is cached
        self.memory: Mapping[str, int] = served.memory  # bytes of its parts, on device and host
        self.before: Callable[[Any], Awaitable[None]] | None = None  # a request waits for it first
        self.status: Status = "starting"
        self._policy: Policy[Any] = served.policy()
        self._lanes, self._host = Lanes(served.executors, clock), Host(clock)
        self._failures = failures.Failures(clock)
        self._default_deadline_ms, self._job_ids = default_deadline_ms, itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop
        self._journal = journal_at(journal) if journal else None  # a file that cannot be written is told now
        self._pump_due, self._pool, self._epoch = False, served.pool, 0
        self._wakeup: tuple[int, asyncio.TimerHandle] | None = None
        self._drained: asyncio.Future[None] | None = None

    @property
    def queued(self) -> int:
        """Requests waiting for the device."""
        return self._policy.queued

    @property
    def in_flight(self) -> int:
        """Runs that are started and have not ended."""
        return self._policy.in_flight

    @property
    def broken(self) -> str:
        """Why its device counts as broken; "": it does not."""
        return broken(self._lanes.failed, self._policy.flights, self.clock())

    async def start(self, progress: Progress = lambda done, total, label: None) -> None:
        """Compile; `progress` is called in another thread. Raises what warm-up raises."""
        self._loop = asyncio.get_running_loop()
        self.served.starting()
        try:
            await self._lanes.start(progress)
            handover_s = await self._lanes.handover_s()
        except Exception:
            if self.status == "draining":
                return
            self.status = "failed"
            raise
        if self.status == "starting":
            self.served.started(handover_s)
            self._policy = self.served.policy()
            if self._journal is not None:
                name = f"{self.info.version}/{self.info.catalog_version}"
                self._policy = self._journal.follow(name, self.served.measured(), self._policy, self.clock())
            self.status = "ready"

    def need_ns(self, task: Any) -> int:
        """See Policy; of a task of which nothing is cached."""
        return self._policy.need_ns(replace(self.served.job(task, -1, self.clock(), None), prompt=None))

    @property
    def max_queue(self) -> int:
        return self._policy.max_queue  # of requests that wait

    def submit(
        self, request: Asked, request_id: str = "", arrival_ns: int = 0, tenant: str = "", read: Any = None
    ) -> Ticket:
        """Accept a request or raise RequestError. arrival_ns: when it came in; deadlines count from it. read: of enter.

        tenant: whose the user's cache entries are, which their names begin with: a name without "/" and ":", and a "/",
        so that no two tenants share an entry; "": nobody's.
        """
        arrival_ns = arrival_ns or self.clock()
        deadline_ns = self._refuse_early(request, arrival_ns)
        while True:
            task, now_ns = self.served.prepare(request, tenant, read), self.clock()
            found = self.served.foreseen(task, now_ns) if isinstance(request, Prefill) else None
            if found is not None:
                ticket = Ticket(-1, request_id, task, self._loop.create_future(), arrival_ns, now_ns)
                return self._hinted(ticket, now_ns, *found)
            job = self.served.job(task, next(self._job_ids), arrival_ns, deadline_ns)
            verdict = self._policy.submit(job, now_ns)
            if not isinstance(verdict, Rejected):
                break
            less = self.served.smaller(task) if verdict.reason == "too_late" else None
            if less is None:
                raise self._refused(verdict, task, job)
            request = less
        self.metrics.unknown_items.inc(task.usage.unknown_items)
        ticket = Ticket(job.id, request_id, task, self._loop.create_future(), arrival_ns, now_ns)
        ticket.deadline_ns, ticket.predicted_ns = job.deadline_ns, verdict.predicted_ns
        self._tickets[job.id] = ticket
        if job.waits:
            ticket.fetching = self._loop.create_task(self._fetch(ticket, verdict.ready_by_ns))
        self._pump_soon()
        return ticket

    async def enter(self, request: Asked, arrival_ns: int) -> Any:
        """Wait for the request's turn on the loop; `submit` follows at once, with what this returns: what other threads
        read of its texts. RequestError for one that is known to be refused."""
        texts, sort, turns = getattr(request, "history_texts", None), self._sort(request), self._host.turns
        with turns.coming():
            read = None if texts is None else await self.served.read(request)
            if self.before is not None:
                await self.before(request)
            if turns.waiting:
                self._refuse_early(request, arrival_ns, turns.ahead(sort), turns.wait_ns(sort))
            deadline_ms = self._deadline_ms(request) if sort == "batch" else None
            if deadline_ms is None:
                await turns.take(sort)
            else:  # its line may stand still for long
                await self._take_until(request, arrival_ns + round(deadline_ms * 1e6))
        return read

    async def _take_until(self, request: Asked, deadline_ns: int) -> None:
        try:
            async with asyncio.timeout((deadline_ns - self.clock()) / 1e9):
                await self._host.turns.take("batch")
        except TimeoutError:
            self.metrics.deadline_expired.inc()
            self.served.lost(request)
            raise RequestError("deadline_exceeded", "the deadline has passed") from None

    def _sort(self, request: Asked) -> Sort:
        if request.priority == "batch":
            return "batch"
        return "undated" if self._deadline_ms(request) is None else "dated"

    def _deadline_ms(self, request: Asked) -> float | None:
        return request.deadline_ms or self._default_deadline_ms

    def _refuse_early(self, request: Asked, arrival_ns: int, ahead: int = 0, wait_ns: int = 0) -> int | None:
        """Raise RequestError for a request that is known to be refused, before it is translated, which takes long.
        ahead: requests of its sort that wait for their turn; wait_ns: how long it would. Returns when its last run must
        end; None: it has no deadline."""
        self._lanes.reap()  # here, since those that are refused go no further
        if self.status != "ready":
            raise RequestError("unavailable", f"the server is {self.status}")
        hint, policy, sort = isinstance(request, Prefill), self._policy, self._sort(request)
        yields = hint and policy.waiting("dated") + policy.waiting("undated") > HINTS_YIELD
        if yields or policy.waiting(sort) + ahead >= policy.max_queue:
            self.metrics.rejected["queue_full"].inc()
            self.served.lost(request)
            raise refusal(Rejected("queue_full"))
        if (deadline_ms := self._deadline_ms(request)) is None:
            return None
        whole_ns, now_ns = round(deadline_ms * 1e6), self.clock()
        # Of an idle engine nothing is reserved, so that one that refuses everything finds out that it need not.
        deadline_ns = arrival_ns + whole_ns - (self._host.reserve_ns(whole_ns) if self._tickets else 0)
        self._pump_soon()  # which takes the loop's time, whatever becomes of the request
        if isinstance(request, Prefill) or not policy.predicts:
            return deadline_ns
        verdict = self._host.known_late(request, policy, arrival_ns, deadline_ns, now_ns, wait_ns)
        if verdict is None:
            return deadline_ns
        self.metrics.rejected["too_late"].inc()
        self.served.lost(request)
        raise refusal(verdict, arrival_ns, deadline_ns, self._host.part_ns, deadline_ms)

    def _refused(self, verdict: Rejected, task: Any, job: Job) -> RequestError:
        """The error of a job that the policy did not take."""
        self.metrics.rejected[verdict.reason].inc()
        if verdict.reason == "too_large":
            return self.served.too_large(task)
        self.served.lost(task.request)
        if verdict.reason == "too_late" and not isinstance(task.request, Prefill):
            self._host.refused(task.request, job)
        part_ns, given_ms = self._host.part_ns, self._deadline_ms(task.request)
        return refusal(verdict, job.arrival_ns, job.deadline_ns, part_ns, given_ms)

    def encoded(self, ticket: Ticket) -> None:
        """The answer of a ticket is about to be sent."""
        ticket.encoded_ns = self.clock()
        if ticket.ended_ns:
            self._host.answered(ticket.encoded_ns - ticket.ended_ns)

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits any more: queued work never runs. Does nothing where the ticket has already ended."""
        if ticket.job_id in self._tickets and self._policy.cancel(ticket.job_id, self.clock()):
            self.metrics.cancelled.inc()
            self._end([ticket.job_id], ClientGone)
            self._pump_soon()  # another one may have its place

    @overload
    async def answer(self, request: Prefill, request_id: str = "") -> Prefilled: ...
    @overload
    async def answer(self, request: Request, request_id: str = "") -> Answer: ...
    async def answer(self, request: Asked, request_id: str = "") -> Answer | Prefilled:
        """Submit and wait. RequestError as in `submit` and for failures; a cancelled caller cancels it."""
        arrival_ns = self.clock()
        read = await self.enter(request, arrival_ns)
        ticket = self.submit(request, request_id, arrival_ns, read=read)
        try:
            answer: Answer | Prefilled = await ticket.answer
            self.encoded(ticket)
            return answer
        finally:
            self.cancel(ticket)

    async def drain(self, timeout_s: float | None) -> bool:
        """Refuse new work and finish what was accepted. False: time ran out, and the rest got errors.

        None: there is no limit. An engine that nobody else holds is freed afterwards, its device memory too.
        """
        if timeout_s is None:
            await self._host.turns.over()
        self.status = "draining"
        self._policy.drain(self.clock())
        self._pump()
        if self._tickets or self._policy.in_flight:
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        left = list(self._tickets)
        for job_id in left:
            self._policy.cancel(job_id, self.clock())
        self._end(left, partial(RequestError, "unavailable", "the server stopped before it had the answer"))
        self._lanes.stop()
        idle = not self._policy.in_flight
        self.served.close(idle)
        if idle and self._journal is not None:
            self._journal.end(self._policy, self.clock())
        if self._wakeup is not None:
            self._wakeup[1].cancel()  # the loop would hold the engine until the last deadline has passed
            self._wakeup = None
        return not self._policy.in_flight

    def join(self, timeout_s: float) -> bool:
        """After `drain`: wait for its threads. False where the device still holds one."""
        closed = self.served.join(timeout_s)
        return self._lanes.join(timeout_s) and closed

    def forget(self, user_id: str, tenant: str = "") -> int:
        """Erase the cache entries of a tenant's user; how many there were."""
        return self._policy.forget(user_entry(user_id, tenant), self.clock())

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        self._policy.check()
        self.served.check()
        assert len(self._tickets) == self._policy.live, "tickets and live jobs differ in number"
        assert all(self._policy.state(job_id) for job_id in self._tickets), "a ticket has no live job"
        assert not any(t.answer.done() for t in self._tickets.values()), "an answered ticket is kept"

    async def _fetch(self, ticket: Ticket, by_ns: int | None) -> None:
        try:
            await self.served.fetch(ticket.task, by_ns)
        except Exception as error:
            if self._policy.cancel(ticket.job_id, self.clock()):
                self._fail([ticket.job_id], error)
        else:
            ticket.fetching = None
            self._policy.ready(ticket.job_id, self.clock())
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._turn, self.clock())

    def _turn(self, asked_ns: int) -> None:
        self._host.turned(self.clock() - asked_ns)
        self._pump()

    def _pump(self) -> None:
        """Do what the policy plans now, and wake up when time alone changes the plan."""
        self._pump_due = False
        now_ns = self.clock()
        if self._pool is not None and self._pool.epoch != self._epoch:
            self._epoch = self._pool.epoch
            self._policy.renew(self._epoch, now_ns)
        plan, wakeup_ns = self._policy.plan(now_ns), self._policy.next_wakeup_ns()
        if plan.expired:
            self._expire(plan.expired)
        for start in plan.starts:
            tickets = [self._tickets[work.job] for work in start.work]
            for ticket in tickets:
                if ticket.deadline_ns is not None and not ticket.planned_ns:
                    self.metrics.observe_slack((ticket.deadline_ns - now_ns) / 1e9)
                ticket.planned_ns = ticket.planned_ns or now_ns
            work = self.served.begin(start, [ticket.task for ticket in tickets])
            self._lanes.run(start, work, partial(self._finished, start), partial(self._wanted, start))
        if self._wakeup is not None and self._wakeup[0] != wakeup_ns:
            self._wakeup[1].cancel()
            self._wakeup = None
        if self._wakeup is None and wakeup_ns is not None:
            self._wakeup = (wakeup_ns, self._loop.call_later(max(0, wakeup_ns - now_ns) / 1e9, self._wake))

    def _wake(self) -> None:
        self._wakeup = None
        self._pump()

    def _wanted(self, start: Start) -> bool:
        """Whether a run is still to be launched: somebody waits for it, or it writes what others may read."""
        return any(work.job in self._tickets for work in start.work) or start.keeps

    def _finished(self, start: Start, run: Run) -> None:
        lost = isinstance(run.error, PoolLost | Abandoned)  # nothing has run, and it is planned again
        outcome: Outcome = "well" if run.error is None else "lost" if lost else "failed"
        now_ns = self.clock()
        self._host.ran()
        committed = self._policy.commit(start.run, outcome, now_ns, (run.start_ns, run.end_ns))
        done, failed, error = committed.done, committed.failed, run.error
        if error is None:
            tasks: list[Any] = []
            for work in start.work:
                ticket = self._tickets.get(work.job)
                if ticket is not None:
                    ticket.started_ns = ticket.started_ns or run.start_ns
                    ticket.begun_ns = ticket.begun_ns or run.begin_ns
                    ticket.launched_ns = ticket.launched_ns or run.launched_ns
                    ticket.ended_ns, ticket.start = run.end_ns, start
                tasks.append(None if ticket is None else ticket.task)
            try:
                self.served.take(start, tasks, run.outcomes)
            except Exception as cause:
                done, failed, error = (), committed.done, cause
        self._charge(start, run, error is not None, (*committed.expired, *committed.again))
        self._pump()
        if error is not None and not lost:
            self._fail(failed, error)
        if committed.expired:
            self._expire(committed.expired)
        for job_id in done:
            self._answer(self._tickets.pop(job_id), now_ns)
        self._check_drained()

    def _charge(self, start: Start, run: Run, failed: bool, lost: Sequence[int]) -> None:
        """Each request of a run has its share of the run's time; wasted is what no answer came of, or will come of.
        lost: those of which none will."""
        share_s, wasted = (run.end_ns - run.begin_ns) / 1e9 / len(start.work), 0
        for work in start.work:
            ticket = self._tickets.get(work.job)
            if ticket is None or failed or work.job in lost:
                wasted += 1
            else:
                ticket.device_s += share_s
        self.metrics.observe_run(share_s * len(start.work), share_s * wasted)

    def _answer(self, ticket: Ticket, committed_ns: int) -> None:
        task, info, served, ticket.committed_ns = ticket.task, self.info, self.served, committed_ns
        if ticket.predicted_ns is not None:
            self.metrics.observe_forecast((committed_ns - ticket.predicted_ns) / 1e9)
        if ticket.compare is not None:
            return ticket.compare(task)
        if isinstance(task.request, Prefill):
            (kept, _), usage = served.foreseen(task, committed_ns) or (False, 0), task.usage
            self._hinted(ticket, committed_ns, kept, usage.cached_tokens, usage.computed_tokens)
            return None
        try:
            items = served.items(task)
            explained = served.explain(task) if task.request.explain else UNSET
        except Exception as error:
            self._tickets[ticket.job_id] = ticket
            return self._fail([ticket.job_id], error)
        timing = self.metrics.observe_answer(task.kind, ticket, self.clock(), task.usage)
        answer = Answer(
            id=ticket.request_id,
            model=info.version,
            catalog_version=info.catalog_version,
            normalize=served.normalize,
            items=items,
            usage=task.usage,
            timing_ms=timing,
            explain=explained,
        )
        if served.compares and (task.usage.cached_tokens or task.usage.full_recompute is True):
            self._shadow(task)
        if not ticket.answer.done():
            ticket.answer.set_result(answer)

    def _hinted(self, ticket: Ticket, now_ns: int, kept: bool, cached: int, computed: int = 0) -> Ticket:
        """A hint ends. cached, computed: its user's tokens."""
        info, ticket.committed_ns = self.info, now_ns
        self.metrics.hints["not_kept" if not kept else "computed" if computed else "kept"].inc()
        if not ticket.answer.done():
            ticket.answer.set_result(ticket.prefilled(info, kept, computed, cached))
        return ticket

    def _shadow(self, task: Any) -> None:
        """Compute a share of what was reused again, while nobody waits."""
        now_ns = self.clock()
        if not self._policy.shadow(now_ns):
            return
        for again, compare in self.served.shadows(task):
            job: Job = replace(self.served.job(again, next(self._job_ids), now_ns, None), priority="batch")
            if not isinstance(self._policy.submit(job, now_ns), Rejected):
                nobody = self._loop.create_future()
                self._tickets[job.id] = Ticket(job.id, "", again, nobody, now_ns, now_ns, compare=compare)
                self._pump_soon()

    def _fail(self, job_ids: Sequence[int], error: Exception) -> None:
        """A run broke: the log tells, each of its requests has an error, and the engine goes on."""
        self.metrics.executor_failures.inc()
        waited = (self._tickets[job_id] for job_id in job_ids if job_id in self._tickets)
        self._failures.tell(error, ", ".join(t.request_id for t in waited if t.compare is None))
        self._end(job_ids, partial(failures.answer, error))

    def _expire(self, job_ids: Sequence[int]) -> None:
        self.metrics.deadline_expired.inc(len(job_ids))
        for ticket in [self._tickets[job_id] for job_id in job_ids]:
            if ticket.predicted_ns is not None:  # it would have ended later still
                self.metrics.observe_forecast((self.clock() - ticket.predicted_ns) / 1e9)
            self._end([ticket.job_id], partial(failures.late, ticket.deadline_ns, self.clock()))

    def _end(self, job_ids: Sequence[int], error: Callable[[], Exception]) -> None:
        """Live requests end without an answer, each with an error of its own."""
        for job_id in job_ids:
            ticket = self._tickets.pop(job_id)
            self.metrics.observe_waste(ticket.device_s)
            if ticket.fetching is not None:
                ticket.fetching.cancel()
            if ticket.compare is None and not ticket.answer.done():
                ticket.answer.set_exception(cause := error())
                if not isinstance(cause, ClientGone):
                    self.served.lost(ticket.task.request)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._drained and not (self._drained.done() or self._tickets or self._policy.in_flight):
            self._drained.set_result(None)


AnyEngine = Engine[Any]
