# SPDX-License-Identifier: Apache-2.0
"""The executors of devices that have a part of each batch (data parallelism; BAT-7 over the devices of a process).

Its programs are those of `PagedExecutor`, run by every device on its own row and its own pool under `jax.shard_map`:
compiled once, and dispatched once for all devices. Cached items that a row reads and another device has are copied in
front of the batch (`jgr.cache.device_reads`). A device without a request runs a row of padding.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from msgspec import structs

from jgr.cache.device_reads import DeviceReads
from jgr.catalog.item_filters import NO_FILTER
from jgr.models import packed
from jgr.models.beam import CatalogTables, Filters
from jgr.models.kv import ContextKV
from jgr.models.replicated import ROWS, SECOND, WHOLE, Replicated
from jgr.models.words import WORD
from jgr.serving.decoders.packing import Kept, Packed
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.decoders.row_executor import FILTERS, Staged, StagedInputs, TreeLayout
from jgr.serving.decoders.work import Outcome, SegmentsWork
from jgr.serving.engine.compilation import compiled, preparing
from jgr.serving.engine.contract import Progress
from jgr.serving.policies.jobs import Profile


class StagedRows(StagedInputs):
    """A row of inputs for each device. `layout` is a row's."""

    def __init__(self, example: Any, devices: Replicated) -> None:
        super().__init__(example, devices)
        self._sharding, self._count = devices.rows_of_each, devices.count
        self._rows = TreeLayout.of([example] * devices.count)
        assert self._rows.buffer.size == devices.count * self.layout.buffer.size
        self._unused: deque[tuple[Any, Any]] = deque()

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        size = self._rows.buffer.size // WORD
        return jax.ShapeDtypeStruct((size,), np.uint32, sharding=self._sharding)

    def stage(self) -> Staged:
        return Staged(self._rows, self._unused, self._devices)


class PartedExecutor(PagedExecutor):
    """Runs packed batches of one decoder, each a row a device. The pool is a ReplicatedPool; for the arguments see
    PagedExecutor. reads: makes the copies between devices, where copies are planned at all."""

    def __init__(self, *args: Any, reads: DeviceReads, copies: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self._devices, Replicated)
        self._over, self._reads, self._copies = self._devices, reads, copies

    def catch_up(self) -> None:
        """See PagedExecutor."""
        self._reads.catch_up()

    def compile_write(self, tokens: int) -> jax.stages.Compiled:
        """The program that writes so many new tokens on each device."""
        cfg, count, rows = self._cfg, self._over.count, self._over.rows_of_each
        one: Any = jax.ShapeDtypeStruct(
            (cfg.layers, count, cfg.kv_heads, tokens, cfg.head_dim),
            np.dtype(self.kv.dtype),
            sharding=jax.sharding.NamedSharding(rows.mesh, SECOND),
        )
        slots = jax.ShapeDtypeStruct((count * tokens, self.kv.parts), np.int32, sharding=rows)
        given: list[Any] = [self.pool.example, ContextKV(one, one), slots]
        specs: list[Any] = [ROWS, SECOND, ROWS]
        static: dict[str, Any] = {"kv": self.kv}
        if self._moves:
            given.append(jax.ShapeDtypeStruct((count * tokens,), np.int32, sharding=rows))
            specs.append(ROWS)
            static["cfg"] = cfg
        return self._compile(packed.write, given, specs, ROWS, donate=(0,), **static)

    def _inputs(self, profile: Profile) -> StagedInputs:
        return StagedRows(self._blank(profile), self._over)

    @preparing()
    def warm_up(self, progress: Progress) -> None:
        """See PagedExecutor."""
        if self._copies:
            self._reads.warm_up(self.kv.cells)
        super().warm_up(progress)

    def _compiled(
        self, function: Callable[..., Any], given: Sequence[Any], **static: Any
    ) -> jax.stages.Compiled:
        """A program of the base class, which every device runs on its part."""
        specs: list[Any] = [ROWS, WHOLE]
        for one in given[2:]:
            whole = isinstance(one, CatalogTables)
            specs.append(FILTERS if isinstance(one, Filters) else WHOLE if whole else ROWS)
        makes_kv = len(given) > 2
        return self._compile(function, given, specs, (ROWS, SECOND) if makes_kv else ROWS, **static)

    def _compile(
        self,
        function: Callable[..., Any],
        given: Sequence[Any],
        specs: Sequence[Any],
        made: Any,
        *,
        donate: tuple[int, ...] = (),
        options: dict[str, bool] | None = None,
        **static: Any,
    ) -> jax.stages.Compiled:
        return compiled(
            _on_each,
            *given,
            donate=donate,
            options=options,
            body=function,
            devices=self._over,
            specs=tuple(specs),
            made=made,
            **static,
        )

    def _decided(self, profile: Profile) -> packed.Decided:
        shape, rows = (self._over.count * profile.tokens,), self._over.rows_of_each
        kinds = np.dtype("bool"), np.dtype("int32")
        return packed.Decided(*(jax.ShapeDtypeStruct(shape, kind, sharding=rows) for kind in kinds))

    def _full_batch(self, profile: Profile) -> list[SegmentsWork]:
        row = super()._full_batch(profile)
        return [
            replace(work, plan=structs.replace(work.plan, device=device))
            for device in range(self._over.count)
            for work in row
            if work.plan is not None
        ]

    def _rows(self, works: Sequence[SegmentsWork]) -> list[list[int]]:
        """The numbers of the works of each device, in order."""
        rows: list[list[int]] = [[] for _ in range(self._over.count)]
        for number, work in enumerate(works):
            assert work.plan is not None
            rows[work.plan.device].append(number)
        return rows

    def _pack(self, out: Sequence[Packed], profile: Profile, works: Sequence[SegmentsWork]) -> Kept:  # type: ignore[override]
        kept = [
            super(PartedExecutor, self)._pack(row, profile, [works[number] for number in numbers])
            for row, numbers in zip(out, self._rows(works), strict=True)
        ]
        shifts = [one.shift for one in kept if one.shift is not None]
        return Kept(np.concatenate([one.slots for one in kept]), np.concatenate(shifts) if shifts else None)

    def _over_catalog(self, profile: Profile, works: Sequence[SegmentsWork]) -> tuple[CatalogTables, Filters]:
        filters = [NO_FILTER] * (self._over.count * profile.batch)
        for device, numbers in enumerate(self._rows(works)):
            for place, number in enumerate(numbers):
                filters[device * profile.batch + place] = works[number].filter
        return self._tables, self._filters.lay_out(len(filters), filters)

    def _outcomes(self, profile: Profile, works: Sequence[SegmentsWork], found: Any) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(works)
        for device, numbers in enumerate(self._rows(works)):
            size = profile.width if profile.kind == "rank" else profile.batch
            row = jax.tree.map(lambda x, at=device * size, size=size: x[at : at + size], found)
            own = super()._outcomes(profile, [works[number] for number in numbers], row)
            for number, outcome in zip(numbers, own, strict=True):
                outcomes[number] = outcome
        return [outcome for outcome in outcomes if outcome is not None]


def _on_each(
    *given: Any,
    body: Callable[..., Any],
    devices: Replicated,
    specs: tuple[Any, ...],
    made: Any,
    **static: Any,
) -> Any:
    def call(*own: Any) -> Any:
        return inspect.unwrap(body)(*own, **static)

    return devices.spread(call, specs, made)(*given)
