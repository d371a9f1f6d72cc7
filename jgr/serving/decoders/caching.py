# SPDX-License-Identifier: Apache-2.0
"""What an engine needs to serve with cached segments: the meta service, the policies over it, and prompts' parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET

from jgr.cache.entries import Name
from jgr.cache.hotness import ExponentialWindow
from jgr.cache.meta import SPLITS, CacheMeta
from jgr.cache.pages import Pages
from jgr.config import CacheConfig, Config, ConfigError, RankConfig
from jgr.models.decoder import DecoderConfig
from jgr.models.packed import slot_elements
from jgr.prompt.candidates import SegmentPrompts
from jgr.serving.decoders.paged_executor import PoolShape
from jgr.serving.decoders.translation import Task
from jgr.serving.decoders.work import SegmentsWork, Work
from jgr.serving.known_items import user_entry
from jgr.serving.policies.jobs import Kind, Profile, Request, Start
from jgr.serving.policies.prompt_scheduling import PromptScheduler

REMEMBERED = 10
"""Users whose frequency is remembered without a cache entry, for each page of the pool."""


MOST_FOR_ITEMS = 0.8
"""Of the pages, where nothing is configured."""


@dataclass(frozen=True, eq=False)
class Caching:
    """groupings: of the kinds whose prompts are planned; segments: of candidates, where they are in the prompt."""

    meta: CacheMeta
    groupings: Mapping[Kind, PromptScheduler]
    segments: SegmentPrompts | None

    def forget(self, user_id: str) -> int:
        """Drop a user's entries; how many there were."""
        return int(self.meta.forget(Name("user", user_entry(user_id), "user_prefix")))


def packed_profiles(rank: RankConfig, kind: Kind, width: int) -> tuple[Profile, ...]:
    """The compiled shapes of one kind. width: of all candidates together, or of each request's beams."""
    return tuple(
        Profile(kind, rank.requests, tokens, width, packed=True, context=context)
        for tokens in rank.tokens
        for context in rank.context
    )


def pool_shape(cache: CacheConfig, cfg: DecoderConfig, itemsize: int) -> PoolShape:
    """How many pages the configured sizes are; ConfigError where there is not one."""
    page = cache.page_tokens * slot_elements(cfg) * itemsize
    if cache.policy == "none":
        return PoolShape(1, cache.page_tokens, cache.item_cells)
    pages, host_pages = (int(mb * 2**20) // page for mb in (cache.device_mb, cache.host_mb))
    if pages < 1:
        raise ConfigError(f"cache.device_mb: {cache.device_mb} is less than a page of {page / 2**20:.3g} MB")
    return PoolShape(pages, cache.page_tokens, cache.item_cells, host_pages)


def item_share(cache: CacheConfig, shape: PoolShape, segments: SegmentPrompts | None) -> float:
    """Of the pages: as configured; else what the policy has a use for, and all items where both are cached (BAT-12)."""
    if cache.item_share is not None:
        return cache.item_share
    if segments is None or cache.policy in ("none", "user"):
        return 0.0
    if cache.policy == "item":
        return 1.0
    cells = int((-(-segments.item_lengths // shape.cell_tokens)).sum())
    return min(MOST_FOR_ITEMS, (-(-cells // shape.cells)) / shape.pages)


def make_caching(
    config: Config,
    shape: PoolShape,
    profiles: Sequence[Profile],
    segments: SegmentPrompts | None,
) -> Caching:
    """The policies over one pool. profiles: packed ones, of the kinds that are planned."""
    cache = config.cache
    items = round(item_share(cache, shape, segments) * shape.pages)
    pages = Pages(shape.pages, shape.cells, SPLITS)
    pages.set_limit("item", items)
    pages.set_limit("user", shape.pages - items)
    hotness = None
    if cache.policy == "hotness":
        hotness = ExponentialWindow(round(cache.window_s * 1e9), REMEMBERED * shape.pages)
    host = Pages(shape.host_pages, shape.cells, SPLITS) if shape.host_pages else None
    meta = CacheMeta(pages, shape.cell_tokens, hotness, host)
    groupings = {
        kind: PromptScheduler(
            [profile for profile in profiles if profile.kind == kind],
            meta,
            max_tokens=config.batching.max_tokens,
            policy=cache.policy,
            hysteresis=cache.hysteresis,
            rule=cache.rule,
        )
        for kind in {profile.kind: None for profile in profiles}
    }
    return Caching(meta, groupings, segments)


def planned(start: Start, tasks: Sequence[Task]) -> list[Work]:
    """The tasks' works with what their batch's plan says; it is noted in the tasks too."""
    works: list[Work] = []
    for task, request in zip(tasks, start.work, strict=True):
        assert isinstance(request, Request)
        plan = request.plan
        if plan is None:
            works.append(task.work)
            continue
        task.plan = plan
        task.usage.layout = plan.layout
        task.usage.cached_tokens, task.usage.computed_tokens = plan.cached_tokens, plan.computed_tokens
        task.usage.repaired_tokens = UNSET if plan.repaired_tokens is None else plan.repaired_tokens
        assert isinstance(task.work, SegmentsWork)
        works.append(replace(task.work, plan=plan, moves=() if works else start.moves))
    return works
