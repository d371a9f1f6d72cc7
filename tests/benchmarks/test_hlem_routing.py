# SPDX-License-Identifier: Apache-2.0
"""Routers by users, by rows and by both, on small fleets; the virtual node against the epoch model."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import hlem_routing
from benchmarks.hlem_routing import Kept, router
from jgr.serving.policies.digests import digest
from jgr.serving.policies.routing import Ask, Report
from jgr.simulation.controller import epochs, workload


def test_a_node_keeps_what_was_used_last() -> None:
    kept = Kept(10.0)
    assert [kept.touch(thing, 4.0) for thing in ("a", "b", "a", "c", "b")] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert list(kept.names("user")) == ["user c", "user b"]


def test_a_request_costs_what_the_epoch_model_says() -> None:
    world = workload.world(workload.zipf_users(4000, 0.6), workload.zipf_rows(10**8, 0.8))
    for kept, hits in ((True, 0.3), (False, 0.9)):
        wanted = float(epochs.service_s(world, np.float32(7000), float(kept), np.float32(hits)))
        assert hlem_routing.took_s(world, 7000.0, kept, hits) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("rule", "best"), [("hlem", "user"), ("kv-only", "user"), ("emb-only", "rows")])
def test_each_rule_sees_its_part(rule: str, best: str) -> None:
    """HLEM-18, 5: the node with the user wins over one with all of the rows, unless users do not count."""
    made = router(rule)
    made.become(["user", "rows", "none"])
    read, bits = ["shard 1", "shard 2"], hlem_routing.BITS
    made.heard("user", Report(digest(["user 7"], bits), ns_per_token=1e3, rows_ns=1e6))
    made.heard("rows", Report(b"", ns_per_token=1e3, shards=digest(read, bits), rows_ns=1e6))
    made.heard("none", Report(b"", ns_per_token=1e3, rows_ns=1e6))
    assert made.rank(Ask("1", "user 7", 8000.0, (), 0.0, 120.0, shards=read), 1)[0] == best


def test_all_rules_serve_the_same_requests_and_a_router_that_knows_users_finds_more() -> None:
    users = hlem_routing.make_users(np.arange(1, 200), 0, number=300)
    found = {rule: hlem_routing.serve(users, rule, "steady", 60.0, 5, 0) for rule in hlem_routing.RULES}
    assert len({len(of.latency_s) for of in found.values()}) == 1
    assert found["kv-only"].user_hits > found["random"].user_hits + 0.05
    assert all(of.latency_s.min() > 0 for of in found.values())
