# SPDX-License-Identifier: Apache-2.0
"""The sums of bat_placement: a link's time, what nodes hold and fetch, and what is claimed of it. Nothing is timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import bat_placement as bench
from benchmarks.bat_nodes import NODES, Cluster, PoolShape, System, TokenBucket
from jgr.placement.items import Items, Workers, hash_items, replicate
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.policies.batching import Job, Profile
from jgr.serving.policies.sources import UnplannedPrompt
from jgr.traffic.workloads import Access

SHAPE = PoolShape(pages=80, page_tokens=4, cell_tokens=2)
PROFILES = (Profile("rank", 1, 64, 4, packed=True, context=64),)
CONTENTS = [Content.of(np.full(1 + row % 3, row, np.int32)) for row in range(16)]
ITEMS = Items(1.0 / np.arange(1, 17), np.array([len(x) for x in CONTENTS]), bytes_per_token=8, cell_tokens=2)


def test_a_bucket_passes_its_burst_at_once_and_the_rest_at_its_rate() -> None:
    link = TokenBucket(rate=10.0, burst=5.0)
    assert link.passed(3, 0.0) == 0.0  # 2 left
    assert link.passed(12, 0.0) == 1.0  # 10 behind
    assert link.passed(10, 0.5) == 2.0  # behind those: 5 still to go, and 10
    assert link.passed(5, 100.0) == 100.0  # idle meanwhile, but no more than the burst is saved
    assert link.passed(5, 100.0) == 100.5


def _job(number: int, user: int, history: int, rows: list[int]) -> Job:
    items = [(row, CONTENTS[row]) for row in rows]
    known = Content.of(np.full(history, user, np.int32))
    prompt = UnplannedPrompt(make_prompt(known, np.zeros(1, np.int32), items, key=f"id:{user}", room=4))
    tokens = history + sum(len(CONTENTS[row]) for row in rows) + 1
    return Job(number, "rank", tokens, len(rows), number * 10**9, None, prompt)


@pytest.mark.parametrize("place", [replicate, hash_items])
def test_what_a_request_reads_is_there_or_fetched_and_counted_alike(place: Any) -> None:
    placement = place(ITEMS, Workers(NODES, 768))
    cluster = Cluster(placement, CONTENTS, SHAPE, PROFILES)
    system = System("some", placement)
    rng = np.random.default_rng(0)
    moved = np.zeros((NODES, NODES), np.int64)
    layouts = set()
    for number in range(60):
        user, rows = int(rng.integers(20)), rng.choice(16, 4, replace=False).tolist()
        access = Access(number * 10**9, user, 3 + user, np.array(rows, np.int32))
        planned = cluster.plan(_job(number, user, 3 + user, rows), access)
        system.plans.append(planned)
        system.fetched.append(cluster.fetched(planned))
        layouts.add(planned.prompt.layout)
        node = user % NODES
        if planned.prompt.layout == "item_prefix":
            assert planned.rows.tolist() == rows, "all are held, so none is computed"
            for row in rows:
                if placement.owner[row] not in (-1, node):
                    moved[placement.owner[row], node] += 8 * len(CONTENTS[row])
        else:
            assert len(planned.rows) == 0
    assert layouts == {"user_prefix", "item_prefix"}
    found, counted_differently = bench.moved_bytes(system)
    assert found.tolist() == moved.tolist() and counted_differently == 0
    assert (moved.sum() > 0) == (place is hash_items)
    # A node's memory: 768 bytes, pages of 32; what lands there is not counted.
    for number, holder in enumerate(cluster.nodes):
        users = holder.meta.pages.limit("user")
        assert users == (768 - placement.used_bytes()[number]) // 32
        assert 0 < holder.meta.pages.used("user") <= users
        holder.items.check()


def test_claims_compare_with_replicate_on_the_same_link_of_the_same_setting() -> None:
    def row(users: str, skew: float, name: str, speeds: dict[int, float]) -> dict[str, Any]:
        links = [{"gbit_per_s": gbit, "requests_per_s": speed} for gbit, speed in speeds.items()]
        setting = {"users": users, "top10_share": skew}
        return {**setting, "placement": name, "links": links, "pairs_counted_differently": 0}

    rows = [
        row("all", 0.9, "replicate", {10: 10.0, 100: 10.0}),
        row("all", 0.9, "hash", {10: 8.0, 100: 11.0}),
        row("all", 0.9, "hrcs", {10: 12.0}),
        row("all", 0.9, "hrcs", {100: 9.0}),
        row("returning", 0.5, "replicate", {10: 20.0}),
        row("returning", 0.5, "hrcs", {10: 21.0}),
    ]
    assert [(claim.id, claim.value, claim.holds) for claim in bench.claims(rows)] == [
        ("replicate-over-hash-at-10-gbit-all-users-at-90-percent-skew", 1.25, True),
        ("hrcs-over-replicate-at-10-gbit-all-users-at-90-percent-skew", 1.2, True),
        ("hrcs-over-replicate-at-100-gbit-all-users-at-90-percent-skew", 0.9, False),
        ("hrcs-over-replicate-at-10-gbit-returning-users-at-50-percent-skew", 1.05, True),
        ("pairs-of-nodes-whose-bytes-are-counted-differently", 0, True),
    ]
