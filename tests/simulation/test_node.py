# SPDX-License-Identifier: Apache-2.0
"""Simulated nodes: what a request reads is there or fetched, and a node's memory is what its placement leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jgr.placement.items import hash_items, replicate
from tests.simulation.small_cluster import NODE_BYTES, NODES, plan_requests


@pytest.mark.parametrize("place", [replicate, hash_items])
def test_what_a_request_reads_is_there_or_fetched(place: Any) -> None:
    planning = plan_requests(place)
    fetched = np.zeros((NODES, NODES), np.int64)
    layouts = set()
    for user, rows, planned in planning.requests:
        assert planned.node == user % NODES
        layouts.add(planned.prompt.layout)
        held = rows if planned.prompt.layout == "item_prefix" else []  # all are held, so none is computed
        assert planned.rows.tolist() == held
        fetched[:, planned.node] += 8 * planning.cluster.fetched(planned)
    assert layouts == {"user_prefix", "item_prefix"}
    assert fetched.tolist() == planning.moved.tolist()
    assert (fetched.sum() > 0) == (place is hash_items)


@pytest.mark.parametrize("place", [replicate, hash_items])
def test_users_have_the_memory_that_the_placement_leaves(place: Any) -> None:
    planning = plan_requests(place)
    for number, node in enumerate(planning.cluster.nodes):
        users = node.meta.pages.limit("user")
        # Pages of 32 bytes; what lands on a node is not counted.
        assert users == (NODE_BYTES - planning.placement.used_bytes()[number]) // 32
        assert 0 < node.meta.pages.used("user") <= users
        node.items.check()


def test_plans_with_the_same_work_have_the_same_key() -> None:
    first, again = plan_requests(hash_items), plan_requests(hash_items)
    assert [p.key for _, _, p in first.requests] == [p.key for _, _, p in again.requests]
    users = [(user, planned.prompt.user.cached) for user, _, planned in first.requests]
    assert any(cached for _, cached in users) and not all(cached for _, cached in users)
