# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of a scorer, and the buffer from which one reads its inputs (FLAME-6, 10).

How often a user's part is computed decides which programs there are, see `jgr.serving.scorers.executors`. Where it is
a run of its own, it is computed and read by programs for several lengths (`scorers.windows`), of which each user has
the shortest: so a short user takes less time, and what is kept of it by its length takes less memory. A part that
computes the user too has a program for the longest alone, since each further one would be compiled for every size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import ALIGNMENT, BufferLayout
from jgr.cache.histories import tokens_of
from jgr.features.schema import Schema
from jgr.models import scorers, tables
from jgr.models.climber_layers import Build
from jgr.models.devices import ONE, Devices
from jgr.models.gathering import Gathering
from jgr.models.params import PyTree
from jgr.models.scorers import Needs, ScorerConfig, Users, growing, keeping
from jgr.ops import split
from jgr.serving.engine.compilation import compiled
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.scorers.user_block import part_layout, read_candidates, read_users, user_layout

T = TypeVar("T")

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Share = Literal["part", "request", "cache"]
Program = Callable[..., Any]
"""A compiled program, or a plain function that dispatches its operations one by one."""


class Window(NamedTuple):
    """Users of at most so many events, and the model for these. kept, state: shapes of what is kept of one, and of what
    candidates are scored with."""

    events: int
    cfg: ScorerConfig
    kept: PyTree
    state: PyTree
    tokens: int | None
    """How many tokens have places in what is kept; None: that has one size."""


class UserPrograms(NamedTuple):
    """A window's programs of the user's part. read(words, params) -> kept. grow(words, params, kept) -> kept adds
    events; None: users do not grow. renew(words, params, kept) -> state takes `kept` for good; None: state is kept."""

    read: Program
    grow: Program | None = None
    renew: Program | None = None


class Programs:
    """The programs of a scorer, for any number of executors; made by `compile`.

    sizes: candidates of a part, ascending. share: how often a user's part is computed. schema: of the features'
    records; None: the model reads none. growth: the most events by which a kept user may have grown, only for `cache`.
    build: see climber_layers.Build (FLAME-7); the programs of "op_by_op" are plain functions, which dispatch one
    operation after the other. Raises HistoryIsWhole where the model's users cannot grow, ConfigError where it has no
    such build. devices: those that share the model; all else than its items is whole on each of them. lengths: see
    `scorers.windows`; not for `part`. apart: whether parts are given their candidates' records as an array on the
    device, beside their buffer and not in it.

    Tables that are not among `params` are given to each run as the rows that it reads, see `jgr.models.gathering`.
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
        lengths: Sequence[int] = (),
        apart: bool = False,
    ) -> None:
        self.items, self.devices = cfg.n_items, devices
        self._model, self._cfg, self._build = scorers.scorer(cfg, build), cfg, build
        self.params = params = scorers.as_built(params, build)
        names = tables.missing(cfg, params)
        self.gathering = Gathering(cfg, names) if names else None
        """What gives each run its rows of tables that are not among the parameters; None: all are."""
        self.needs: Needs = self._model.needs(cfg)
        self.sizes, self.share, self.schema = tuple(sizes), share, schema
        self.apart = apart and schema is not None
        packed = None if self.apart else schema
        self.user = user_layout(self.needs)
        block = None if share == "cache" else self.user
        self.layouts: dict[int, BufferLayout] = {} if share == "part" else {USER_PART: self.user}
        self.layouts |= {size: part_layout(block, packed, size, self.needs.repeats) for size in self.sizes}
        # A part with its user in it, of executors that share users otherwise.
        self.may_be_whole = share == "request"
        kept = keeping(cfg, build) if share == "cache" else None
        self.growth, self._keeping = growth, growing(cfg) if growth else kept
        self.along: PyTree = None if self._keeping is None else self._keeping.along
        """For each leaf of what is kept the axis of the user's tokens; None: its size is the same for all users."""
        events = (self.needs.max_items,) if share == "part" else scorers.windows(cfg, lengths)
        self.windows: tuple[Window, ...] = tuple(map(self._window, events))
        """For users of how many events there are programs, ascending; the last are those of all users."""
        self._forms = {_form(window.state): window for window in self.windows[::-1]}
        self._compiled: dict[int, Program] = {}
        self._parts: dict[tuple[int, Hashable], Program] = {}
        self._users_of: dict[int, UserPrograms] = {}
        self._whole: dict[int, Program] = {}

    def __getitem__(self, size: int) -> Program:
        """The program of a size for users of any length: (words, params, state, out) -> scores [1, m, P], and with
        records [m, words] after these where they are `apart`; of USER_PART: (words, params) -> kept."""
        return self._compiled[size]

    @property
    def kept(self) -> PyTree:
        """The shapes of what is kept of the longest user."""
        return self.windows[-1].kept

    @property
    def forms(self) -> int:
        """How many different shapes states have: each size has so many programs."""
        return len(self._forms)

    def window(self, block: UInt8) -> Window:
        """The smallest window that holds the user of a block."""
        if len(self.windows) == 1:
            return self.windows[0]
        count = np.count_nonzero(self.user.views(block)["rows"] >= 0)
        return next(window for window in self.windows if count <= window.events)

    def user_part(self, window: Window) -> UserPrograms:
        """The programs of the user's part, compiled with USER_PART."""
        return self._users_of[window.events]

    def part(self, size: int, state: PyTree) -> Program:
        """The program of a size for a state, or for none; compiled with the size."""
        return self._compiled[size] if len(self._forms) == 1 else self._parts[size, _form(state)]

    def whole(self, size: int) -> Program:
        """The program of a part that computes the user too: (words, params, None, out) -> scores; compiled with the
        size."""
        return self._whole[size]

    def shaped(self, events: int, size: int) -> PyTree:
        """The parameters, with the shapes of the rows that a run is given, see `Gathering`."""
        of = self.gathering
        return self.params if of is None else of.shaped(self.params, events, size)

    @property
    def counts(self) -> Mapping[str, Sequence[int]]:
        """The numbers of rows that runs are given, ascending, by table."""
        if self.gathering is None:
            return {}
        longest, runs = self.needs.max_items, set[tuple[int, int]]()
        if self.may_be_whole or self.share == "part":
            runs |= {(longest, size) for size in self.sizes}
        if self.share != "part":
            runs |= {(window.events, 0) for window in self.windows} | {(0, size) for size in self.sizes}
        of_runs = [self.gathering.counts(*run) for run in runs]
        return {name: sorted({counts[name] for counts in of_runs}) for name in self.gathering.names}

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
            for window in self.windows:
                self._users_of[window.events] = self._compile_user(window)
            self._compiled[size] = self._users_of[self.needs.max_items].read
        else:
            for form, window in self._forms.items():
                state = None if self.share == "part" else jax.tree.map(self._placed, window.state)
                self._parts[size, form] = self._compile_part(size, state, window.cfg)
            self._compiled[size] = self._parts[size, _form(self.windows[-1].state)]
            if self.may_be_whole:
                self._whole[size] = self._compile_part(size, None, self._cfg)
        return self._compiled[size]

    def _window(self, events: int) -> Window:
        cfg = scorers.within(self._cfg, events)
        words = jax.ShapeDtypeStruct((self.user.size // 4,), np.uint32)
        params = self.shaped(events, 0)
        kept: PyTree = jax.eval_shape(partial(self._read, cfg), words, params)
        state = kept
        if self._keeping is not None:
            state = jax.eval_shape(partial(self._renewed, cfg), words, params, kept)
        tokens = None if self._keeping is None else tokens_of(kept, self.along)
        return Window(events, cfg, kept, state, tokens)

    def _compile_user(self, window: Window) -> UserPrograms:
        cfg, kept, state = window.cfg, window.kept, window.state
        words = Staging(self.user, self.devices).example
        params = self.shaped(window.events, 0)
        read = self._make("read", cfg, partial(self._read, cfg), words, params)
        grow = renew = None
        if self.growth:
            grow = self._make("grow", cfg, partial(self._grown, cfg), words, params, kept)
        if self._keeping is not None:
            # Keys and values are most of either, or are not in the state at all.
            given = (2,) if _shapes(kept) <= _shapes(state) else ()
            renewed = partial(self._renewed, cfg)
            renew = self._make("renew", cfg, renewed, words, params, kept, donate=given)
        return UserPrograms(read, grow, renew)

    def _compile_part(self, size: int, state: PyTree, cfg: ScorerConfig) -> Program:
        """A part's program; without a state it computes the user."""
        layout = self.layouts[size]
        words = Staging(layout, self.devices).example
        out = self._placed(jax.ShapeDtypeStruct(self.out_shape(size), np.float32))
        params = self.shaped(self.needs.max_items if state is None else 0, size)
        score = partial(self._score, layout, cfg)
        records: tuple[jax.ShapeDtypeStruct, ...] = ()
        if self.apart:
            assert self.schema is not None
            records = (jax.ShapeDtypeStruct((size, self.schema.record_bytes // 4), np.uint32),)
        return self._make(f"score {size}", cfg, score, words, params, state, out, *records, donate=(3,))

    def _placed(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if self.devices.count == 1:
            return shape
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self.devices.everywhere)

    def _make(
        self, name: str, cfg: ScorerConfig, call: Program, *arguments: Any, donate: tuple[int, ...] = ()
    ) -> Program:
        if self._build == "op_by_op":
            return call
        # All that `call` takes from this object, so that a reload finds the programs of the weights before it.
        given = None if self.gathering is None else self.gathering.names
        key = name, cfg, self._build, self.share, self.schema, self.growth, given, self.apart
        return compiled(call, *arguments, key=key, donate=donate, keep_unused=True)

    def _users(self, words: jax.Array, events: int) -> Users:
        """The user of a block with the first so many places of the history."""
        users = read_users(self.user, self.needs, words)
        rows, actions, times = (x[:, :events] for x in (users.rows, users.actions, users.times))
        users = users._replace(rows=rows, actions=actions, times=times)
        return users if self.gathering is None else self.gathering.users(users)

    def _seen(self, cfg: ScorerConfig, size: int = 0) -> ScorerConfig:
        """The model as a run's parameters are of it."""
        return cfg if self.gathering is None else self.gathering.model(cfg, size)

    def _read(self, cfg: ScorerConfig, words: jax.Array, params: PyTree) -> PyTree:
        model = self._model.read if self._keeping is None else self._keeping.begin
        return split.everywhere(model(params, self._seen(cfg), self._users(words, cfg.max_items)))

    def _grown(self, cfg: ScorerConfig, words: jax.Array, params: PyTree, kept: PyTree) -> PyTree:
        return growing(cfg).grow(params, cfg, kept, self._users(words, cfg.max_items), self.growth)

    def _renewed(self, cfg: ScorerConfig, words: jax.Array, params: PyTree, kept: PyTree) -> PyTree:
        assert self._keeping is not None
        return self._keeping.state(params, cfg, kept, self._users(words, cfg.max_items))

    def _score(
        self,
        layout: BufferLayout,
        cfg: ScorerConfig,
        words: jax.Array,
        params: PyTree,
        state: PyTree,
        out: jax.Array,
        records: jax.Array | None = None,
    ) -> jax.Array:
        inputs = layout.unpack(words)
        if records is not None:
            inputs["records"] = records
        asked = read_candidates(inputs, self.needs, self.schema)
        size = asked.rows.shape[1]
        if self.gathering is not None:
            asked = self.gathering.candidates(asked, self.needs.max_items if state is None else 0)
        if state is None:
            users = self._users(inputs["user"], cfg.max_items)
            return split.everywhere(scorers.rank(self._model, params, self._seen(cfg, size), users, asked))
        return split.everywhere(self._model.score(params, self._seen(cfg, size), state, asked))


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


def _form(state: PyTree) -> Hashable:
    """What tells states apart that need programs of their own."""
    return tuple(leaf.shape for leaf in jax.tree.leaves(state))


def _shapes(tree: PyTree) -> set[tuple[Any, Any]]:
    return {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)}
