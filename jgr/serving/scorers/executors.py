# SPDX-License-Identifier: Apache-2.0
"""FLAME's executors on JAX: compiled sizes, buffers of their own, one thread each (FLAME-6, 10, 14).

The one idea: an executor does one part of one request at a time, from beginning to end: it writes the part into its
staging buffer, sends that in one transfer, runs its compiled program and reads the scores, all in its own thread. So
parts run at once, and nobody waits for a device under a lock. Scores go to an array that the next run is given back for
good (donation); inputs to the staging buffer: after warm-up a run allocates nothing that grows with the traffic.

What a user's part is computed for decides which programs there are. `part`: every part computes it (FLAME as
published). `request`: an executor of size READS computes it once, and the parts read its arrays (M-FALCON, MODEL-13);
or a part does that is all of its request, which saves the arrays' way through memory.
`cache`: such an executor also keeps it in cells of the pool (`StateView`), or fetches it from there, or computes it
from what is there of the user when the history was shorter.

A run that raises leaves its executor with new buffers, as at the start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import Layout, Staging
from jgr.cache.entries import Stored
from jgr.cache.pool import StateView
from jgr.features import numa
from jgr.features.schema import Schema
from jgr.models.params import PyTree
from jgr.models.scorers import Needs, ScorerConfig, growing, scorer
from jgr.serving.engine.compilation import preparing
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.threads import Calls
from jgr.serving.policies.orchestration import READS
from jgr.serving.scorers.user_block import new_block, part_layout, read_candidates, read_users, user_layout

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
Share = Literal["part", "request", "cache"]

TIMED_RUNS = 3
"""Of each size at warm-up; the fastest is what it costs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReadWork:
    """A user's part. block: see user_block. place: where it is in the pool, or is to be kept; None: nowhere.

    before: where that of the user with fewer events is.
    """

    block: UInt8
    place: Stored | None = None
    before: Stored | None = None


@dataclass(frozen=True, eq=False)
class PartWork:
    """Candidates to score. rows: [c] int32, c <= the executor's size. records: [c] of the schema, where there is one.

    user: the block, where the part is to compute the user's too; else the state that a ReadWork gave.
    """

    rows: Int32
    user: Any
    records: npt.NDArray[np.void] | None = None


class Read(NamedTuple):
    """A user's part on the device. cached: it came from the pool, or some of it. kept: it is there now."""

    state: PyTree
    cached: Literal["all", "before", "nothing"]
    kept: bool


@dataclass(frozen=True, eq=False)
class Ran:
    """How a run ended. value: a Read, or scores [c, P] float32; None where `error` is set. Times: the clock's, ns."""

    value: Any
    error: Exception | None
    start_ns: int
    end_ns: int


class PartExecutors(Protocol):
    """What the engine needs of executors."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each executor, by its number."""

    @property
    def costs(self) -> Mapping[int, float]:
        """Of a run, in s, by size; before `start` in another unit, and not of READS."""

    @property
    def whole(self) -> Mapping[int, float]:
        """Of a part that computes the user too, where others do not; empty where none may, and before `start`."""

    @property
    def states(self) -> StateView | None:
        """Those in the pool; None where nothing is cached."""

    async def start(self, progress: Progress) -> None:
        """Compile everything; `progress` is called in another thread. Raises what that raises."""

    def run(self, executor: int, work: ReadWork | PartWork, done: Callable[[Ran], None]) -> None:
        """Run it on an executor that is idle; `done` is called on the event loop of `start`."""

    def stop(self) -> None:
        """End the threads once what runs is done."""

    def join(self, timeout_s: float) -> bool:
        """Wait for their end. False where the device still holds one."""


class Programs:
    """The compiled programs of a ranker, for any number of executors; made by `compile`.

    sizes: ascending. schema: of the features' records; None: the model reads none. growth: events by which a kept user
    may have grown, only for `cache`; HistoryIsWhole where the model's users cannot.
    """

    def __init__(
        self,
        cfg: ScorerConfig,
        params: PyTree,
        sizes: Sequence[int],
        share: Share,
        schema: Schema | None,
        growth: int = 0,
    ) -> None:
        self._model, self._cfg, self.params = scorer(cfg), cfg, params
        self.needs: Needs = self._model.needs(cfg)
        self.sizes, self.share, self.schema = tuple(sizes), share, schema
        self.user = user_layout(self.needs)
        block = None if share == "cache" else self.user
        self.layouts: dict[int, Layout] = {} if share == "part" else {READS: self.user}
        self.layouts |= {size: part_layout(block, schema, size) for size in self.sizes}
        # A part with its user in it, of executors that share users otherwise.
        self.may_be_whole = share == "request"
        self.growth, self._growing = growth, growing(cfg) if growth else None
        words = jax.ShapeDtypeStruct((self.user.size // 4,), np.uint32)
        self.kept: PyTree = jax.eval_shape(self._read, words, params)
        self._compiled: dict[int, jax.stages.Compiled] = {}
        self._whole: dict[int, jax.stages.Compiled] = {}
        self._grow: jax.stages.Compiled

    @property
    def to_compile(self) -> int:
        """Sizes without a program."""
        return len(self.layouts) - len(self._compiled)

    def __getitem__(self, size: int) -> jax.stages.Compiled:
        """program(words, params, state, out) -> scores [1, m, P]; of READS: program(words, params) -> kept."""
        return self._compiled[size]

    def whole(self, size: int) -> jax.stages.Compiled:
        """program(words, params, None, out) -> scores, of parts that compute the user too; compiled with the size."""
        return self._whole[size]

    @property
    def grow(self) -> jax.stages.Compiled:
        """grow(words, params, kept) -> kept; where there is growth, compiled with READS."""
        return self._grow

    def state(self, kept: PyTree) -> PyTree:
        """What parts are given of what is kept of a user, on the device or as shapes."""
        return kept if self._growing is None else self._growing.state(kept)

    def default_records(self, count: int) -> npt.NDArray[np.void] | None:
        """[count] records of items whose features are not there; None where the model reads none."""
        schema = self.schema
        return None if schema is None else np.frombuffer(schema.default * count, schema.dtype)

    def out_shape(self, size: int) -> tuple[int, int, int]:
        """Of the scores."""
        return 1, size, len(self.needs.tasks)

    def compile(self, size: int) -> jax.stages.Compiled:
        """The program of a size, compiled once; its memory_analysis shows that the scores are written in place."""
        if size in self._compiled:
            return self._compiled[size]
        if size == READS:
            words = Staging(self.user).example
            program = jax.jit(self._read).lower(words, self.params).compile()
            if self._growing is not None:
                self._grow = jax.jit(self._grown).lower(words, self.params, self.kept).compile()
        else:
            state = None if self.share == "part" else self.state(self.kept)
            program = self._compile(size, state)
            if self.may_be_whole:
                self._whole[size] = self._compile(size, None)
        self._compiled[size] = program
        return program

    def _compile(self, size: int, state: PyTree) -> jax.stages.Compiled:
        """A part's program; without a state it computes the user."""
        layout = self.layouts[size]
        words, out = Staging(layout).example, jax.ShapeDtypeStruct(self.out_shape(size), np.float32)
        call = jax.jit(partial(self._score, layout), donate_argnums=3, keep_unused=True)
        return call.lower(words, self.params, state, out).compile()

    def _read(self, words: jax.Array, params: PyTree) -> PyTree:
        users = read_users(self.user, self.needs, words)
        model = self._model.read if self._growing is None else self._growing.begin
        return model(params, self._cfg, users)

    def _grown(self, words: jax.Array, params: PyTree, kept: PyTree) -> PyTree:
        assert self._growing is not None
        users = read_users(self.user, self.needs, words)
        return self._growing.grow(params, self._cfg, kept, users, self.growth)

    def _score(
        self, layout: Layout, words: jax.Array, params: PyTree, state: PyTree, out: jax.Array
    ) -> jax.Array:
        inputs = layout.unpack(words)
        if state is None:
            state = self._read(inputs["user"], params)
        asked = read_candidates(inputs, self.needs, self.schema)
        return self._model.score(params, self._cfg, state, asked)


class Executor:
    """One size's program with buffers of its own. Not thread-safe: its thread alone calls `run`."""

    def __init__(self, programs: Programs, size: int, states: StateView | None) -> None:
        self.size, self._programs, self._states = size, programs, states
        self.reset()

    def reset(self) -> None:
        """New buffers, whatever the last run did to the old ones."""
        self._staging = Staging(self._programs.layouts[self.size])
        if self.size != READS:
            self._out = jnp.zeros(self._programs.out_shape(self.size))

    def run(self, work: ReadWork | PartWork) -> Any:
        """A Read, or scores [c, P]; blocks until the device is done."""
        try:
            return self._read(work) if isinstance(work, ReadWork) else self._score(work)
        except Exception:
            self.reset()
            raise

    def _read(self, work: ReadWork) -> Read:
        place, states, programs = work.place, self._states, self._programs
        found = None
        if states is not None and place is not None:
            at = work.before if place.new else place
            found = None if at is None else states.load(at)
            if found is not None and not place.new:
                return Read(programs.state(found), "all", True)
        views, given = self._staging.views(), programs.user.views(work.block)
        for name, view in views.items():
            view[:] = given[name]
        if found is None:
            kept = self._staging.run(programs[READS], programs.params)
        else:
            kept = self._staging.run(programs.grow, programs.params, found)
        stored = place is not None and states is not None and place.new and states.store(kept, place)
        cached: Literal["before", "nothing"] = "nothing" if found is None else "before"
        return Read(jax.block_until_ready(programs.state(kept)), cached, stored)

    def _score(self, work: PartWork) -> Float32:
        count, programs, whole = len(work.rows), self._programs, isinstance(work.user, np.ndarray)
        views = self._staging.views()
        views["candidates"][:count], views["candidates"][count:] = work.rows, -1
        if work.records is not None:
            views["records"][:count] = work.records.view(np.uint32).reshape(count, -1)
        if whole:
            views["user"][:] = work.user.view(np.uint32)
        program = programs.whole(self.size) if whole and programs.may_be_whole else programs[self.size]
        self._out = self._staging.run(program, programs.params, None if whole else work.user, self._out)
        scores: Float32 = np.asarray(self._out)[0, :count].copy()  # the next run is given the array
        return scores


class ScorerExecutors:
    """The executors of one engine, `number` of each size, each with a thread.

    states: for `cache`. bind: threads to the accelerator's NUMA node (FLAME-5).
    """

    def __init__(
        self,
        programs: Programs,
        number: int,
        states: StateView | None = None,
        *,
        bind: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.programs, self.states, self._bind, self._clock = programs, states, bind, clock
        self.sizes = tuple(size for size in programs.layouts for _ in range(number))
        self.costs: Mapping[int, float] = {size: float(size) for size in programs.sizes}
        self.whole: Mapping[int, float] = {}
        self._executors: list[Executor] = []
        self._threads = [Calls(f"jgr-executor-{at}") for at in range(len(self.sizes))]

    @property
    def buffer_bytes(self) -> int:
        """Of all executors' inputs and scores."""
        outs = (4 * math.prod(self.programs.out_shape(size)) for size in self.sizes if size != READS)
        return sum(self.programs.layouts[size].size for size in self.sizes) + sum(outs)

    async def start(self, progress: Progress) -> None:
        """See PartExecutors."""
        for thread in self._threads:
            thread.start()
            if self._bind:
                thread.call(_bind)
        await self._threads[0].warm_up(self._warm_up, progress)

    @preparing()
    def _warm_up(self, progress: Progress) -> None:
        """Compile every size, make the executors with their buffers, run each, and time the sizes."""
        programs = self.programs
        costs, parts, whole = (dict[int, float]() for _ in range(3))
        user: Any
        block, views = new_block(programs.user)
        user = block
        views["rows"][:] = 0  # a full history: attention may skip what is not there
        if self.states is not None:
            self.states.compile()
        for done, size in enumerate(programs.layouts, 1):
            programs.compile(size)
            own = [Executor(programs, size, self.states) for each in self.sizes if each == size]
            self._executors += own
            if size == READS:
                costs[READS] = _cost(own, ReadWork(block), {})
                user = own[0].run(ReadWork(block)).state
            else:
                work = PartWork(np.zeros(size, np.int32), user, programs.default_records(size))
                parts[size] = _cost(own, work, parts)
                if programs.may_be_whole:
                    whole[size] = _cost(own, replace(work, user=block), whole)
            progress(done, len(programs.layouts), f"{size} candidates" if size else "the user")
        self.costs, self.whole = costs | parts, whole
        _log.info("a part of so many candidates (0: the user) takes so many ms: %s", _shown(self.costs))
        if whole:
            _log.info("and with the user: %s", _shown(whole))

    def run(self, executor: int, work: ReadWork | PartWork, done: Callable[[Ran], None]) -> None:
        """See PartExecutors."""
        self._threads[executor].call(partial(self._run, executor, work, done))

    def _run(self, executor: int, work: ReadWork | PartWork, done: Callable[[Ran], None]) -> None:
        start_ns, value, error = self._clock(), None, None
        try:
            value = self._executors[executor].run(work)
        except Exception as cause:
            error = cause
        self._threads[executor].post(partial(done, Ran(value, error, start_ns, self._clock())))

    def stop(self) -> None:
        """See PartExecutors."""
        for thread in self._threads:
            thread.stop()

    def join(self, timeout_s: float) -> bool:
        """See PartExecutors; for each so long."""
        return all([thread.join(timeout_s) for thread in self._threads])


def _bind() -> None:
    numa.bind_thread()


def _cost(executors: Sequence[Executor], work: ReadWork | PartWork, smaller: Mapping[int, float]) -> float:
    """Seconds of the fastest of some runs; the first may be slow. smaller: what smaller parts cost, and this at least:
    where less was measured, that is noise."""
    seconds = []
    for executor in executors:
        for _ in range(1 + TIMED_RUNS):
            start = time.perf_counter()
            executor.run(work)
            seconds.append(time.perf_counter() - start)
    return max([min(seconds), *smaller.values()])


def _shown(costs: Mapping[int, float]) -> str:
    return ", ".join(f"{size}: {seconds * 1e3:.3g}" for size, seconds in costs.items())
