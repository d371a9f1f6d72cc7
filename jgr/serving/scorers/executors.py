# SPDX-License-Identifier: Apache-2.0
"""FLAME's executors on JAX: compiled sizes, buffers of their own, one thread each (FLAME-6, 10, 14).

The one idea: an executor does one part of one request at a time, from beginning to end: it writes the part into its
staging buffer, sends that in one transfer, runs its compiled program and reads the scores, all in its own thread. So
parts run at once, and nobody waits for a device under a lock. Scores are written to an array that the next run gets
back (donation), inputs to the staging buffer, so after the warm-up a run allocates nothing that grows with the traffic.

How often a user's part is computed decides which programs there are (`share`). "part": every part computes it (FLAME as
published). "request": an executor of size USER_PART computes it once, and the parts read its arrays (M-FALCON,
MODEL-13); where a request has a single part, that part may compute the user itself, which saves the arrays' way through
memory. "cache": the executor of size USER_PART also keeps the user in cells of the pool (`UserView`), fetches it from
there, or computes it from what was kept when the history was shorter. What depends on the moment of the request is
never kept: where there is any, another program makes the state of what is kept (`scorers.keeping`).

A run that raises leaves its executor with new buffers, as at the start. If it was given rows from the pool, it also
loses the pool: nobody waits for what writes rows, so who reads them finds out that it failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.embeddings import EmbeddingCache
from jgr.cache.entries import Stored
from jgr.cache.pool import PoolLost, UserView
from jgr.features import numa
from jgr.features.memory import MISSING
from jgr.features.paged import PagedRecords
from jgr.models import tables
from jgr.models.params import PyTree
from jgr.serving.engine.compilation import check_scores, preparing, telling
from jgr.serving.engine.contract import Executors, Progress
from jgr.serving.policies.jobs import Start
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.scorers.programs import Program as Program
from jgr.serving.scorers.programs import Programs as Programs
from jgr.serving.scorers.programs import Share as Share
from jgr.serving.scorers.programs import Staging as Staging
from jgr.serving.scorers.user_block import new_block

T = TypeVar("T")

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

TIMED_ROUNDS, TIMED_S = 3, 0.01
"""At warm-up each size is timed in so many rounds, or as many as take so long; its fastest run is its cost."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReadWork:
    """A user's part to be computed or fetched. block: see user_block.

    place: where the part stands in the pool, or is to be kept; None: it is not kept. before: where the part of the same
    user with fewer events stands, from which it can be computed, in the same cells; None: nowhere.
    """

    block: UInt8
    place: Stored | None = None
    before: Stored | None = None


@dataclass(frozen=True, eq=False)
class PartWork:
    """Candidates to score. rows: [c] int32, with c at most the executor's size.

    user: the user's block where this part is to compute the user as well; else the state that a ReadWork gave. records:
    [c] feature records of the schema; None where there is none. found: [c] their states, see `Features`, where records
    are in pages of the pool: the run writes to both what it must ask the store for again. ages: [c] int32, see
    `models.scorers.Candidates`; None: no candidate is in the history, or the model does not read them.
    """

    rows: Int32
    user: Any
    records: npt.NDArray[np.void] | None = None
    found: UInt8 | None = None
    ages: Int32 | None = None


class Read(NamedTuple):
    """A user's part on the device. cached: how much of it came from the pool. kept: whether it is in the pool now."""

    state: PyTree
    cached: Literal["all", "before", "nothing"]
    kept: bool


class PartExecutors(Executors, Protocol):
    """Executors of parts, one on each lane."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The compiled size of each executor, by its lane's number."""

    @property
    def costs(self) -> Mapping[int, float]:
        """Seconds of a run, by size. Before the warm-up: in another unit, and without USER_PART."""

    @property
    def whole(self) -> Mapping[int, float]:
        """Seconds of a part that computes the user too, by size, where other parts do not.

        Empty where no part may do so, and before the warm-up.
        """

    @property
    def shorter(self) -> Mapping[int, Mapping[int, float]]:
        """The same as `costs` of users of at most so many events, ascending, where these have programs of their own.

        Empty before the warm-up.
        """


class Executor:
    """One size's program with buffers of its own. Not thread-safe: its thread alone calls `run`.

    embeddings: where the rows are gathered that each run is given; None: they are among the parameters. records: where
    those of candidates are gathered; None: they are in the part's buffer.
    """

    def __init__(
        self,
        programs: Programs,
        size: int,
        states: UserView | None,
        embeddings: EmbeddingCache | None = None,
        records: PagedRecords | None = None,
    ) -> None:
        self.size, self._programs, self._states, self._embeddings = size, programs, states, embeddings
        self._records = records
        self._epoch: int | None = None
        """The pool's when the run's rows were read from it, if it has come so far."""
        self.reset()

    def reset(self) -> None:
        """Take new buffers, since a run that failed may have spoilt the old ones."""
        devices = self._programs.devices
        self._staging = Staging(self._programs.layouts[self.size], devices)
        if self.size != USER_PART:
            self._out: jax.Array = devices.place(jnp.zeros(self._programs.out_shape(self.size)))

    def run(self, work: ReadWork | PartWork) -> Any:
        """A Read, or scores [c, P]: `launch`, and then `collect`."""
        return self.collect(work, self.launch(work))

    def launch(self, work: ReadWork | PartWork) -> Any:
        """Hand the work to the device, without waiting for it. Returns what `collect` takes."""
        self._epoch = None
        try:
            return self._read(work) if isinstance(work, ReadWork) else self._score(work)
        except Exception as error:
            self._failed(error)
            raise

    def collect(self, work: ReadWork | PartWork, pending: Any) -> Any:
        """Wait for the device: a Read, or scores [c, P]. PoolLost where the pool was lost since the run began: it can
        be run again."""
        try:
            if isinstance(work, ReadWork):
                return jax.block_until_ready(pending)
            return np.asarray(pending)[0, : len(work.rows)].copy()  # the next run is given the array
        except Exception as error:
            self._failed(error)
            raise

    def _failed(self, error: Exception) -> None:
        self.reset()
        epoch, self._epoch = self._epoch, None
        if self._embeddings is None or epoch is None:
            return
        if self._embeddings.pool.epoch != epoch:  # its rows were of a write that another run saw fail
            raise PoolLost("a run before this one failed, and the pool with it") from error
        self._embeddings.pool.lose(epoch, error)

    def _read(self, work: ReadWork) -> Read:
        place, states, window = work.place, self._states, self._programs.window(work.block)
        read, grow, renew = self._programs.user_part(window)
        params = partial(self._params, work.block, window.events)
        new = place is None or place.new
        at = work.before if new else place
        found = None if states is None or at is None else states.load(at, window.tokens)
        if found is None or new or renew is not None:  # else nothing is to be computed
            self._staging.write(work.block)
        cached: Literal["all", "before", "nothing"] = "before" if new else "all"
        kept = found
        if found is None:
            kept, cached = self._staging.run(read, params()), "nothing"
        elif new:
            assert grow is not None
            kept = self._staging.run(grow, params(), found)
        stored = cached == "all"
        if states is not None and place is not None and place.new:
            stored = states.store(kept, place)
        state = kept if renew is None else self._staging.run(renew, params(renews=True), kept)
        return Read(state, cached, stored)

    def _params(
        self, block: UInt8 | None, events: int, candidates: PartWork | None = None, *, renews: bool = False
    ) -> PyTree:
        """The parameters for a run that reads so many events of a user, candidates, or both.

        renews: see `scorers.renewing`.
        """
        programs, gathering = self._programs, self._programs.gathering
        if self._embeddings is None or gathering is None:
            return programs.params
        user = None if block is None else programs.user.views(block)
        if candidates is None:
            wanted = gathering.rows(user, events, renews=renews)
        else:
            wanted = gathering.rows(user, events, candidates.rows, candidates.records, self.size)
        epoch, self._epoch = self._embeddings.pool.epoch, None  # the pool isn't to blame for the source
        found = {name: self._embeddings.rows(name, rows) for name, rows in wanted.items()}
        self._epoch = epoch
        return tables.replaced(programs.params, found)

    def _score(self, work: PartWork) -> jax.Array:
        count, programs, whole = len(work.rows), self._programs, isinstance(work.user, np.ndarray)
        if whole:
            program = programs.whole(self.size) if programs.may_be_whole else programs[self.size]
        else:
            program = programs.part(self.size, work.user)
        views = self._staging.views()
        views["candidates"][:count], views["candidates"][count:] = work.rows, -1
        apart: tuple[jax.Array, ...] = ()
        if work.records is not None and self._records is not None:
            assert work.found is not None
            apart = (self._records.given(work.rows, work.records, work.found, self.size),)
        elif work.records is not None:
            views["records"][:count] = work.records.view(np.uint32).reshape(count, -1)
        if programs.needs.repeats:
            views["ages"][:] = -1
            if work.ages is not None:
                views["ages"][:count] = work.ages
        if whole:
            views["user"][:] = work.user.view(np.uint32)
        user = work.user if whole else None
        params = self._params(user, programs.needs.max_items, work)
        self._out = self._staging.run(program, params, None if whole else work.user, self._out, *apart)
        return self._out


class ScorerExecutors:
    """The executors of one engine, `number` of each size, each with a thread.

    states: the cells of kept users, for `cache`. embeddings, records: see `Executor`.
    bind: whether threads are bound to the accelerator's NUMA node
    (FLAME-5).
    """

    def __init__(
        self,
        programs: Programs,
        number: int,
        states: UserView | None = None,
        embeddings: EmbeddingCache | None = None,
        records: PagedRecords | None = None,
        *,
        bind: bool = False,
    ) -> None:
        self.programs, self.states, self._bind = programs, states, bind
        self.embeddings, self.records = embeddings, records
        self.sizes = tuple(size for size in programs.layouts for _ in range(number))
        self.costs: Mapping[int, float] = {size: float(size) for size in programs.sizes}
        self.whole: Mapping[int, float] = {}
        self.shorter: Mapping[int, Mapping[int, float]] = {}
        self._executors: list[Executor] = []

    in_flight = 1
    """An executor's buffers are for one run."""

    @property
    def lanes(self) -> int:
        return len(self.sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all executors' inputs and scores."""
        outs = (4 * math.prod(self.programs.out_shape(size)) for size in self.sizes if size != USER_PART)
        return sum(self.programs.layouts[size].size for size in self.sizes) + sum(outs)

    def bind(self) -> None:
        """See jgr.serving.engine.contract.Executors."""
        if self._bind:
            numa.bind_thread()

    @preparing()
    @telling()
    def warm_up(self, progress: Progress) -> None:
        """Compile every size, make the executors with their buffers, run each, and time the sizes.

        UserError where scores are no finite numbers.
        """
        programs, trials = self.programs, dict[tuple[str, int, int], list[Callable[[], Any]]]()
        users: dict[int, Any] = {window.events: self._full(window.events) for window in programs.windows}
        if self.states is not None:
            self.states.compile()
        if self.embeddings is not None:
            for name, counts in programs.counts.items():
                for count in counts:
                    self.embeddings.compile(name, count)
        if self.records is not None:
            for size in programs.sizes:
                self.records.compile(size)
        progress(0, len(programs.layouts), "")
        for done, size in enumerate(programs.layouts, 1):
            programs.compile(size)
            own = [
                Executor(programs, size, self.states, self.embeddings, self.records)
                for each in self.sizes
                if each == size
            ]
            self._executors += own
            if size == USER_PART:
                reads = {events: ReadWork(block) for events, block in users.items()}
                users = {events: own[0].run(work).state for events, work in reads.items()}
                works: dict[tuple[str, int], Any] = {("part", events): work for events, work in reads.items()}
            else:
                works = self._parts(size, users)
                for work in works.values():
                    check_scores(f"rank of {size} candidates", own[0].run(work))
            for (kind, events), work in works.items():
                trials[kind, events, size] = [partial(executor.run, work) for executor in own]
            progress(done, len(programs.layouts), f"{size} candidates" if size else "the user")
        self._keep_costs(fastest(trials))

    def _full(self, events: int) -> UInt8:
        """The block of a user with so many events: attention may skip those that are not there."""
        block, views = new_block(self.programs.user)
        views["rows"][:events] = np.arange(events) % self.programs.items
        return block

    def _parts(self, size: int, users: Mapping[int, Any]) -> dict[tuple[str, int], PartWork]:
        """Parts of a size to be timed, by their kind and the events of the user. users: states, or blocks."""
        programs, found = self.programs, dict[tuple[str, int], PartWork]()
        rows, records = np.arange(size, dtype=np.int32) % programs.items, programs.default_records(size)
        missing = np.full(size, MISSING, np.uint8) if programs.apart else None
        longest = max(users)
        for events, user in users.items():
            if events == longest or programs.forms > 1:  # else all lengths have the same program
                found["part", events] = PartWork(rows, user, records, missing)
        if programs.may_be_whole:
            found["whole", longest] = PartWork(rows, self._full(longest), records, missing)
        return found

    def _keep_costs(self, seconds: Mapping[tuple[str, int, int], float]) -> None:
        """Keep and log measured seconds of runs, by the run's kind, the user's events and the size."""
        longest = self.programs.windows[-1].events
        found = {
            (kind, events): rising({size: s for (*of, size), s in seconds.items() if of == [kind, events]})
            for kind, events, _ in seconds
        }
        self.costs, self.whole = found["part", longest], found.get(("whole", longest), {})
        shorter = [(events, own) for (kind, events), own in found.items() if kind == "part"]
        self.shorter = {events: {**self.costs, **own} for events, own in shorter if events < longest}
        _log.info("a part of so many candidates (0: the user) takes so many ms: %s", _shown(self.costs))
        for events, costs in self.shorter.items():
            _log.info("of a user of at most %d events: %s", events, _shown(costs))
        if self.whole:
            _log.info("and with the user: %s", _shown(self.whole))

    def launch(self, start: Start, work: ReadWork | PartWork) -> tuple[ReadWork | PartWork, Any]:
        """See jgr.serving.engine.contract.Executors."""
        return work, self._executors[start.lane].launch(work)

    def collect(self, start: Start, pending: tuple[ReadWork | PartWork, Any]) -> list[Any]:
        """See jgr.serving.engine.contract.Executors."""
        return [self._executors[start.lane].collect(*pending)]


def fastest(trials: Mapping[T, Sequence[Callable[[], object]]]) -> dict[T, float]:
    """Seconds of the fastest of each trial's calls.

    They go in rounds, since what slows the machine for a while must slow all of them alike: they are compared. The
    first round does not count.
    """
    found, rounds, begun_s = dict.fromkeys(trials, math.inf), 0, time.perf_counter()
    while rounds <= TIMED_ROUNDS or time.perf_counter() < begun_s + TIMED_S * len(trials):
        for name, calls in trials.items():
            for call in calls:
                start_s = time.perf_counter()
                call()
                if rounds:
                    found[name] = min(found[name], time.perf_counter() - start_s)
        rounds += 1
    return found


def rising(costs: Mapping[int, float]) -> dict[int, float]:
    """Costs by size, where no part costs more than a larger one: noise only adds. The user's part is as it is."""
    found, least = {}, math.inf
    for size in sorted(costs, reverse=True):
        least = costs[size] if size == USER_PART else min(least, costs[size])
        found[size] = least
    return dict(sorted(found.items()))


def _shown(costs: Mapping[int, float]) -> str:
    return ", ".join(f"{size}: {seconds * 1e3:.3g}" for size, seconds in costs.items())
