# SPDX-License-Identifier: Apache-2.0
"""The executor of plain batches, a row for each request: one compiled program per profile, called with padded arrays.

Every profile is lowered and compiled at start-up (DESIGN idea 4). A call pads the works into the profile's
arrays, dispatches once, and reads leaves and scores back. A compiled program refuses other shapes with a
TypeError, so nothing can recompile silently. The parameters and the catalog tables are arguments, never
constants of a program.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jgr.cache.buffers import ALIGNMENT, BufferLayout
from jgr.catalog.item_filters import NO_FILTER
from jgr.models import beam
from jgr.models.beam import CatalogTables, Filters, Normalize
from jgr.models.devices import ONE, Devices
from jgr.models.generators import GeneratorConfig, GeneratorParams, compiler_options
from jgr.models.quantize import kind_of
from jgr.models.replicated import ROWS, WHOLE, Replicated
from jgr.models.words import WORD
from jgr.ops import split
from jgr.serving.decoders.device_filters import DeviceFilters
from jgr.serving.decoders.work import (
    Outcome,
    Pending,
    RankOutcome,
    RankWork,
    RecommendOutcome,
    RecommendWork,
    SegmentsWork,
    Work,
)
from jgr.serving.engine.compilation import check_scores, compiled, preparing
from jgr.serving.engine.contract import Progress
from jgr.serving.policies.jobs import Profile

TIMED_RUNS = 3
"""Runs of each program at the warm-up whose median is its cost, where they are short."""
TIMED_S = 1.0
"""Seconds after which no further run of a program is timed: noise is small beside a long run, and a large model would
start late."""
FILTERS: Any = Filters(ROWS, ROWS, ROWS, ROWS, ROWS)._replace(segments=WHOLE)  # type: ignore[arg-type]
"""What devices that part a batch have of its filters."""
PROBED_TOKENS = 4
"""Tokens of each level that a probe's prompt has."""


@dataclass(frozen=True)
class TreeLayout:
    """How the arrays of a tree stand in a buffer; a static argument of the functions that read them."""

    buffer: BufferLayout
    tree: Any

    @classmethod
    def of(cls, example: Any) -> TreeLayout:
        """For trees like this one, of arrays of numbers of 1, 2 or 4 bytes."""
        leaves, tree = jax.tree.flatten(example)
        return cls(BufferLayout.of({str(at): (x.shape, x.dtype) for at, x in enumerate(leaves)}), tree)

    def unpack(self, words: jax.Array) -> Any:
        """The tree, bit for bit as it was written; for jitted functions. words: [size / 4] uint32."""
        return jax.tree.unflatten(self.tree, self.buffer.unpack(words).values())


class Staged:
    """One run's inputs in a buffer that no other run has, from its packing until its outputs are there.

    For a transfer may go on after the call that started it, and on a CPU the program reads the buffer itself. Of a run
    that failed it is not given back: nobody knows when the device is done with it. arrays: the inputs as a tree, with
    what an earlier run wrote; to be written whole before `run`.
    """

    def __init__(self, layout: TreeLayout, free: deque[tuple[Any, Any]], devices: Devices = ONE) -> None:
        try:
            words, arrays = free.pop()
        except IndexError:
            room = np.zeros(layout.buffer.size + ALIGNMENT, np.uint8)
            start = -room.ctypes.data % ALIGNMENT
            buffer = room[start : start + layout.buffer.size]
            words = buffer.view(np.uint32)
            arrays = jax.tree.unflatten(layout.tree, layout.buffer.views(buffer).values())
        self._words, self.arrays, self._free, self._devices = words, arrays, free, devices

    def run(self, program: Callable[..., Any], *others: Any) -> Any:
        """Start program(words, *others) and return its outputs."""
        assert self._words is not None, "it may be another run's"
        with self._devices.turn():
            return program(self._words, *others)

    def give_back(self) -> None:
        """The program's outputs are there, so that it reads the buffer no more. Further calls do nothing."""
        words, arrays, self._words, self.arrays = self._words, self.arrays, None, None
        if words is not None:
            self._free.append((words, arrays))


class StagedInputs:
    """The inputs of one compiled shape: trees of arrays like `example`, in as many buffers as runs are in flight.

    devices: those that share the model; each is given all of the inputs.
    """

    def __init__(self, example: Any, devices: Devices = ONE) -> None:
        self.layout, self._devices = TreeLayout.of(example), devices
        self._free: deque[tuple[Any, Any]] = deque()

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The words for which a program's first argument is compiled."""
        size = self.layout.buffer.size // WORD
        return jax.ShapeDtypeStruct((size,), np.uint32, sharding=self._devices.everywhere)

    def stage(self) -> Staged:
        """A buffer that no run reads, to be written to. Any thread may call it."""
        return Staged(self.layout, self._free, self._devices)


class ProfilePrograms:
    """The programs of one model over one catalog, one for each profile; shared with other catalogs of these shapes."""

    def __init__(
        self,
        profiles: tuple[Profile, ...],
        tables: CatalogTables,
        listed: int,
        segment_rows: int,
        explains: bool = False,
        devices: Devices = ONE,
    ) -> None:
        """listed, segment_rows: what filters may hold; see DeviceFilters. explains: whether each profile that
        recommends has a second program, which gives the search's levels too. devices: those that share the model."""
        self.profiles, self._devices = profiles, devices
        self._tables, self._listed, self._segment_rows = tables, listed, segment_rows
        self._filters = DeviceFilters(tables, listed, segment_rows, devices)
        self._programs: dict[Profile, jax.stages.Compiled] = {}
        self._explains, self._explaining = explains, dict[Profile, jax.stages.Compiled]()
        self._staged: dict[Profile, StagedInputs] = {}  # shared too: no catalog changes their shapes
        self.costs: dict[Profile, float] = {}
        """Seconds of a full batch of each profile, as measured at the warm-up."""

    def over(self, tables: CatalogTables, segment_rows: int) -> Self:
        """The same model over another catalog. Where the tables have the same shapes, the programs are shared."""
        other = copy.copy(self)
        other._tables, other._segment_rows = tables, segment_rows
        other._filters = DeviceFilters(tables, self._listed, segment_rows, self._devices)
        if other._shapes() != self._shapes():
            other._programs, other._explaining, other.costs = {}, {}, {}
        return other

    def with_profiles(self, profiles: tuple[Profile, ...]) -> Self:
        """The same model over the same catalog for other shapes, none of which is compiled yet, or explained."""
        other = copy.copy(self)
        other.profiles, other._programs = profiles, {}
        other._explains, other._explaining = False, {}
        return other

    @property
    def to_compile(self) -> int:
        """Programs that are not compiled yet."""
        explained = sum(map(self._is_explained, self.profiles))
        return len(self.profiles) + explained - len(self._programs) - len(self._explaining)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that stand on the device between batches."""
        return self._filters.buffer_bytes({p.batch for p in self.profiles if p.kind == "recommend"})

    def _shapes(self) -> Any:
        """What the programs depend on besides the model and the profiles."""
        return self._segment_rows, [(x.shape, x.dtype) for x in jax.tree.leaves(self._tables)]

    def program_texts(self) -> list[str]:
        """The compiled programs as XLA writes them, for profiling; after warm_up."""
        return [program.as_text() or "" for program in self._programs.values()]

    def _is_explained(self, profile: Profile) -> bool:
        """Whether a profile has a second program, which gives the search's levels too."""
        return self._explains and profile.kind == "recommend"

    def _program(self, profile: Profile, works: Sequence[Work]) -> jax.stages.Compiled:
        """The program for a batch: the second one where a work of it is explained."""
        if profile in self._explaining and any(not isinstance(x, RankWork) and x.explained for x in works):
            return self._explaining[profile]
        return self._programs[profile]


class RowExecutor(ProfilePrograms):
    """Runs batches of one model over one catalog, for any number of lanes."""

    def __init__(
        self,
        cfg: GeneratorConfig,
        params: GeneratorParams,
        tables: CatalogTables,
        profiles: tuple[Profile, ...],
        normalize: Normalize,
        *,
        approximate: int = 0,
        listed: int = 1,
        segment_rows: int = 0,
        explains: bool = False,
        devices: Devices = ONE,
    ) -> None:
        """approximate: see beam.recommend. For the others see ProfilePrograms."""
        super().__init__(profiles, tables, listed, segment_rows, explains, devices)
        self._cfg, self._params = cfg, params
        self._normalize, self._approximate = normalize, approximate

    @property
    def model(self) -> tuple[GeneratorConfig, CatalogTables, Normalize]:
        """What the programs are of, besides the weights."""
        return self._cfg, self._tables, self._normalize

    @property
    def weight_size(self) -> int | None:
        """Bytes of a number of a matrix; None: as many as of any other number."""
        return 1 if kind_of(self._params) else None

    @preparing()
    def warm_up(self, progress: Progress) -> None:
        """Compile what has no program yet, and run a probe of every profile; progress(done, total, label) after each.

        UserError where a probe's scores are no finite numbers.
        """
        for done, profile in enumerate(self.profiles, start=1):
            if profile not in self._programs:
                self._programs[profile] = self.compile(profile)
            label = f"{profile.kind} {profile.batch}x{profile.tokens} width {profile.width}"
            check_scores(label, self.run(profile, [_probe(profile, self._tables)])[0].scores)
            if self._is_explained(profile):
                if profile not in self._explaining:
                    self._explaining[profile] = self.compile(profile, levels=True)
                probe = _probe(profile, self._tables, explained=True)
                check_scores(f"{label} explained", self.run(profile, [probe])[0].scores)
            progress(done, len(self.profiles), label)
        self.costs |= median_seconds(
            {p: partial(self.run, p, _full_works(p)) for p in self.profiles if p not in self.costs}
        )

    def compile(self, profile: Profile, levels: bool = False) -> jax.stages.Compiled:
        """The program of a profile; cost_analysis() and memory_analysis() of it are what the profile costs.

        levels: the one that gives the search's levels too (recommend).
        """
        staged = self._staged.setdefault(profile, StagedInputs(_blank(profile), self._devices))
        given = staged.example, self._params, self._tables
        options = compiler_options(self._params)
        replicas = self._devices if isinstance(self._devices, Replicated) else None
        if profile.kind == "recommend":
            return compiled(
                _recommend,
                *given,
                self._lay_out(profile, []),
                options=options,
                inputs=staged.layout,
                cfg=self._cfg,
                width=profile.width,
                normalize=self._normalize,
                approximate=self._approximate,
                levels=levels,
                replicas=replicas,
            )
        return compiled(
            _rank,
            *given,
            options=options,
            inputs=staged.layout,
            cfg=self._cfg,
            normalize=self._normalize,
            replicas=replicas,
        )

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        """One outcome per work, in order: `launch`, and then `collect`."""
        return self.collect(self.launch(profile, works))

    def launch(self, profile: Profile, works: Sequence[Work]) -> Pending:
        """Hand a batch to the device, and do not wait for it. len(works) <= profile.batch."""
        staged = self._staged[profile].stage()
        _pack(staged.arrays, works)
        with self._filters.guard:
            filters = (self._lay_out(profile, works),) if profile.kind == "recommend" else ()
            program = self._program(profile, works)
            outputs = staged.run(program, self._params, self._tables, *filters)
        return Pending(profile, works, outputs, staged)

    def collect(self, pending: Pending) -> list[Outcome]:
        """Wait for a batch: one outcome per work, in order."""
        works, out = pending.works, jax.tree.map(np.asarray, pending.outputs)
        self._devices.wait(pending.outputs)
        pending.staged.give_back()
        if pending.profile.kind == "recommend":
            return recommend_outcomes(out, works)
        return [RankOutcome(out[i, : _width(work)]) for i, work in enumerate(works)]

    def _lay_out(self, profile: Profile, works: Sequence[Work]) -> Filters:
        filters = [work.filter for work in works if not isinstance(work, RankWork)]
        nothing = (
            self._filters.nothing.get(profile.batch) if filters.count(NO_FILTER) == len(filters) else None
        )
        return nothing or self._filters.lay_out(profile.batch, filters)


def recommend_outcomes(found: beam.Beams, works: Sequence[Work]) -> list[Outcome]:
    """One outcome per work, in order, of a batch's beams as arrays of numpy."""
    leaves, scores = np.asarray(found.leaves), np.asarray(found.scores)
    # dead beams sort last; a NaN is a fault, not a dead beam
    alive = (~np.isneginf(scores)).sum(axis=1)
    outcomes: list[Outcome] = []
    for i, work in enumerate(works):
        levels = None
        if found.levels is not None and not isinstance(work, RankWork) and work.explained:
            levels = beam.Levels(*(each[i] for each in found.levels))
        outcomes.append(RecommendOutcome(leaves[i, : alive[i]], scores[i, : alive[i]], levels))
    return outcomes


class _Rows(NamedTuple):
    """A row for each request, int32. tokens: [B, T]. lengths: [B]. leaves: [B, width], candidates (rank); else None.
    widths: [B], of beams (recommend); else None."""

    tokens: Any
    lengths: Any
    leaves: Any
    widths: Any


def _blank(profile: Profile) -> _Rows:
    batch, ranks = profile.batch, profile.kind == "rank"
    leaves, widths = np.zeros((batch, profile.width), np.int32), np.zeros(batch, np.int32)
    tokens, lengths = np.zeros((batch, profile.tokens), np.int32), np.zeros(batch, np.int32)
    return _Rows(tokens, lengths, leaves if ranks else None, None if ranks else widths)


def _pack(out: _Rows, works: Sequence[Work]) -> None:
    """Write all of a batch; rows without a work are one padding token long and have no beams."""
    tokens, lengths, leaves, widths = out
    for array, padding in ((tokens, 0), (lengths, 1), (leaves, 0), (widths, 0)):
        if array is not None:
            array.fill(padding)
    for i, work in enumerate(works):
        assert not isinstance(work, SegmentsWork)
        lengths[i] = len(work.prompt)
        tokens[i, : len(work.prompt)] = work.prompt
        if isinstance(work, RankWork):
            leaves[i, : len(work.leaves)] = work.leaves
        else:
            widths[i] = work.beam_width


def _recommend(
    words: jax.Array,
    params: GeneratorParams,
    tables: CatalogTables,
    filters: Filters,
    *,
    inputs: TreeLayout,
    replicas: Replicated | None,
    **static: Any,
) -> beam.Beams:
    rows: _Rows = inputs.unpack(words)
    given = params, tables, rows.tokens, rows.lengths, rows.widths, filters
    found: beam.Beams = _parted(beam.recommend, replicas, *given, **static)
    return split.everywhere(found)


def _rank(
    words: jax.Array,
    params: GeneratorParams,
    tables: CatalogTables,
    *,
    inputs: TreeLayout,
    replicas: Replicated | None,
    **static: Any,
) -> jax.Array:
    rows: _Rows = inputs.unpack(words)
    given = params, tables, rows.tokens, rows.lengths, rows.leaves
    scores: jax.Array = _parted(beam.rank, replicas, *given, **static)
    return split.everywhere(scores)


def _parted(function: Callable[..., Any], replicas: Replicated | None, *given: Any, **static: Any) -> Any:
    """function(weights, tables, *given): of devices that have whole weights each, each for its part of the rows."""
    call = partial(inspect.unwrap(function), **static)
    if replicas is None:
        return call(*given)
    specs = [FILTERS if isinstance(one, Filters) else ROWS for one in given[2:]]
    return replicas.spread(call, (WHOLE, WHOLE, *specs), ROWS)(*given)


def median_seconds(
    calls: Mapping[Profile, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[Profile, float]:
    """The median time of each one's TIMED_RUNS calls, or of as many as begin within TIMED_S of its own.

    They go in rounds, since what slows the machine for a while must slow all of them alike: they are compared.
    """
    seconds: dict[Profile, list[float]] = {profile: [] for profile in calls}
    for _ in range(TIMED_RUNS):
        for profile, call in calls.items():
            if sum(seconds[profile]) < TIMED_S:
                start = clock()
                call()
                seconds[profile].append(clock() - start)
    return {profile: statistics.median(found) for profile, found in seconds.items()}


def _full_works(profile: Profile) -> list[Work]:
    prompt = np.zeros(profile.tokens, np.int32)
    work: Work = RankWork(prompt, leaves=np.zeros(profile.width, np.int32))
    if profile.kind == "recommend":
        work = RecommendWork(prompt, beam_width=profile.width)
    return [work] * profile.batch


def _width(work: Work) -> int:
    assert isinstance(work, RankWork)
    return len(work.leaves)


def _probe(profile: Profile, tables: CatalogTables, explained: bool = False) -> Work:
    """A request whose prompt is the first tokens of each level, in all beams."""
    prompt = np.concatenate([np.asarray(tokens[:PROBED_TOKENS]) for tokens in tables.tokens])[
        : profile.tokens
    ]
    if profile.kind == "recommend":
        return RecommendWork(prompt, beam_width=profile.width, explained=explained)
    return RankWork(prompt, leaves=np.zeros(1, np.int32))
