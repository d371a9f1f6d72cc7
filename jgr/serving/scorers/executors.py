# SPDX-License-Identifier: Apache-2.0
"""FLAME's executors on JAX: compiled sizes, buffers of their own, one thread each (FLAME-6, 10, 14).

The one idea: an executor does one part of one request at a time, from beginning to end: it writes the part into its
staging buffer, sends that in one transfer, runs its compiled program and reads the scores, all in its own thread. So
parts run at once, and nobody waits for a device under a lock. Scores are written to an array that the next run gets
back (donation), inputs to the staging buffer, so after the warm-up a run allocates nothing that grows with the traffic.

How often a user's part is computed decides which programs there are (`share`). "part": every part computes it (FLAME as
published). "request": an executor of size USER_PART computes it once, and the parts read its arrays (M-FALCON,
MODEL-13); where a request has a single part, that part may compute the user itself, which saves the arrays' way through
memory. "cache": the executor of size USER_PART also keeps the user in cells of the pool (`StateView`), fetches it from
there, or computes it from what was kept when the history was shorter. What depends on the moment of the request is
never kept: where there is any, another program makes the state of what is kept (`scorers.keeping`).

A run that raises leaves its executor with new buffers, as at the start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import ALIGNMENT, BufferLayout
from jgr.cache.entries import Stored
from jgr.cache.pool import StateView
from jgr.features import numa
from jgr.features.schema import Schema
from jgr.models import scorers
from jgr.models.climber_layers import Build
from jgr.models.devices import ONE, Devices
from jgr.models.params import PyTree
from jgr.models.scorers import Needs, ScorerConfig, growing, keeping
from jgr.ops import split
from jgr.serving.engine.compilation import check_scores, compiled, preparing, telling
from jgr.serving.engine.contract import Executors, Progress
from jgr.serving.policies.jobs import Start
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.scorers.user_block import new_block, part_layout, read_candidates, read_users, user_layout

T = TypeVar("T")

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
Share = Literal["part", "request", "cache"]
Program = Callable[..., Any]
"""A compiled program, or a plain function that dispatches its operations one by one."""

TIMED_ROUNDS, TIMED_S = 3, 0.01
"""At warm-up each size is timed in so many rounds, or as many as take so long; its fastest run is its cost."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReadWork:
    """A user's part to be computed or fetched. block: see user_block.

    place: where the part stands in the pool, or is to be kept; None: it is not kept. before: where the part of the same
    user with fewer events stands, from which it can be computed; None: nowhere.
    """

    block: UInt8
    place: Stored | None = None
    before: Stored | None = None


@dataclass(frozen=True, eq=False)
class PartWork:
    """Candidates to score. rows: [c] int32, with c at most the executor's size.

    user: the user's block where this part is to compute the user as well; else the state that a ReadWork gave. records:
    [c] feature records of the schema; None where there is none.
    """

    rows: Int32
    user: Any
    records: npt.NDArray[np.void] | None = None


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


class Programs:
    """The programs of a scorer, for any number of executors; made by `compile`.

    sizes: candidates of a part, ascending. share: how often a user's part is computed. schema: of the features'
    records; None: the model reads none. growth: the most events by which a kept user may have grown, only for `cache`.
    build: see climber_layers.Build (FLAME-7); the programs of "op_by_op" are plain functions, which dispatch one
    operation after the other. Raises HistoryIsWhole where the model's users cannot grow, ConfigError where it has no
    such build. devices: those that share the model; all else than its items is whole on each of them.
    """

    def __init__(
        self,
        cfg: ScorerConfig,
        params: PyTree,
        sizes: Sequence[int],
        share: Share,
        schema: Schema | None,
        growth: int = 0,
        build: Build = "fused",
        devices: Devices = ONE,
    ) -> None:
        self.items, self.devices = cfg.n_items, devices
        self._model, self._cfg, self._build = scorers.scorer(cfg, build), cfg, build
        self.params = params = scorers.as_built(params, build)
        self.needs: Needs = self._model.needs(cfg)
        self.sizes, self.share, self.schema = tuple(sizes), share, schema
        self.user = user_layout(self.needs)
        block = None if share == "cache" else self.user
        self.layouts: dict[int, BufferLayout] = {} if share == "part" else {USER_PART: self.user}
        self.layouts |= {size: part_layout(block, schema, size) for size in self.sizes}
        # A part with its user in it, of executors that share users otherwise.
        self.may_be_whole = share == "request"
        kept = keeping(cfg, build) if share == "cache" else None
        self.growth, self._keeping = growth, growing(cfg) if growth else kept
        words = jax.ShapeDtypeStruct((self.user.size // 4,), np.uint32)
        self.kept: PyTree = jax.eval_shape(self._read, words, params)
        self._state: PyTree = self.kept  # shapes, as those of what is kept
        if self._keeping is not None:
            self._state = jax.eval_shape(self._renewed, words, params, self.kept)
        self._compiled: dict[int, Program] = {}
        self._whole: dict[int, Program] = {}
        self._grow: Program
        self.renew: Program | None = None
        """renew(words, params, kept) -> state, compiled with USER_PART; takes `kept` for good. None: state is kept."""

    def __getitem__(self, size: int) -> Program:
        """The program of a size: (words, params, state, out) -> scores [1, m, P]; of USER_PART: (words, params) ->
        kept."""
        return self._compiled[size]

    def whole(self, size: int) -> Program:
        """The program of a part that computes the user too: (words, params, None, out) -> scores; compiled with the
        size."""
        return self._whole[size]

    @property
    def grow(self) -> Program:
        """The program that adds events to a kept user: (words, params, kept) -> kept; compiled with USER_PART."""
        return self._grow

    def default_records(self, count: int) -> npt.NDArray[np.void] | None:
        """Records [count] for items whose features are not there; None where the model reads none."""
        schema = self.schema
        return None if schema is None else np.frombuffer(schema.default * count, schema.dtype)

    def out_shape(self, size: int) -> tuple[int, int, int]:
        """The shape of a run's scores, [1, m, P]."""
        return 1, size, len(self.needs.tasks)

    def compile(self, size: int) -> Program:
        """The program of a size, made once; its memory_analysis shows that the scores are written in place."""
        if size in self._compiled:
            return self._compiled[size]
        if size == USER_PART:
            words = Staging(self.user, self.devices).example
            program = self._make("read", self._read, words, self.params)
            if self.growth:
                self._grow = self._make("grow", self._grown, words, self.params, self.kept)
            if self._keeping is not None:
                # Keys and values are most of either, or are not in the state at all.
                given = (2,) if _shapes(self.kept) <= _shapes(self._state) else ()
                self.renew = self._make("renew", self._renewed, words, self.params, self.kept, donate=given)
        else:
            state = None if self.share == "part" else jax.tree.map(self._placed, self._state)
            program = self._compile(size, state)
            if self.may_be_whole:
                self._whole[size] = self._compile(size, None)
        self._compiled[size] = program
        return program

    def _compile(self, size: int, state: PyTree) -> Program:
        """A part's program; without a state it computes the user."""
        layout = self.layouts[size]
        words = Staging(layout, self.devices).example
        out = self._placed(jax.ShapeDtypeStruct(self.out_shape(size), np.float32))
        return self._make(
            f"score {size}", partial(self._score, layout), words, self.params, state, out, donate=(3,)
        )

    def _placed(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if self.devices.count == 1:
            return shape
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self.devices.everywhere)

    def _make(self, name: str, call: Program, *arguments: Any, donate: tuple[int, ...] = ()) -> Program:
        if self._build == "op_by_op":
            return call
        # All that `call` takes from this object, so that a reload finds the programs of the weights before it.
        key = name, self._cfg, self._build, self.share, self.schema, self.growth
        return compiled(call, *arguments, key=key, donate=donate, keep_unused=True)

    def _read(self, words: jax.Array, params: PyTree) -> PyTree:
        users = read_users(self.user, self.needs, words)
        model = self._model.read if self._keeping is None else self._keeping.begin
        return split.everywhere(model(params, self._cfg, users))

    def _grown(self, words: jax.Array, params: PyTree, kept: PyTree) -> PyTree:
        users = read_users(self.user, self.needs, words)
        return growing(self._cfg).grow(params, self._cfg, kept, users, self.growth)

    def _renewed(self, words: jax.Array, params: PyTree, kept: PyTree) -> PyTree:
        assert self._keeping is not None
        return self._keeping.state(params, self._cfg, kept, read_users(self.user, self.needs, words))

    def _score(
        self, layout: BufferLayout, words: jax.Array, params: PyTree, state: PyTree, out: jax.Array
    ) -> jax.Array:
        inputs = layout.unpack(words)
        asked = read_candidates(inputs, self.needs, self.schema)
        if state is None:
            users = read_users(self.user, self.needs, inputs["user"])
            return split.everywhere(scorers.rank(self._model, params, self._cfg, users, asked))
        return split.everywhere(self._model.score(params, self._cfg, state, asked))


class Staging:
    """One executor's buffer: the host writes it, it goes to the device in one piece, and it is written again.

    A transfer may go on after the call that started it, and on a CPU the program reads the buffer itself. So a program
    owns the buffer until its outputs are ready, and `views` waits for them.

    devices: where the programs run. memory_kind: the kind of memory from which the device reads the
    words; None: page-locked host memory, except on a CPU, which does not need it. The thread that writes the buffer
    must create it, after it was bound to a NUMA node, so that the memory is near (FLAME-5).
    """

    def __init__(self, layout: BufferLayout, devices: Devices = ONE, memory_kind: str | None = None) -> None:
        self._devices, self._memory = devices, devices.everywhere
        device: jax.Device = next(iter(self._memory.device_set))
        has = {memory.kind for memory in device.addressable_memories()}
        if memory_kind is None and device.platform != "cpu" and "pinned_host" in has:
            memory_kind = "pinned_host"
        self._pinned = memory_kind is not None
        if memory_kind is not None:
            self._memory = self._memory.with_memory_kind(memory_kind)
        room = np.zeros(layout.size + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self._buffer = room[start : start + layout.size]
        self._words = self._buffer.view(np.uint32)
        self._views = layout.views(self._buffer)
        self._reader: Any = ()

    def views(self) -> dict[str, npt.NDArray[Any]]:
        """Each input by its name, writable; waits until the last program has read the buffer."""
        jax.block_until_ready(self._reader)
        return self._views

    def write(self, content: npt.NDArray[np.uint8]) -> None:
        """All inputs at once: [size] uint8, laid out alike. Waits as `views` does."""
        jax.block_until_ready(self._reader)
        self._buffer[:] = content

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The shape, dtype and placement of the words, for which a program's first argument is compiled."""
        return jax.ShapeDtypeStruct(self._words.shape, jnp.uint32, sharding=self._memory)

    def run(self, program: Callable[..., T], *others: Any) -> T:
        """Start program(words, *others) and return its outputs, which the next call of `views` waits for."""
        # A compiled program takes a NumPy array to its device faster than device_put does.
        words = jax.device_put(self._words, self._memory) if self._pinned else self._words
        with self._devices.turn():
            out = program(words, *others)
        self._reader = out
        return out


class Executor:
    """One size's program with buffers of its own. Not thread-safe: its thread alone calls `run`."""

    def __init__(self, programs: Programs, size: int, states: StateView | None) -> None:
        self.size, self._programs, self._states = size, programs, states
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
        try:
            return self._read(work) if isinstance(work, ReadWork) else self._score(work)
        except Exception:
            self.reset()
            raise

    def collect(self, work: ReadWork | PartWork, pending: Any) -> Any:
        """Wait for the device: a Read, or scores [c, P]."""
        try:
            if isinstance(work, ReadWork):
                return jax.block_until_ready(pending)
            return np.asarray(pending)[0, : len(work.rows)].copy()  # the next run is given the array
        except Exception:
            self.reset()
            raise

    def _read(self, work: ReadWork) -> Read:
        place, states, programs = work.place, self._states, self._programs
        new, found = place is not None and place.new, None
        if states is not None and place is not None:
            at = work.before if new else place
            found = None if at is None else states.load(at)
        if found is None or new or programs.renew is not None:  # else nothing is to be computed
            self._staging.write(work.block)
        cached: Literal["all", "before", "nothing"] = "before" if new else "all"
        if found is None:
            kept, cached = self._staging.run(programs[USER_PART], programs.params), "nothing"
        else:
            kept = self._staging.run(programs.grow, programs.params, found) if new else found
        stored = cached == "all"
        if new and states is not None and place is not None:
            stored = states.store(kept, place)
        state = kept if programs.renew is None else self._staging.run(programs.renew, programs.params, kept)
        return Read(state, cached, stored)

    def _score(self, work: PartWork) -> jax.Array:
        count, programs, whole = len(work.rows), self._programs, isinstance(work.user, np.ndarray)
        program = programs.whole(self.size) if whole and programs.may_be_whole else programs[self.size]
        views = self._staging.views()
        views["candidates"][:count], views["candidates"][count:] = work.rows, -1
        if work.records is not None:
            views["records"][:count] = work.records.view(np.uint32).reshape(count, -1)
        if whole:
            views["user"][:] = work.user.view(np.uint32)
        self._out = self._staging.run(program, programs.params, None if whole else work.user, self._out)
        return self._out


class ScorerExecutors:
    """The executors of one engine, `number` of each size, each with a thread.

    states: the cells of kept users, for `cache`. bind: whether threads are bound to the accelerator's NUMA node
    (FLAME-5).
    """

    def __init__(
        self,
        programs: Programs,
        number: int,
        states: StateView | None = None,
        *,
        bind: bool = False,
    ) -> None:
        self.programs, self.states, self._bind = programs, states, bind
        self.sizes = tuple(size for size in programs.layouts for _ in range(number))
        self.costs: Mapping[int, float] = {size: float(size) for size in programs.sizes}
        self.whole: Mapping[int, float] = {}
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
        programs, trials = self.programs, dict[tuple[str, int], list[Callable[[], Any]]]()
        user: Any
        works: Mapping[str, ReadWork | PartWork]
        block, views = new_block(programs.user)
        user = block
        items = programs.items  # a full history: attention may skip what is not there
        views["rows"][:] = np.arange(len(views["rows"])) % items
        if self.states is not None:
            self.states.compile()
        progress(0, len(programs.layouts), "")
        for done, size in enumerate(programs.layouts, 1):
            programs.compile(size)
            own = [Executor(programs, size, self.states) for each in self.sizes if each == size]
            self._executors += own
            if size == USER_PART:
                works = {"part": ReadWork(block)}
                user = own[0].run(ReadWork(block)).state
            else:
                rows = np.arange(size, dtype=np.int32) % items
                part = PartWork(rows, user, programs.default_records(size))
                works = {"part": part}
                if programs.may_be_whole:
                    works = {"part": part, "whole": replace(part, user=block)}
                for work in works.values():
                    check_scores(f"rank of {size} candidates", own[0].run(work))
            for kind, work in works.items():
                trials[kind, size] = [partial(executor.run, work) for executor in own]
            progress(done, len(programs.layouts), f"{size} candidates" if size else "the user")
        seconds = fastest(trials)
        self.costs, self.whole = (
            rising({size: s for (of, size), s in seconds.items() if of == kind}) for kind in ("part", "whole")
        )
        _log.info("a part of so many candidates (0: the user) takes so many ms: %s", _shown(self.costs))
        if self.whole:
            _log.info("and with the user: %s", _shown(self.whole))

    def launch(self, start: Start, work: ReadWork | PartWork) -> tuple[ReadWork | PartWork, Any]:
        """See jgr.serving.engine.contract.Executors."""
        return work, self._executors[start.lane].launch(work)

    def collect(self, start: Start, pending: tuple[ReadWork | PartWork, Any]) -> list[Any]:
        """See jgr.serving.engine.contract.Executors."""
        return [self._executors[start.lane].collect(*pending)]


def _shapes(tree: PyTree) -> set[tuple[Any, Any]]:
    return {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)}


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
