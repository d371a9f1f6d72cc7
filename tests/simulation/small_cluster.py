# SPDX-License-Identifier: Apache-2.0
"""Four nodes over sixteen items, and sixty requests that they plan; what each fetches is counted beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.placement.items import ItemPlacement, Items, Workers
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.sources import UnplannedPrompt
from jgr.simulation.node import Cluster, NodeMemory, Planned
from jgr.traffic.workloads import Access

NODES, NODE_BYTES = 4, 768
MEMORY = NodeMemory(pages=80, page_tokens=4, cell_tokens=2)
PROFILES = (Profile("rank", 1, 64, 4, packed=True, context=64),)
CONTENTS = [Content.of(np.full(1 + row % 3, row, np.int32)) for row in range(16)]
ITEMS = Items(1.0 / np.arange(1, 17), np.array([len(x) for x in CONTENTS]), bytes_per_token=8, cell_tokens=2)


class Planning(NamedTuple):
    """requests: each one's user, items and plan. moved: [nodes, nodes] bytes read, by source and reader."""

    placement: ItemPlacement
    cluster: Cluster
    requests: list[tuple[int, list[int], Planned]]
    moved: npt.NDArray[np.int64]


def job(number: int, user: int, history: int, rows: list[int]) -> Job:
    items = [(row, CONTENTS[row]) for row in rows]
    known = Content.of(np.full(history, user, np.int32))
    prompt = UnplannedPrompt(make_prompt(known, np.zeros(1, np.int32), items, key=f"id:{user}", room=4))
    tokens = history + sum(len(CONTENTS[row]) for row in rows) + 1
    return Job(number, "rank", tokens, len(rows), number * 10**9, None, prompt)


def plan_requests(place: Any) -> Planning:
    """place: of items over workers, such as jgr.placement.items.replicate."""
    placement = place(ITEMS, Workers(NODES, NODE_BYTES))
    cluster = Cluster(placement, CONTENTS, MEMORY, PROFILES)
    rng = np.random.default_rng(0)
    planning = Planning(placement, cluster, [], np.zeros((NODES, NODES), np.int64))
    for number in range(60):
        user, rows = int(rng.integers(20)), rng.choice(16, 4, replace=False).tolist()
        access = Access(number * 10**9, user, 3 + user, np.array(rows, np.int32))
        planned = cluster.plan(job(number, user, 3 + user, rows), access)
        planning.requests.append((user, rows, planned))
        for row in rows if planned.prompt.layout == "item_prefix" else ():
            if placement.owner[row] not in (-1, user % NODES):
                planning.moved[placement.owner[row], user % NODES] += 8 * len(CONTENTS[row])
    return planning
