# SPDX-License-Identifier: Apache-2.0
"""Items' keys and values, each item alone, by the requests and programs that serve (BAT-12).

An engine is asked to rank the items with the items first, as a batch request, which gives way to all others. That
leaves each item's keys and values in its cache, from where they are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Entry
from jgr.cache.host import read_cells
from jgr.cache.meta import CacheMeta
from jgr.config import ConfigError, UserError
from jgr.models.words import WORD
from jgr.placement.kv_folder import FORMAT, About, KvBuilder, require_room
from jgr.placement.shared_items import Block, block_of
from jgr.placement.worker import item_name
from jgr.serving.api import RankRequest
from jgr.serving.decoders.caching import Caching, identity
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import Engine
from jgr.serving.policies.sources import part_of

LONG_MS = 60_000.0
"""How long a request for items may wait for a device that others use."""


def portions(engine: Engine[ServedDecoder], rows: Sequence[int]) -> Iterator[list[int]]:
    """The rows in parts that one request takes and the cache keeps, in order."""
    caching = _caching(engine)
    assert caching.segments is not None
    lengths, probe = caching.segments.item_lengths, len(caching.segments.probe)
    one = engine.served.prepare(_request(engine, rows[:1]), "")
    assert one.prompt is not None
    fixed, repair = one.usage.prompt_tokens - int(lengths[rows[0]]) - probe, one.prompt.repair
    most = max(profile.tokens for profile in engine.served.executors.profiles if profile.kind == "rank")
    kv = caching.kv
    cells = caching.limits["item"] * kv.cells.per_page // 2  # half, for others keep theirs meanwhile
    part: list[int] = []
    tokens, kept = fixed, 0
    for row in rows:
        length = int(lengths[row])
        new = length + probe + min(repair.first + repair.last, length) + part_of(repair.share, length)
        takes = -(-length // kv.tokens) * kv.parts
        full = len(part) >= engine.info.max_candidates
        if part and (full or tokens + new > most or kept + takes > cells):
            yield part
            part, tokens, kept = [], fixed, 0
        part.append(row)
        tokens, kept = tokens + new, kept + takes
    if part:
        yield part


async def compute(engine: Engine[ServedDecoder], rows: Sequence[int]) -> dict[int, Block]:
    """The blocks of rows, as many as one of `portions` has; without those that the cache did not keep.

    Called on the engine's event loop. RequestError where the engine does not take the request.
    """
    caching = _caching(engine)
    part = (
        caching.lease.again()
    )  # an engine that is replaced has its answer out, and closes, while this still reads
    try:
        return await _computed(engine, caching, rows)
    finally:
        part.close()


async def _computed(engine: Engine[ServedDecoder], caching: Caching, rows: Sequence[int]) -> dict[int, Block]:
    own = set() if caching.frequencies is None else caching.frequencies.own
    own.add(tuple(rows))
    try:
        await engine.answer(_request(engine, rows))
    finally:
        own.discard(tuple(rows))
    entries: dict[int, Entry] = {}
    assert caching.segments is not None
    meta, host = caching.meta, caching.memory.host
    for row in rows:
        content = caching.segments.content(row)
        entry = meta.find(item_name(row), content)
        if entry is not None and entry.tokens == len(content):
            meta.hold(entry)
            entries[row] = entry
    if host is not None:
        host.plan(meta.take_moves(), caching.kv.cells, meta.epoch)
    epoch = meta.epoch
    try:
        words = await asyncio.to_thread(_read, caching, [entry.cells for entry in entries.values()], epoch)
    finally:
        for entry in entries.values():
            meta.release(entry)
    return {row: block_of(np.ascontiguousarray(each)) for row, each in zip(entries, words, strict=True)}


def _read(caching: Caching, cells: Sequence[tuple[int, ...]], epoch: int) -> list[npt.NDArray[np.uint32]]:
    if not cells:
        return []
    if caching.memory.host is not None:
        caching.memory.host.catch_up()
    every = tuple(cell for of in cells for cell in of)
    found = read_cells(caching.memory.pool, every, caching.kv.cells, epoch)
    return np.split(found, np.cumsum([len(of) for of in cells])[:-1])


def _request(engine: Engine[ServedDecoder], rows: Sequence[int]) -> RankRequest:
    ids = engine.catalog.item_ids
    return RankRequest(
        history=[ids[0]],
        candidates=[ids[row] for row in rows],
        layout="item_prefix",
        priority="batch",
        deadline_ms=LONG_MS,
        top_k=1,
    )


def _caching(engine: Engine[ServedDecoder]) -> Caching:
    caching = engine.served.caching
    assert caching is not None and caching.segments is not None, "the engine caches no items"
    if not isinstance(caching.lease.held, CacheMeta):
        raise ConfigError("data_parallel.devices: jgr kv build computes on one device")
    return caching


async def build(engine: Engine[ServedDecoder], folder: Path, show: Progress) -> tuple[int, int]:
    """Write the blocks of all of a catalog's items to a folder; returns how many there are, and how many are new.

    What is in the folder is not computed again. The engine is started. Raises UserError as KvBuilder, and where the
    disk or the cache is too small.
    """
    caching, catalog = _caching(engine), engine.catalog
    assert caching.segments is not None
    kv, lengths, content = caching.kv, caching.segments.item_lengths, caching.segments.content
    name = identity(engine.info.version.rpartition("@")[2], kv)
    about = About(FORMAT, name, kv.cells.words, engine.info.version)
    with KvBuilder(folder, about) as builder:
        found = len(builder)
        wanted: dict[bytes, int] = {}
        for row in range(catalog.n_items):
            digest = content(row).digest
            if not builder.has(digest):
                wanted.setdefault(digest, row)
        cells = sum(-(-int(lengths[row]) // kv.tokens) * kv.parts for row in wanted.values())
        require_room(folder, cells * kv.cells.words * WORD)
        left, done, total = list(wanted.values()), 0, len(wanted)
        show(0, total, "")
        while left:
            missed: list[int] = []
            for part in portions(engine, left):
                blocks = await compute(engine, part)
                await asyncio.to_thread(builder.add, {content(row).digest: blocks[row] for row in blocks})
                missed += [row for row in part if row not in blocks]
                done += len(blocks)
                show(done, total, "")
            if len(missed) == len(left):
                raise UserError("cache.device_mb: too little for an item's keys and values")
            left = missed
        return len(builder), len(builder) - found
