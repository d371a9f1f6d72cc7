# SPDX-License-Identifier: Apache-2.0
"""The executor of prompts with cached segments (DESIGN idea 3, BAT-7).

Its programs read and write cells of the device's pool (`jgr.cache.pool`), which models share. They are dispatched by
one thread, in the order in which the batches were planned. So what a plan says is valid has been written before it is
read, without waiting for the device: a batch's KV is written after its scores, which go back to the caller meanwhile.

`launch` dispatches a batch and `collect` waits for it; others may be launched in between. A batch that was planned
before the pool was lost is refused by `PoolLost`, and can be planned again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jgr.cache.host import HostTier
from jgr.cache.pool import DevicePool, PoolLost
from jgr.models import packed, packed_lists, packed_recommend
from jgr.models.beam import Beams, CatalogTables, Filters, Normalize
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.generators import compiler_options
from jgr.models.kv import ContextKV
from jgr.models.packed import ChosenBy, KVCells
from jgr.ops import split
from jgr.prompt.layouts import USER_PREFIX
from jgr.prompt.segments import Content, arrange, make_prompt
from jgr.serving.decoders.library import LibraryLoader
from jgr.serving.decoders.packing import Kept, Packed, blank, pack
from jgr.serving.decoders.row_executor import (
    ProfilePrograms,
    RowExecutor,
    StagedInputs,
    TreeLayout,
    median_seconds,
    recommend_outcomes,
)
from jgr.serving.decoders.work import Outcome, Pending, RankOutcome, SegmentsWork, Work
from jgr.serving.engine.compilation import check_scores, compiled, preparing, telling
from jgr.serving.engine.contract import Progress
from jgr.serving.policies.jobs import Profile, Start
from jgr.serving.policies.sources import NO_REPAIR, Compute, PlannedPrompt, PlannedSegment, Repair


class PagedExecutor(ProfilePrograms):
    """Runs packed batches of one decoder. Not thread-safe: one thread at a time calls `launch`.

    pool, kv: the cells for keys and values. longest: the most tokens of a prompt that generation goes on from. repair:
    which item tokens are repaired, chosen_by: how those that the program chooses, and moves: whether items are read at
    other places than where they were computed, since these change the programs that rank. lists: whether candidates are
    ranked by a list that the model writes. host: the tier below the pool; None: there is none. library: fills the pool
    with prototypes;
    None: there are none. For the other arguments see RowExecutor.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        params: DecoderParams,
        tables: CatalogTables,
        profiles: tuple[Profile, ...],
        pool: DevicePool,
        kv: KVCells,
        longest: int,
        normalize: Normalize,
        *,
        approximate: int = 0,
        listed: int = 1,
        segment_rows: int = 0,
        explains: bool = False,
        repair: Repair = NO_REPAIR,
        chosen_by: ChosenBy = "deviation",
        moves: bool = False,
        lists: bool = False,
        host: HostTier | None = None,
        library: LibraryLoader | None = None,
    ) -> None:
        super().__init__(profiles, tables, listed, segment_rows, explains, pool.devices)
        self._cfg, self._params, self._repair = cfg, params, repair
        self._chosen_by, self._moves, self._lists = chosen_by, moves, lists
        self.pool, self.kv, self._host, self.library = pool, kv, host, library
        self._longest, self._normalize, self._approximate = longest, normalize, approximate
        self._writes: dict[int, jax.stages.Compiled] = {}
        self._decides = chosen_by == "attention" and repair.share > 0
        self._deciding: dict[Profile, jax.stages.Compiled] = {}

    @preparing()
    def warm_up(self, progress: Progress) -> None:
        """Compile what has no program yet, and run a probe of every profile; progress(done, total, label) after each.

        UserError where a probe's scores are no finite numbers.
        """
        token = np.asarray(self._tables.tokens[0][:1], np.int32)
        for done, profile in enumerate(self.profiles, start=1):
            if profile.tokens not in self._writes:
                self._writes[profile.tokens] = self.compile_write(profile.tokens)
            if profile not in self._programs:
                self._programs[profile] = self.compile(profile)
            label = f"{profile.kind} {profile.tokens}+{profile.context} packed"
            probe = _computed_work(profile, 3, token)
            check_scores(label, self.run(profile, [probe])[0].scores)
            if self._is_explained(profile):
                if profile not in self._explaining:
                    self._explaining[profile] = self.compile(profile, levels=True)
                explained = replace(probe, explained=True)
                check_scores(f"{label} explained", self.run(profile, [explained])[0].scores)
            progress(done, len(self.profiles), label)
        self.costs |= median_seconds(
            {p: partial(self.run, p, self._full_batch(p)) for p in self.profiles if p not in self.costs}
        )
        if self._host is not None:
            self._host.warm_up(self.kv.cells)

    def compile(self, profile: Profile, levels: bool = False) -> jax.stages.Compiled:
        """The program of a profile. levels: the one that gives the search's levels too (recommend)."""
        staged = self._staged.setdefault(profile, self._inputs(profile))
        given = staged.example, self._params, self.pool.example
        options = compiler_options(self._params)
        if profile.kind == "rank":
            decided: tuple[Any, ...] = ()
            of_lists = profile.batch if self._lists else 0
            if self._decides:
                deciding = self._compiled(
                    _decide, given[:2], options=options, inputs=staged.layout, cfg=self._cfg
                )
                self._deciding[profile], decided = deciding, (self._decided(profile),)
            return self._compiled(
                _rank,
                (*given, *decided),
                options=options,
                inputs=staged.layout,
                cfg=self._cfg,
                kv=self.kv,
                chosen_by=self._chosen_by,
                requests=of_lists,
            )
        return self._compiled(
            _recommend,
            (*given, *self._over_catalog(profile, [])),
            options=options,
            inputs=staged.layout,
            cfg=self._cfg,
            kv=self.kv,
            width=profile.width,
            normalize=self._normalize,
            approximate=self._approximate,
            levels=levels,
        )

    def _decided(self, profile: Profile) -> packed.Decided:
        """What `_decide` gives for a profile, for compiling."""
        where = self._devices.everywhere if self._devices.count > 1 else None
        kinds = np.dtype("bool"), np.dtype("int32")
        return packed.Decided(
            *(jax.ShapeDtypeStruct((profile.tokens,), kind, sharding=where) for kind in kinds)
        )

    def _inputs(self, profile: Profile) -> StagedInputs:
        """The buffers of a profile's inputs."""
        return StagedInputs(self._blank(profile), self._devices)

    def _compiled(
        self, function: Callable[..., Any], given: Sequence[Any], **static: Any
    ) -> jax.stages.Compiled:
        """The program of a function of inputs, weights, the pool and what else a profile's programs read."""
        return compiled(function, *given, **static)

    def _full_batch(self, profile: Profile) -> list[SegmentsWork]:
        """One that takes as long as its shape may."""
        tokens = min(profile.tokens, self._longest or profile.tokens)
        return [self._full_work(profile, tokens)] * min(profile.batch, profile.tokens // tokens)

    def _full_work(self, profile: Profile, tokens: int) -> SegmentsWork:
        """One that takes as long as its shape may, with all candidates of a list and all beams of a search."""
        work = _computed_work(profile, tokens)
        if profile.kind == "recommend":
            return replace(work, beam_width=profile.width)
        if not self._lists:
            return work
        return replace(work, columns=np.repeat(_ANY_TOKEN, profile.width // profile.batch))

    def compile_write(self, tokens: int) -> jax.stages.Compiled:
        """The program that writes so many new tokens; its memory_analysis shows that the pool is written in place."""
        cfg, shared = self._cfg, self._devices.count > 1
        one: Any = jax.ShapeDtypeStruct(
            (cfg.layers, 1, cfg.kv_heads, tokens, cfg.head_dim),
            np.dtype(self.kv.dtype),
            sharding=self._devices.along(2) if shared else None,
        )
        where = self._devices.everywhere if shared else None
        slots = jax.ShapeDtypeStruct((tokens, self.kv.parts), np.int32, sharding=where)
        given: tuple[Any, ...] = (self.pool.example, ContextKV(one, one), slots)
        if self._moves:
            shift = jax.ShapeDtypeStruct((tokens,), np.int32, sharding=where)
            return compiled(packed.write, *given, shift, donate=(0,), kv=self.kv, cfg=cfg)
        return compiled(packed.write, *given, donate=(0,), kv=self.kv)

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        """One outcome per work, in order. PoolLost where nothing has run and all can be planned again."""
        return self.collect(self.launch(profile, works))

    def launch(self, profile: Profile, works: Sequence[Work]) -> Pending:
        """Dispatch a batch. PoolLost where it was planned for an earlier epoch of the pool."""
        own = [work for work in works if isinstance(work, SegmentsWork)]
        epoch = min([self.pool.epoch, *(work.epoch for work in own if work.epoch is not None)])
        program, staged = self._program(profile, own), self._staged[profile].stage()
        keep = self._pack(staged.arrays, profile, own)
        others: tuple[Any, ...] = self._over_catalog(profile, own) if profile.kind == "recommend" else ()
        if profile in self._deciding:  # it reads no pool, so that copies to that go on meanwhile (RCLLM-13)
            others = (staged.run(self._deciding[profile], self._params),)
        self.catch_up()
        outputs, new = self.pool.read(lambda array: staged.run(program, self._params, array, *others), epoch)
        if (keep.slots < self._slots).any():
            write, moved = self._writes[profile.tokens], self._moved(keep)
            self.pool.write(lambda array: write(array, new, keep.slots, *moved), epoch)
        return Pending(profile, own, outputs, staged, epoch)

    def collect(self, pending: Pending) -> list[Outcome]:
        """Wait for a batch: one outcome per work, in order. Where its program failed, the pool is lost."""
        works, outputs = pending.works, pending.outputs
        try:
            found = jax.tree.map(np.asarray, outputs)
            self._devices.wait(outputs)
        except Exception as error:
            if self.pool.epoch != pending.epoch:  # it read what another batch, which failed, was to write
                raise PoolLost("a batch before this one failed, and the pool with it") from error
            self.pool.lose(pending.epoch, error)
            raise
        pending.staged.give_back()
        return self._outcomes(pending.profile, works, found)

    def _outcomes(self, profile: Profile, works: Sequence[SegmentsWork], found: Any) -> list[Outcome]:
        """One outcome per work, in order, of what a program gave."""
        if profile.kind == "rank":
            ends = np.cumsum([0, *(len(work.columns) for work in works)])
            return [RankOutcome(found[at:end]) for at, end in pairwise(ends)]
        return recommend_outcomes(found, works)

    def catch_up(self) -> None:
        """Make all copies to the pool that plans rely on. Raises what one raised; the pool is empty then."""
        if self._host is not None:
            self._host.catch_up()
        if self.library is not None:
            self.library.catch_up(self)

    @property
    def written_at_once(self) -> int:
        """The most tokens of one `put`."""
        return max(self._writes)

    def put(
        self, kv: ContextKV, slots: npt.NDArray[np.int32], shift: npt.NDArray[np.int32], epoch: int
    ) -> None:
        """Write keys and values [L, 1, K, n, d] of other origin into slots [n, P] of the pool, as `packed.write`.
        PoolLost where the pool is not of this epoch; needs `moves`."""
        length, most = len(slots), self.written_at_once
        room = [(0, 0), (0, 0), (0, 0), (0, most - length), (0, 0)]
        sharding = self._devices.along(2) if self._devices.count > 1 else None
        both = (np.pad(np.asarray(x), room) for x in kv)
        given = ContextKV(*(jax.device_put(x, sharding) for x in both))
        where = np.full((most, self.kv.parts), self._slots, np.int32)
        back = np.zeros(most, np.int32)
        where[:length], back[:length] = slots, shift
        self.pool.write(lambda array: self._writes[most](array, given, where, back), epoch)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt that generation goes on from."""
        return self._longest

    @property
    def _slots(self) -> int:
        """The number of slots in the pool, which is the first slot that it does not have."""
        return self.pool.pages * self.kv.slots

    def _blank(self, profile: Profile) -> Packed:
        """Arrays as the profile's program reads them."""
        longest = min(self._longest, profile.tokens + profile.context)
        return blank(profile, self.kv.parts, longest, self._repair, self._moves)

    def _moved(self, keep: Kept) -> tuple[npt.NDArray[np.int32], ...]:
        """What the writing program takes beside the slots."""
        if not self._moves:
            return ()
        return (np.zeros(len(keep.slots), np.int32) if keep.shift is None else keep.shift,)

    def _pack(self, out: Packed, profile: Profile, works: Sequence[SegmentsWork]) -> Kept:
        """Write a batch; returns where its KV is kept, which another program reads, later."""
        return pack(
            out, works, profile, cell_tokens=self.kv.tokens, slots=self._slots, last=self._repair.last
        )

    def _over_catalog(self, profile: Profile, works: Sequence[SegmentsWork]) -> tuple[CatalogTables, Filters]:
        return self._tables, self._filters.lay_out(profile.batch, [work.filter for work in works])


def _recommend(
    words: jax.Array,
    params: DecoderParams,
    pool: jax.Array,
    tables: CatalogTables,
    filters: Filters,
    *,
    inputs: TreeLayout,
    **static: Any,
) -> tuple[Beams, ContextKV]:
    given: Packed = inputs.unpack(words)
    over = tables, given.row, given.prompts, given.widths, filters
    found, new = inspect.unwrap(packed_recommend.recommend)(params, pool, *over, **static)
    return split.everywhere(found), split.divided(new, 2)


def _rank(
    words: jax.Array,
    params: DecoderParams,
    pool: jax.Array,
    *decided: packed.Decided,
    inputs: TreeLayout,
    requests: int,
    **static: Any,
) -> tuple[jax.Array, ContextKV]:
    """decided: what `_decide` gave, where it is asked. requests: of a batch whose lists the model writes; 0: none."""
    given: Packed = inputs.unpack(words)
    over = given.row, given.asked, *decided
    if requests:
        found, new = inspect.unwrap(packed_lists.rank)(params, pool, *over, requests=requests, **static)
    else:
        found, new = inspect.unwrap(packed.rank)(params, pool, *over, **static)
    return split.everywhere(found), split.divided(new, 2)


def _decide(
    words: jax.Array, params: DecoderParams, *, inputs: TreeLayout, cfg: DecoderConfig
) -> packed.Decided:
    given: Packed = inputs.unpack(words)
    decided: packed.Decided = inspect.unwrap(packed.decide)(params, given.row, cfg=cfg)
    return split.everywhere(decided)


_ANY_TOKEN = np.zeros(1, np.int32)


class DecoderExecutors:
    """A decoder's executors: a PagedExecutor for packed profiles, where there are any, on lane 0, and a RowExecutor for
    others on all lanes.

    lanes: batches of the RowExecutor that run at the same time (XGR-15). in_flight: batches of a lane that are
    dispatched and not yet collected (XGR-12).
    """

    def __init__(
        self, plain: RowExecutor, paged: PagedExecutor | None, *, lanes: int = 1, in_flight: int = 1
    ) -> None:
        self.plain, self.paged, self.lanes, self.in_flight = plain, paged, lanes, in_flight
        self._all: tuple[RowExecutor | PagedExecutor, ...] = (plain,) if paged is None else (plain, paged)
        self.profiles = tuple(profile for executor in self._all for profile in executor.profiles)

    @property
    def costs(self) -> dict[Profile, float]:
        """See ProfilePrograms."""
        return {profile: s for executor in self._all for profile, s in executor.costs.items()}

    @property
    def to_compile(self) -> int:
        """Programs that are not compiled yet."""
        return sum(executor.to_compile for executor in self._all)

    @property
    def buffer_bytes(self) -> int:
        """See RowExecutor."""
        return sum(executor.buffer_bytes for executor in self._all)

    def over(self, tables: CatalogTables, segment_rows: int) -> DecoderExecutors:
        """See RowExecutor."""
        paged = None if self.paged is None else self.paged.over(tables, segment_rows)
        plain = self.plain.over(tables, segment_rows)
        return DecoderExecutors(plain, paged, lanes=self.lanes, in_flight=self.in_flight)

    @telling()
    def warm_up(self, progress: Progress) -> None:
        """See jgr.serving.engine.contract.Executors."""
        before, total = 0, len(self.profiles)
        progress(0, total, "")  # the first program may take a minute, in which nothing else is told
        for executor in self._all:

            def step(done: int, _: int, label: str, before: int = before) -> None:
                progress(before + done, total, label)

            executor.warm_up(step)
            before += len(executor.profiles)

    def program_texts(self) -> list[str]:
        """See RowExecutor."""
        return [text for executor in self._all for text in executor.program_texts()]

    def catch_up(self) -> None:
        """See PagedExecutor."""
        if self.paged is not None:
            self.paged.catch_up()

    def bind(self) -> None:
        """See jgr.serving.engine.contract.Executors."""

    def launch(self, start: Start, work: Sequence[Work]) -> Pending:
        """See jgr.serving.engine.contract.Executors."""
        assert isinstance(start.shape, Profile)
        return self._of(start.shape).launch(start.shape, work)

    def collect(self, start: Start, pending: Pending) -> list[Outcome]:
        """See jgr.serving.engine.contract.Executors."""
        return self._of(pending.profile).collect(pending)

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        """One outcome per work, in order; for measurements of the programs alone."""
        return self._of(profile).run(profile, works)

    def _of(self, profile: Profile) -> RowExecutor | PagedExecutor:
        return self.paged if profile.packed and self.paged is not None else self.plain


def _smallest_work(profile: Profile) -> SegmentsWork:
    return _computed_work(profile, 3)


def _computed_work(profile: Profile, tokens: int, token: npt.NDArray[np.int32] = _ANY_TOKEN) -> SegmentsWork:
    """A request of so many tokens that are all computed and alike: a user, and a token each for what ends the prompt
    and, to rank, for a candidate."""
    items = [(0, Content.of(token))] if profile.kind == "rank" else []
    user = np.repeat(token, max(1, tokens - 1 - len(items)))
    prompt = make_prompt(Content.of(user), token, items)
    computed = [PlannedSegment(x.kind, (Compute(len(x)),)) for x in arrange(prompt, USER_PREFIX)]
    work = SegmentsWork(prompt, beam_width=1, plan=PlannedPrompt.of("user_prefix", computed))
    return work if profile.kind == "recommend" else replace(work, columns=token)
