# SPDX-License-Identifier: Apache-2.0
"""The executor of prompts with cached segments: owner of the page pool (DESIGN idea 3, BAT-7).

The pool is one device array, and this is the only place that has it. Every program that reads or writes it is
dispatched here, by one thread, in the order in which the batches were planned, and a program that writes it is given it
for good (donation) and hands back the next state. So what a plan says is valid has been written before it is read,
without a lock and without waiting for the device: a batch's KV is written behind its scores, which go back to the
caller meanwhile.

A failure may lose the pool. It is then empty, and whoever planned must forget what was in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.meta import Move
from jgr.models import packed
from jgr.models.beam import CatalogTables, Normalize
from jgr.models.decoder import ContextKV, DecoderConfig, DecoderParams
from jgr.prompt.layouts import USER_PREFIX
from jgr.prompt.segments import Content, arrange, make_prompt
from jgr.serving.decoders.device_filters import DeviceFilters
from jgr.serving.decoders.packing import Packed, pack
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.work import Outcome, RankOutcome, RecommendOutcome, SegmentsWork, Work
from jgr.serving.engine.compilation import preparing
from jgr.serving.engine.contract import Progress
from jgr.serving.policies.jobs import Profile, Start
from jgr.serving.policies.sources import NO_REPAIR, Compute, PlannedPrompt, PlannedSegment, Repair

MOVED_CELLS = 64
"""Cells that one program moves between the device and the host."""


class PoolShape(NamedTuple):
    """pages, host_pages: on the device and on the host. cells: of a page."""

    pages: int
    page_tokens: int
    cells: int
    host_pages: int = 0

    @property
    def slots(self) -> int:
        return self.pages * self.page_tokens

    @property
    def cell_tokens(self) -> int:
        return self.page_tokens // self.cells


class PagedExecutor:
    """Runs packed batches of one decoder. Not thread-safe: one thread at a time calls `run`.

    longest: tokens of a prompt to go on from, at most. repair: of item tokens, which changes the programs that rank.
    Others as in RowExecutor.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        params: DecoderParams,
        tables: CatalogTables,
        profiles: tuple[Profile, ...],
        shape: PoolShape,
        longest: int,
        normalize: Normalize,
        *,
        approximate: int = 0,
        listed: int = 1,
        segment_rows: int = 0,
        repair: Repair = NO_REPAIR,
    ) -> None:
        self.profiles = profiles
        self._repair = repair
        self.shape = shape
        self._cfg, self._params, self._tables, self._segment_rows = cfg, params, tables, segment_rows
        self._longest, self._normalize, self._approximate = longest, normalize, approximate
        self._listed = listed
        self._filters = DeviceFilters(tables, listed, segment_rows)
        self._programs: dict[Profile, jax.stages.Compiled] = {}
        self._writes: dict[int, jax.stages.Compiled] = {}
        self._pool = self._empty()
        self._dtype = np.dtype(self._pool.dtype)
        cell_elements = shape.cell_tokens * packed.slot_elements(cfg)
        self._host = np.zeros((shape.host_pages * shape.cells, cell_elements), self._dtype)
        self._staging = _pinned_host(self._pool)
        self._mover = ThreadPoolExecutor(1, "jgr-host-tier")
        self._moving: list[Future[None]] = []

    @property
    def to_compile(self) -> int:
        """Profiles without a program."""
        return len(self.profiles) - len(self._programs)

    def over(self, tables: CatalogTables, segment_rows: int) -> PagedExecutor:
        """The same model over another catalog, with a pool of its own. Programs are shared where the shapes are."""
        other = PagedExecutor(
            self._cfg,
            self._params,
            tables,
            self.profiles,
            self.shape,
            self._longest,
            self._normalize,
            approximate=self._approximate,
            listed=self._listed,
            segment_rows=segment_rows,
            repair=self._repair,
        )
        other._writes = self._writes
        if other._shapes() == self._shapes():
            other._programs = self._programs
        return other

    def _shapes(self) -> Any:
        return self._segment_rows, [(x.shape, x.dtype) for x in jax.tree.leaves(self._tables)]

    @preparing()
    def warm_up(self, progress: Progress) -> None:
        """Compile and run every profile and the pool's own programs; progress(done, total, label) after each."""
        for done, profile in enumerate(self.profiles, start=1):
            if profile.tokens not in self._writes:
                self._writes[profile.tokens] = self.compile_write(profile.tokens)
            if profile not in self._programs:
                self._programs[profile] = self.compile(profile)
                self.run(profile, [_smallest_work(profile)])
            progress(done, len(self.profiles), f"{profile.kind} {profile.tokens}+{profile.context} packed")
        if self.shape.host_pages:
            nothing = np.zeros(0, np.int32)
            for direction in ("to_host", "to_device"):
                self._move(Move(direction, nothing, nothing), at_least=1)

    def compile(self, profile: Profile) -> jax.stages.Compiled:
        """The program of a profile."""
        arrays = self._pack(profile, [_smallest_work(profile)])
        lowered: jax.stages.Lowered
        if profile.kind == "rank":
            lowered = packed.rank.lower(self._params, self._pool, arrays.row, arrays.asked, cfg=self._cfg)
        else:
            lowered = packed.recommend.lower(
                *self._recommend_inputs(profile, arrays, []),
                cfg=self._cfg,
                width=profile.width,
                normalize=self._normalize,
                approximate=self._approximate,
            )
        return lowered.compile()

    def compile_write(self, tokens: int) -> jax.stages.Compiled:
        """The program that writes so many new tokens; its memory_analysis shows that the pool is written in place."""
        cfg = self._cfg
        one: Any = jax.ShapeDtypeStruct((cfg.layers, 1, cfg.kv_heads, tokens, cfg.head_dim), self._pool.dtype)
        slots = jax.ShapeDtypeStruct((tokens,), np.int32)
        lowered: jax.stages.Lowered = packed.write.lower(self._pool, ContextKV(one, one), slots, cfg=cfg)
        return lowered.compile()

    def program_texts(self) -> list[str]:
        """See RowExecutor."""
        return [program.as_text() or "" for program in self._programs.values()]

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        """One outcome per work, in order: `launch`, and then `collect`."""
        return self.collect(profile, works, self.launch(profile, works))

    def launch(self, profile: Profile, works: Sequence[Work]) -> Any:
        """Hand a batch to the device: the program's outputs, not waited for. Where it fails the pool is empty."""
        with self._losing():
            return self._launch(profile, works)

    def collect(self, profile: Profile, works: Sequence[Work], out: Any) -> list[Outcome]:
        """Wait for a batch: one outcome per work, in order. Where it failed the pool is empty afterwards."""
        own = [work for work in works if isinstance(work, SegmentsWork)]
        with self._losing():
            if profile.kind == "rank":
                ends = np.cumsum([len(work.columns) for work in own])
                return [RankOutcome(x) for x in np.split(np.asarray(out)[: ends[-1]], ends[:-1])]
            leaves, found = np.asarray(out.leaves), np.asarray(out.scores)
            alive = (~np.isneginf(found)).sum(axis=1)
            return [RecommendOutcome(leaves[i, : alive[i]], found[i, : alive[i]]) for i in range(len(own))]

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._pool = self._empty()
            self._moving.clear()  # of no use any more, and where one has failed it would fail what waits for it
            raise

    def _launch(self, profile: Profile, works: Sequence[Work]) -> Any:
        own = [work for work in works if isinstance(work, SegmentsWork)]
        for move in [move for work in own for move in work.moves]:
            self._move(move)
        arrays = self._pack(profile, own)
        program = self._programs[profile]
        if profile.kind == "rank":
            scores, new = program(self._params, self._pool, arrays.row, arrays.asked)
            self._write(new, arrays.keep)
            return scores
        beams, new = program(*self._recommend_inputs(profile, arrays, own))
        self._write(new, arrays.keep)
        return beams

    def _pack(self, profile: Profile, works: Sequence[SegmentsWork]) -> Packed:
        longest = min(self._longest, profile.tokens + profile.context) if profile.kind == "recommend" else 0
        shape, repair = self.shape, self._repair if profile.kind == "rank" else NO_REPAIR
        return pack(
            works, profile, cell_tokens=shape.cell_tokens, slots=shape.slots, longest=longest, repair=repair
        )

    def _recommend_inputs(
        self, profile: Profile, arrays: Packed, works: Sequence[SegmentsWork]
    ) -> tuple[Any, ...]:
        widths = np.zeros(profile.batch, np.int32)
        widths[: len(works)] = [work.beam_width for work in works]
        filters = self._filters.lay_out(profile.batch, [work.filter for work in works])
        return self._params, self._pool, self._tables, arrays.row, arrays.whole, widths, filters

    def _write(self, new: Any, keep: npt.NDArray[np.int32]) -> None:
        if (keep < self.shape.slots).any():
            self._pool = self._writes[len(keep)](self._pool, new, keep)

    def _move(self, move: Move, at_least: int = 0) -> None:
        """In parts of one size; numbers beyond the pool fill the last one up."""
        cells = self.shape.cells
        for at in range(0, max(len(move.device), at_least), MOVED_CELLS):
            device, host = move.device[at : at + MOVED_CELLS], move.host[at : at + MOVED_CELLS]
            numbers = np.full(MOVED_CELLS, self.shape.pages * cells, np.int32)
            numbers[: len(device)] = device
            if move.direction == "to_host":
                read = packed.read_cells(
                    self._pool, np.minimum(numbers, self.shape.pages * cells - 1), cells=cells
                )
                for moved in [moving for moving in self._moving if moving.done()]:
                    moved.result()
                    self._moving.remove(moved)
                read = jax.device_put(
                    read, self._staging
                )  # by the device itself, behind what was dispatched before
                self._moving.append(self._mover.submit(self._keep, read, host))
                continue
            for moving in self._moving:
                moving.result()
            values = np.zeros((MOVED_CELLS, self._host.shape[1]), self._dtype)
            values[: len(host)] = self._host[host]
            values = jax.device_put(jax.device_put(values, self._staging), self._pool.sharding)
            self._pool = packed.write_cells(self._pool, numbers, values, cells=cells)

    def _keep(self, read: jax.Array, host: npt.NDArray[np.int32]) -> None:
        self._host[host] = np.asarray(read)[: len(host)]

    def _empty(self) -> jax.Array:
        elements = self.shape.page_tokens * packed.slot_elements(self._cfg)
        embed = self._params.embed
        # Bound to its device, as what the host tier puts into it is: to jit an unbound array is another argument.
        return jnp.zeros((self.shape.pages, elements), embed.dtype, device=jnp.asarray(embed).sharding)


class DecoderExecutors:
    """Executors of all profiles on one lane: of those that are packed, where there are any, and of the others."""

    lanes = 1

    def __init__(self, plain: RowExecutor, paged: PagedExecutor | None) -> None:
        self.plain, self.paged = plain, paged
        self._all: tuple[RowExecutor | PagedExecutor, ...] = (plain,) if paged is None else (plain, paged)
        self.profiles = tuple(profile for executor in self._all for profile in executor.profiles)

    @property
    def to_compile(self) -> int:
        """Profiles without a program."""
        return sum(executor.to_compile for executor in self._all)

    def over(self, tables: CatalogTables, segment_rows: int) -> DecoderExecutors:
        """See RowExecutor. The pool is another one."""
        paged = None if self.paged is None else self.paged.over(tables, segment_rows)
        return DecoderExecutors(self.plain.over(tables, segment_rows), paged)

    def warm_up(self, progress: Progress) -> None:
        """See jgr.serving.engine.contract.Executors."""
        before, total = 0, len(self.profiles)
        for executor in self._all:

            def step(done: int, _: int, label: str, before: int = before) -> None:
                progress(before + done, total, label)

            executor.warm_up(step)
            before += len(executor.profiles)

    def program_texts(self) -> list[str]:
        """See RowExecutor."""
        return [text for executor in self._all for text in executor.program_texts()]

    def bind(self) -> None:
        """See jgr.serving.engine.contract.Executors."""

    def launch(self, start: Start, work: Sequence[Work]) -> tuple[Sequence[Work], Any]:
        """See jgr.serving.engine.contract.Executors."""
        assert isinstance(start.shape, Profile)
        return work, self._of(start.shape).launch(start.shape, work)

    def collect(self, start: Start, pending: tuple[Sequence[Work], Any]) -> list[Outcome]:
        """See jgr.serving.engine.contract.Executors."""
        assert isinstance(start.shape, Profile)
        return self._of(start.shape).collect(start.shape, *pending)

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        """One outcome per work, in order; for measurements of the programs alone."""
        return self._of(profile).run(profile, works)

    def _of(self, profile: Profile) -> RowExecutor | PagedExecutor:
        return self.paged if profile.packed and self.paged is not None else self.plain


def _pinned_host(pool: jax.Array) -> jax.sharding.Sharding:
    """Where copies between host and device pass through: host memory that the device reads and writes by itself, where
    the backend has it; else the device's own, which is no stop at all."""
    (device,) = pool.devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        return pool.sharding
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def _smallest_work(profile: Profile) -> SegmentsWork:
    token = np.zeros(1, np.int32)
    items = [(0, Content.of(token))] if profile.kind == "rank" else []
    prompt = make_prompt(Content.of(token), token, items)
    computed = [PlannedSegment(x.kind, (Compute(1),)) for x in arrange(prompt, USER_PREFIX)]
    work = SegmentsWork(prompt, beam_width=1, plan=PlannedPrompt.of("user_prefix", computed))
    return work if profile.kind == "recommend" else replace(work, columns=token)
