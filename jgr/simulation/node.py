# SPDX-License-Identifier: Apache-2.0
"""Simulated serving nodes: each caches the items that a placement gives it, and users in the memory that is left.

The policies and the bookkeeping are those of `jgr serve`, and the life cycle's steps (BAT-12) put the items where they
belong. No bytes are moved: a plan says what would be read, from where, and what would be computed, so that whoever
knows what a device and a link can do can tell how long it takes. Time is an argument; nothing here needs a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Content
from jgr.cache.hotness import ExponentialWindow
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.config import CacheConfig
from jgr.placement.items import ItemPlacement
from jgr.placement.lifecycle import Lifecycle
from jgr.placement.worker import CacheWorker, item_name
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prefix_choice import Policy
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import PlannedPrompt
from jgr.traffic.workloads import Access

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Key = tuple[int, str, int, bool, int]
MAX_TOKENS = 8192
"""The most new tokens that one request may have."""


class NodeMemory(NamedTuple):
    """The size of one node's pool: its pages, the tokens in a page, and the tokens in a cell.

    A page holds a whole number of cells.
    """

    pages: int
    page_tokens: int
    cell_tokens: int


class Planned(NamedTuple):
    """A request as its node serves it. rows: [n] int32, the items that are read from a cache, of any node."""

    number: int
    node: int
    profile: Profile
    prompt: PlannedPrompt
    rows: Int32

    @property
    def key(self) -> Key:
        """What a device's work depends on: two plans of one request with the same key give it the same work."""
        user = self.prompt.user
        return self.number, self.prompt.layout, user.cached, user.write is None, self.prompt.cached_tokens


class Node:
    """One node's memory: the items placed here, and users in what the placement's capacity leaves.

    Items that are placed on other nodes have cells here to land in. These do not count as the node's memory, because
    what lands there is forgotten after the request.
    """

    def __init__(
        self,
        placement: ItemPlacement,
        number: int,
        contents: Sequence[Content],
        memory: NodeMemory,
        policy: Policy,
    ) -> None:
        items, capacity = placement.items, placement.workers.capacity_bytes
        page_bytes = memory.page_tokens * items.bytes_per_token
        held = items.room_bytes[placement.holding > 0].sum()
        hotness = None
        if policy == "hotness":
            hotness = ExponentialWindow(round(CacheConfig().window_s * 1e9), 10 * memory.pages)
        room = Room(memory.cell_tokens, step=memory.cell_tokens)  # a token stands for a byte
        pages = Pages(memory.pages, memory.page_tokens)
        self.meta = CacheMeta(pages, {"user": room, "item": room}, hotness)
        self.meta.set_limit("item", -(-int(held) // page_bytes))
        self.meta.set_limit("user", int(capacity - placement.used_bytes()[number]) // page_bytes)
        self._contents = contents
        self.items = CacheWorker(self.meta, contents.__getitem__)

    def land(self, rows: Sequence[int]) -> None:
        """Give cells to items that are placed elsewhere, so that a request can read them here."""
        for row in rows:
            entry = self.meta.extend(item_name(row), self._contents[row])
            assert entry is not None
            self.meta.written(entry)


class Cluster:
    """Nodes under a placement, which the life cycle's steps have brought about.

    contents: the tokens of each item, by its row. A user's requests all go to one node, `user % nodes`.
    """

    def __init__(
        self,
        placement: ItemPlacement,
        contents: Sequence[Content],
        memory: NodeMemory,
        profiles: Sequence[Profile],
        policy: Policy = "hotness",
    ) -> None:
        self.placement = placement
        self.nodes = [
            Node(placement, number, contents, memory, policy) for number in range(placement.workers.count)
        ]
        self._cycle = Lifecycle(placement.workers)
        for step in self._cycle.plan(placement):
            worker, rows = self.nodes[step.worker].items, step.rows.tolist()
            if step.kind == "copy":
                copied = worker.copy(rows)
                assert copied is not None
            else:
                worker.publish()
            self._cycle.commit(step)
        every = np.arange(len(placement.items), dtype=np.int32)
        for number, node in enumerate(self.nodes):
            source = self._cycle.where(number, every)
            node.land(every[(source >= 0) & (source != number)].tolist())
            node.items.check()
        self._schedulers = [
            PromptScheduler(profiles, node.meta, max_tokens=MAX_TOKENS, policy=policy) for node in self.nodes
        ]

    def plan(self, job: Job, access: Access) -> Planned:
        """The request as its node serves it, alone in its batch, at the time of its arrival."""
        at = access.user % len(self.nodes)
        scheduler = self._schedulers[at]
        group = scheduler.group([job], True, job.arrival_ns)
        assert group is not None
        scheduler.finished(group.jobs, True)
        (prompt,) = group.prompts
        rows = access.items[[segment.cached > 0 for segment in prompt.items]]
        return Planned(job.id, at, group.profile, prompt, rows)

    def fetched(self, planned: Planned) -> Int64:
        """The number of tokens that the request reads from each other node, [nodes]."""
        tokens = np.zeros(len(self.nodes), np.int64)
        source = self._cycle.where(planned.node, planned.rows)
        np.add.at(tokens, source, self.placement.items.tokens[planned.rows])
        tokens[planned.node] = 0
        return tokens
