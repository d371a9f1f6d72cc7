# SPDX-License-Identifier: Apache-2.0
"""Nodes that cache items as a placement says and users in the memory that is left, and plan requests over both.

The policies and the bookkeeping are those of `jgr serve`; the life cycle's steps put the items where they belong. No
bytes are moved: a plan says what would be read, from where, and what would be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Content
from jgr.cache.hotness import ExponentialWindow
from jgr.cache.meta import SPLITS, CacheMeta
from jgr.cache.pages import Pages
from jgr.config import CacheConfig
from jgr.data.workloads import Access
from jgr.placement.items import ItemPlacement
from jgr.placement.lifecycle import Lifecycle
from jgr.placement.worker import CacheWorker, item_name
from jgr.serving.paged_executor import PoolShape
from jgr.serving.policies.batching import Job, Profile
from jgr.serving.policies.prompt_scheduling import PlannedPrompt, PromptScheduler
from jgr.serving.work import SegmentsWork

Int64 = npt.NDArray[np.int64]
Key = tuple[int, str, int, bool, int]


class Planned(NamedTuple):
    """A request on its node. rows: those read from a cache, its own or another's."""

    number: int
    node: int
    profile: Profile
    prompt: PlannedPrompt
    rows: npt.NDArray[np.int32]

    @property
    def key(self) -> Key:
        """Equal for plans of a request that give a device the same to do."""
        user = self.prompt.user
        return self.number, self.prompt.layout, user.cached, user.write is None, self.prompt.cached_tokens


class Run(NamedTuple):
    """What is timed."""

    profile: Profile
    work: SegmentsWork

    @property
    def new_tokens(self) -> int:
        assert self.work.plan is not None
        return self.work.plan.computed_tokens

    @property
    def cached_tokens(self) -> int:
        assert self.work.plan is not None
        return self.work.plan.cached_tokens


class Node:
    """A node's memory: placed items, landing cells for all items that are placed elsewhere, which do not count as its
    memory because what lands there is forgotten, and users in what the budget leaves."""

    def __init__(
        self, placement: ItemPlacement, number: int, contents: Sequence[Content], shape: PoolShape
    ) -> None:
        items, budget = placement.items, placement.workers.capacity_bytes
        page_bytes = shape.page_tokens * items.bytes_per_token
        held = items.room_bytes[placement.holding > 0].sum()
        item_pages = -(-int(held) // page_bytes)
        user_pages = int(budget - placement.used_bytes()[number]) // page_bytes
        pages = Pages(shape.pages, shape.cells, SPLITS)
        pages.set_limit("item", item_pages)
        pages.set_limit("user", user_pages)
        window = ExponentialWindow(round(CacheConfig().window_s * 1e9), 10 * shape.pages)
        self.meta = CacheMeta(pages, shape.cell_tokens, window)
        self._contents = contents
        self.items = CacheWorker(self.meta, contents.__getitem__)

    def land(self, rows: Sequence[int]) -> None:
        """Cells for items that are placed elsewhere."""
        for row in rows:
            entry = self.meta.extend(item_name(row), self._contents[row])
            assert entry is not None
            self.meta.written(entry)


class Cluster:
    """Nodes under a placement, which the life cycle's steps have brought about."""

    def __init__(
        self,
        placement: ItemPlacement,
        contents: Sequence[Content],
        shape: PoolShape,
        profiles: Sequence[Profile],
    ) -> None:
        self.placement = placement
        self.nodes = [Node(placement, number, contents, shape) for number in range(placement.workers.count)]
        self._cycle = Lifecycle(placement.workers)
        for step in self._cycle.plan(placement):
            worker, rows = self.nodes[step.worker].items, step.rows.tolist()
            if step.kind == "copy":
                assert worker.copy(rows) is not None
            else:
                worker.publish()
            self._cycle.commit(step)
        every = np.arange(len(placement.items), dtype=np.int32)
        for number, node in enumerate(self.nodes):
            source = self._cycle.where(number, every)
            node.land(every[(source >= 0) & (source != number)].tolist())
            node.items.check()
        self._schedulers = [
            PromptScheduler(profiles, node.meta, max_tokens=8192, policy="hotness") for node in self.nodes
        ]

    def plan(self, job: Job, access: Access) -> Planned:
        """The request as its node serves it, alone, at the time of its arrival."""
        at = access.user % len(self.nodes)
        scheduler = self._schedulers[at]
        group = scheduler.group([job], True, job.arrival_ns)
        assert group is not None
        scheduler.finished(group.jobs, True)
        (prompt,) = group.prompts
        rows = access.items[[segment.cached > 0 for segment in prompt.items]]
        return Planned(job.id, at, group.profile, prompt, rows)

    def fetched(self, planned: Planned) -> Int64:
        """[nodes]: tokens that a request reads from each."""
        tokens = np.zeros(len(self.nodes), np.int64)
        source = self._cycle.where(planned.node, planned.rows)
        np.add.at(tokens, source, self.placement.items.tokens[planned.rows])
        tokens[planned.node] = 0
        return tokens
