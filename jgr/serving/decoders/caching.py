# SPDX-License-Identifier: Apache-2.0
"""What an engine needs to serve with cached segments: the meta service, the policies over it, and prompts' parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET

from jgr.cache.hotness import ExponentialWindow, Hotness, ItemFrequencies
from jgr.cache.memory import Lease, Memory
from jgr.cache.meta import CacheMeta
from jgr.cache.neighbours import Neighbour, Neighbours
from jgr.cache.pages import Room, pieces
from jgr.config import CacheConfig, Config, ConfigError
from jgr.models.decoder import DecoderConfig
from jgr.models.packed import KVCells
from jgr.models.rounded import Rounded
from jgr.models.words import WORD, Cells
from jgr.placement.shared_items import SharedItems, capacity_bytes
from jgr.prompt.candidates import SegmentPrompts
from jgr.serving.decoders.library import LibraryLoader
from jgr.serving.decoders.translation import Task
from jgr.serving.decoders.work import SegmentsWork, Work
from jgr.serving.policies.jobs import Kind, Profile, Request, Start
from jgr.serving.policies.lanes import Lane
from jgr.serving.policies.parted import PartedScheduler, Parts
from jgr.serving.policies.prefix_choice import KEEP_ITEMS
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.prototypes import KIND, PrototypePlace

REMEMBERED = 10
"""Users whose frequency is remembered without a cache entry, for each page of the pool."""

MOST_FOR_ITEMS = 0.8
"""The largest share of the pages that items take where nothing is configured and users are cached too."""


@dataclass(frozen=True, eq=False)
class Caching:
    """The parts that an engine with a cache has beyond one without.

    memory: the server's. lease: on the meta service, which other engines of the same model may share. kv: the cells of
    its entries. limits: pages of each kind of entries. groupings: by kind of request, what plans the prompts. segments:
    makes prompts with candidates in them; None where candidates are not in the prompt. prototypes, loader: where the
    library of prototypes stands in the pool, and what fills that; None: there is none. items: those that the nodes of a
    fleet hold for each other, over the meta service of items_lease; frequencies: counts requests for them. None: none
    are.
    """

    memory: Memory
    lease: Lease[CacheMeta] | Lease[Neighbours]
    kv: KVCells
    limits: Mapping[str, int]
    groupings: Mapping[Kind, PromptScheduler | PartedScheduler]
    segments: SegmentPrompts | None
    prototypes: PrototypePlace | None = None
    loader: LibraryLoader | None = None
    items: SharedItems | None = None
    items_lease: Lease[CacheMeta] | None = None
    frequencies: ItemFrequencies | None = None

    @property
    def meta(self) -> CacheMeta:
        """The meta service of one device; not where several have one each."""
        assert isinstance(self.lease.held, CacheMeta)
        return self.lease.held

    def planner(self, kind: Kind) -> PromptScheduler:
        """What plans the prompts of a kind on one device; not where several part them."""
        found = self.groupings[kind]
        assert isinstance(found, PromptScheduler)
        return found

    def start(self) -> None:
        """Divide the model's pages as this engine's catalog wants them. Called on the event loop, as all planning."""
        for kind, pages in self.limits.items():
            self.lease.held.set_limit(kind, pages)
        if isinstance(self.lease.held, Neighbours):
            self.lease.held.frequencies = self.frequencies
            return
        if self.items is not None:
            self.meta.below, self.meta.frequencies = self.items, self.frequencies
        host = self.memory.host
        if (
            host is not None
        ):  # now, for the next plan may be another model's, which takes the pages that became free
            host.plan(self.meta.take_moves(), self.kv.cells, self.meta.epoch)
        if self.prototypes is not None:
            self.prototypes.cells()
        self.plan_library()

    def plan_library(self) -> None:
        """What is planned from now on may read the library where its cells are."""
        if self.prototypes is not None and self.loader is not None:
            self.loader.plan(self.prototypes.take())

    def close(self) -> None:
        """Give all parts back. Further calls do nothing."""
        if self.items is not None and self.items_lease is not None:
            if self.meta.below is self.items:
                self.meta.below = None
            self.items.close(self.items_lease.close)
        if self.prototypes is not None:
            self.prototypes.close()
        self.lease.close()


def rank_profiles(config: Config) -> tuple[Profile, ...]:
    """The compiled shapes of prompts with candidates; a row holds rank.candidates of all its requests together."""
    rank = config.rank
    return tuple(
        Profile("rank", rank.requests, tokens, rank.candidates, packed=True, context=context)
        for tokens in rank.tokens
        for context in rank.context
    )


def recommend_profiles(config: Config, longest: int) -> tuple[Profile, ...]:
    """The compiled shapes of generation after cached tokens. longest: tokens of a prompt, at most.

    Two for each number of requests and length of prompts that are compiled without a cache: one where all tokens may be
    new, and one where a request has cache.new_tokens at most. A row has the tokens of all its requests, up to the
    largest of rank.tokens and rank.context, or of one prompt.
    """
    profiles, rank = config.profiles, config.rank
    sizes: dict[tuple[int, int, int], None] = {}
    every = sorted({*profiles.tokens, max(*rank.tokens, *profiles.tokens)})
    lengths = [length for at, length in enumerate(every) if not at or every[at - 1] < longest]
    for batch in profiles.batch:
        for longest in lengths:
            tokens = max(longest, min(batch * longest, max(rank.tokens)))
            context = max(longest, min(batch * longest, max(rank.context)))
            sizes[batch, min(batch * config.cache.new_tokens, tokens), context] = None
            sizes[batch, tokens, context] = None
    width = max(profiles.widths)
    return tuple(Profile("recommend", b, new, width, packed=True, context=old) for b, new, old in sizes)


def kv_cells(
    cache: CacheConfig, cfg: DecoderConfig, dtype: str, itemsize: int, page_bytes: int, devices: int = 1
) -> KVCells:
    """Cells for a decoder's keys and values. ConfigError where a page does not hold one layer of a cell's tokens.

    dtype, itemsize: of keys and values as they are computed, which cache.quantize may have held in 8 bits.
    devices: how many share the model; a cell has the key/value heads of one of them.
    """
    run, rounded = 2 * cfg.kv_heads // devices * cfg.head_dim * itemsize, None
    if cache.quantize:
        rounded = Rounded(cache.quantize, 2 * cfg.kv_heads // devices, cfg.head_dim)
        run = rounded.words * WORD
    layer = cache.cell_tokens * run
    if run % WORD or layer > page_bytes:
        raise ConfigError(
            f"cache.page_kb: a layer of {cache.cell_tokens} tokens (cache.cell_tokens) has {layer} bytes, "
            f"a page {page_bytes}"
        )
    parts, layers = pieces(cfg.layers, layer, page_bytes)
    cells = Cells.of(layers * layer, page_bytes)
    return KVCells(dtype, run // WORD, cache.cell_tokens, layers, parts, cells, rounded)


def kv_room(kv: KVCells) -> Room:
    """The room that an entry takes, by its number of tokens."""
    return Room(kv.cells.words * WORD, kv.parts, kv.tokens)


def item_share(cache: CacheConfig, kv: KVCells, pages: int, segments: SegmentPrompts | None) -> float:
    """The share of the pages that items may take.

    What is configured; else none or all where the policy caches users or items alone; where it caches both, room for
    all items (BAT-12), within MOST_FOR_ITEMS.
    """
    if cache.item_share is not None:
        return cache.item_share
    if segments is None or cache.policy in ("none", "user"):
        return 0.0
    if cache.policy == "item":
        return 1.0
    cells = int((-(-segments.item_lengths // kv.tokens)).sum()) * kv.parts
    return min(MOST_FOR_ITEMS, (-(-cells // kv.cells.per_page)) / pages)


def make_caching(
    config: Config,
    memory: Memory,
    revision: str,
    kv: KVCells,
    profiles: Sequence[Profile],
    segments: SegmentPrompts | None,
    loader: LibraryLoader | None = None,
) -> Caching:
    """The policies over the pool. revision: of the model. profiles: packed ones, of the kinds that are planned. loader:
    of its library. ConfigError where the pool has no room for the library beside other entries."""
    cache, name = config.cache, config.model.name
    pages = memory.limit(name) if cache.policy != "none" else 0
    of_library = 0 if loader is None else -(-kv_room(kv).of(loader.prototypes) // kv.cells.per_page)
    count = pages - of_library
    if of_library and count < 1:
        least = (of_library + 1) * memory.pages.page_bytes / 2**20
        raise ConfigError(
            f"cache.device_mb: the pool has no room for the prototypes of cache.library, which need {least:.3g} MB "
            "with the least of other entries"
        )
    items = round(item_share(cache, kv, count, segments) * count)
    limits = {"item": items, "user": count - items}
    kinds = ["user", "item"]
    if loader is not None:
        limits[KIND] = of_library
        kinds.append(KIND)

    # All that the key of the lease has, so that a reload which changes one of these finds classes of its own.
    owner = "/".join(
        map(str, (f"{name}@{revision}", kv.held, kv.tokens, cache.policy, cache.window_s, *kinds))
    )
    rooms = dict.fromkeys(kinds, kv_room(kv))

    def make_hotness() -> ExponentialWindow | None:
        if cache.policy != "hotness":
            return None
        return ExponentialWindow(round(cache.window_s * 1e9), REMEMBERED * count)

    if config.data_parallel.devices > 1:
        return _parted(config, memory, kv, profiles, segments, limits, owner, rooms, make_hotness)

    def make() -> CacheMeta:
        host = None if memory.host is None or not count else memory.host.pages
        return CacheMeta(memory.pages, rooms, make_hotness(), host, owner)

    lease = memory.lease(("kv", owner, kv), make)
    prototypes = (
        None if loader is None else PrototypePlace(lease.held, loader.prototypes, kv.tokens, kv.parts)
    )
    lane = Lane()  # of this engine: another one's programs may be dispatched at any time
    groupings = {
        kind: _planner(config, of, lease.held, lane, prototypes) for kind, of in _by_kind(profiles).items()
    }
    caching = Caching(memory, lease, kv, limits, groupings, segments, prototypes, loader)
    return _with_items(config, caching, f"{name}@{revision}") if "rank" in groupings else caching


def _by_kind(profiles: Sequence[Profile]) -> dict[Kind, list[Profile]]:
    found: dict[Kind, list[Profile]] = {}
    for profile in profiles:
        found.setdefault(profile.kind, []).append(profile)
    return found


def _planner(
    config: Config,
    profiles: Sequence[Profile],
    meta: CacheMeta,
    lane: Lane,
    prototypes: PrototypePlace | None = None,
) -> PromptScheduler:
    cache = config.cache
    return PromptScheduler(
        profiles,
        meta,
        max_tokens=config.batching.max_tokens,
        policy=cache.policy,
        hysteresis=cache.hysteresis,
        rule=cache.rule,
        lane=lane,
        prototypes=prototypes,
    )


def copies_items(config: Config) -> bool:
    """Whether devices copy kept items from each other."""
    keeps = config.cache.policy in KEEP_ITEMS and config.rank.method != "likelihood"
    return config.data_parallel.devices > 1 and keeps and config.data_parallel.reads != "compute"


def _parted(
    config: Config,
    memory: Memory,
    kv: KVCells,
    profiles: Sequence[Profile],
    segments: SegmentPrompts | None,
    limits: Mapping[str, int],
    owner: str,
    rooms: Mapping[str, Room],
    make_hotness: Callable[[], Hotness | None],
) -> Caching:
    """The policies over the pools of several devices."""
    cache, parallel, shares = config.cache, config.data_parallel, copies_items(config)

    def make() -> Neighbours:
        metas = [
            Neighbour(number, pages, rooms, make_hotness(), owner)
            for number, pages in enumerate(memory.pages_of)
        ]
        return Neighbours(metas, shares, parallel.hot_share, memory.reads)

    lease = memory.lease(("kv", owner, kv, "parted"), make)
    lanes = [Lane() for _ in lease.held.metas]
    parts: Parts = {}
    groupings = {
        kind: PartedScheduler(
            [_planner(config, of, meta, lane) for meta, lane in zip(lease.held.metas, lanes, strict=True)],
            lease.held,
            parts,
        )
        for kind, of in _by_kind(profiles).items()
    }
    frequencies = None
    if shares and segments is not None:
        frequencies = ItemFrequencies(len(segments.item_lengths), round(cache.window_s * 1e9))
    return Caching(memory, lease, kv, limits, groupings, segments, frequencies=frequencies)


def identity(revision: str, kv: KVCells) -> str:
    """What keys and values must have in common for one to stand for the other: weights, numbers, and their order."""
    return f"{revision}/{kv.held}/{kv.run}x{kv.tokens}x{kv.layers}x{kv.parts}"


def _with_items(config: Config, caching: Caching, owner: str) -> Caching:
    """The same with a place for the items that the nodes of a fleet hold for each other, where that is asked for."""
    fleet, segments, memory, kv = config.fleet, caching.segments, caching.memory, caching.kv
    can = segments is not None and config.cache.policy in KEEP_ITEMS
    wanted = fleet.items != "none" or config.cache.kv
    if not wanted or not can or memory.host is None or not memory.holds_items(config.model.name):
        return caching
    if config.model.tensor_parallel > 1:
        raise ConfigError("cache.kv and fleet.items: are for one device, not for model.tensor_parallel")
    if config.server.journal:
        raise ConfigError(
            "server.journal: cannot be replayed with fleet.items or cache.kv, since plans depend on what came in time"
        )
    assert segments is not None
    beyond = memory.host.beyond
    pages = min(beyond.count, int(fleet.items_mb * 2**20) // beyond.page_bytes)
    lease = memory.lease(
        ("items", owner, kv), lambda: CacheMeta(beyond, {"item": kv_room(kv)}, owner=f"{owner}/placed")
    )
    bytes_of = capacity_bytes(pages, beyond.page_bytes, kv.cells, kv.parts)
    items = SharedItems(lease.held, memory.host, kv.cells, segments.content, bytes_of)
    window_ns = round(fleet.items_window_s * 1e9)
    frequencies = ItemFrequencies(len(segments.item_lengths), window_ns)
    return replace(caching, items=items, items_lease=lease, frequencies=frequencies)


def planned(start: Start, tasks: Sequence[Task], caching: Caching) -> list[Work]:
    """Give each task's work the plan of its batch, and write into each task what the plan says of it."""
    if caching.memory.host is not None:
        caching.memory.host.plan(start.moves, caching.kv.cells, start.epoch)
    if start.fetches and caching.memory.reads is not None:
        caching.memory.reads.plan(start.fetches, caching.kv.cells, start.epoch)
    caching.plan_library()
    works: list[Work] = []
    for task, request in zip(tasks, start.work, strict=True):
        assert isinstance(request, Request)
        plan = request.plan
        if plan is None:
            works.append(task.work)
            continue
        task.plan, task.moves = plan, start.moves
        task.usage.layout = plan.layout
        task.usage.cached_tokens, task.usage.computed_tokens = plan.cached_tokens, plan.computed_tokens
        task.usage.repaired_tokens = UNSET if plan.repaired_tokens is None else plan.repaired_tokens
        if task.whole is not None and plan.repaired_tokens is not None:
            task.usage.full_recompute = True
        if plan.layout == "causal" and plan.repaired_tokens is not None:
            usage, near = task.usage, plan.approximate_tokens
            usage.approximate_tokens = near
            usage.exact_tokens = usage.prompt_tokens - near - plan.repaired_tokens
        assert isinstance(task.work, SegmentsWork)
        works.append(replace(task.work, plan=plan, epoch=start.epoch))
    return works
