# SPDX-License-Identifier: Apache-2.0
"""The ablation's systems, its sums and its claims. Nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from benchmarks import bat_ablation as bench
from benchmarks.bat_nodes import NODES, System, link_tokens, place_hot, returning
from jgr.placement.items import Items, Workers
from jgr.prompt.layouts import Kind
from jgr.serving.policies.jobs import Profile
from jgr.serving.policies.sources import PlannedPrompt, PlannedSegment
from jgr.simulation.node import Key, Planned
from jgr.traffic.workloads import BOOKS

ITEMS = Items(1.0 / np.arange(1, 17), np.full(16, 2), bytes_per_token=8, cell_tokens=2)  # 256 bytes
PROFILE = Profile("rank", 1, 64, 4, packed=True, context=64)


def test_returning_users_fill_what_sharded_items_leave() -> None:
    # 4 x 150 GB, less 280,000 x 15 tokens of 28,672 bytes, is 479,577.6 MB; 1586 tokens are 45.473792 MB.
    assert returning(BOOKS) == 10_546


@pytest.mark.parametrize(("memory", "replicated", "held"), [(256, 16, 16 * NODES), (200, 0, 16)])
def test_without_hrcs_items_are_everywhere_or_hashed_where_they_do_not_fit(
    memory: int, replicated: int, held: int
) -> None:
    found = {(system.name, system.gbit): system for system in bench.systems(ITEMS, Workers(NODES, memory))}
    assert {key: system.policy for key, system in found.items()} == {
        ("none", None): "user",
        ("recompute", None): "none",
        ("A", None): "cache_agnostic",
        ("AC", None): "hotness",
        ("AB", 10): "cache_agnostic",
        ("ABC", 10): "hotness",
        ("AB", 100): "cache_agnostic",
        ("ABC", 100): "hotness",
    }
    assert found["none", None].placement.held().sum() == found["recompute", None].placement.held().sum() == 0
    for name in ("A", "AC"):
        assert found[name, None].placement.replicated.sum() == replicated
        assert found[name, None].placement.held().sum() == held
    # At 100 Gb/s the bound is .2 x .033 s x 435,965 tokens/s x 3/4 / 1500 > 1: nothing need be replicated.
    assert found["ABC", 100].placement.held().sum() == 16
    assert found["ABC", 10].placement.budget == found["AB", 10].placement.budget
    budget = place_hot(ITEMS, Workers(NODES, memory), 10).budget
    assert budget is not None and budget.max_remote == pytest.approx(0.2 * 0.033 * 43596.5 * 0.75 / 1500)


def _planned(number: int, node: int, cached: int, computed: int) -> Planned:
    prompt = PlannedPrompt("item_prefix", (PlannedSegment(Kind.USER, ()),), computed, cached)
    return Planned(number, node, PROFILE, prompt, np.zeros(0, np.int32))


def _system(name: str, plans: list[Planned], fetched: list[int], gbit: int | None = None) -> System:
    placement = place_hot(ITEMS, Workers(NODES, 256), 10)
    tokens = [np.array([n, 0, 0, 0], np.int64) for n in fetched]
    return System(name, placement, gbit, plans=plans, fetched=tokens)


def test_a_row_adds_device_and_network_and_shows_who_has_that_link() -> None:
    none = _system("none", [_planned(0, 1, 0, 100), _planned(1, 1, 0, 50)], [0, 0])
    abc = _system("ABC", [_planned(0, 1, 60, 40), _planned(1, 1, 0, 50)], [60, 0], gbit=100)
    other = _system("ABC", [_planned(0, 1, 0, 100), _planned(1, 1, 0, 50)], [0, 0], gbit=10)
    seconds: Mapping[Key, float] = {
        plan.key: s
        for plan, s in zip(
            [*none.plans, *abc.plans[:1], *other.plans], [0.4, 0.2, 0.1, 0.4, 0.2], strict=True
        )
    }
    slower = 450 / link_tokens(100)  # so that our link passes 450 tokens a second, the first 15 at once
    row = bench.make_row(bench.Setting("books-1m", "all", 0.9), [none, other, abc], seconds, 100, slower)
    assert list(row["systems"]) == ["none", "ABC"]
    shown = row["systems"]["ABC"]
    assert (shown["device_ms"], shown["network_ms"], shown["network_share"]) == (150.0, 50.0, 0.25)
    assert (shown["requests_per_s"], row["systems"]["none"]["requests_per_s"]) == (20.0, 13.33)
    assert shown["over_none"] == 1.5 and shown["interval"] == [1.0, 2.0]
    assert (shown["computed_tokens"], shown["hit_rate"]) == (90, 0.4)
    assert row["paper_requests_per_s"] == {"ABC": 126, "AB": 106, "AC": 125, "A": 105, "none": 83}


def test_claims_are_the_papers_order_on_its_network() -> None:
    def row(skew: float, gbit: int, **speeds: float) -> dict[str, Any]:
        setting = {"catalog": "books-280k", "users": "all", "top10_share": skew, "gbit_per_s": gbit}
        return {**setting, "systems": {name: {"requests_per_s": speed} for name, speed in speeds.items()}}

    rows = [
        row(0.9, 100, ABC=12.0, AB=12.0, AC=10.0, A=8.0, none=10.0),
        row(0.9, 10, ABC=1.0, AB=2.0, AC=3.0, A=4.0, none=5.0),
        row(0.5, 100, ABC=12.0, AB=16.0, AC=10.0, A=8.0, none=10.0),
    ]
    assert [(claim.id, claim.value, claim.holds) for claim in bench.claims(rows)] == [
        ("abc-over-ab-books-280k-all-users-paper-1.00", 1.0, True),
        ("abc-over-ac-books-280k-all-users-paper-1.11", 1.2, True),
        ("abc-over-a-books-280k-all-users-paper-1.25", 1.5, True),
        ("abc-over-none-books-280k-all-users-paper-1.54", 1.2, True),
        ("a-over-none-books-280k-all-users-paper-1.23", 0.8, False),
        ("ratios-below-one-of-the-ablation-all-users-at-50-percent-skew", 2.0, False),
    ]
