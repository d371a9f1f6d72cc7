# SPDX-License-Identifier: Apache-2.0
"""The sums of bat_placement: what nodes fetch, counted three ways, and what is claimed of it. Nothing is timed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import bat_placement as bench
from benchmarks.bat_nodes import System
from jgr.placement.items import hash_items, replicate
from tests.simulation.small_cluster import plan_requests


@pytest.mark.parametrize("place", [replicate, hash_items])
def test_bytes_between_nodes_are_counted_alike(place: Any) -> None:
    planning = plan_requests(place)
    system = System("some", planning.placement)
    for _, _, planned in planning.requests:
        system.plans.append(planned)
        system.fetched.append(planning.cluster.fetched(planned))
    found, counted_differently = bench.moved_bytes(system)
    assert found.tolist() == planning.moved.tolist() and counted_differently == 0
    assert (found.sum() > 0) == (place is hash_items)


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
