# SPDX-License-Identifier: Apache-2.0
"""Who comes to fleet_items' nodes, how their memory is divided, and what is claimed. No node runs, nothing is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks import fleet_items as bench
from benchmarks.fleet_processes import Served, together
from benchmarks.fleet_users import (
    LARGE,
    NODES,
    PAGE,
    QUICK,
    ROOM,
    SMALL,
    Divided,
    Seen,
    Trace,
    divide,
    see,
    workload,
    write_model,
)
from jgr.config import override
from jgr.placement.items import Items

ITEMS = Items(1.0 / np.arange(1, 2001), np.full(2000, 8), bytes_per_token=512, cell_tokens=2)
SEEN = Seen(ITEMS, user_tokens=400.0, item_tokens=400.0)
ALL = 2000 * 8 * 512


def of_all(part: int) -> Any:
    """A part of a node's memory over that of all items, to a page."""
    return pytest.approx(part / ALL, abs=2 * PAGE / ALL)


def test_users_have_what_items_leave() -> None:
    whole, sharded, hot = (divide(SEEN, name, 10, LARGE, QUICK) for name in ("replicate", "hash", "hrcs"))
    assert (of_all(whole.items), of_all(whole.fetched), of_all(whole.users)) == (1.0, 0.0, LARGE - 1)
    assert of_all(sharded.items) == 0.5 and of_all(sharded.users) == LARGE - 0.5 - ROOM
    assert sharded.items < hot.items < whole.items
    for each in (whole, sharded, hot):
        assert of_all(each.items + each.fetched + each.users) == LARGE
        assert each.working == whole.working and not any(part % PAGE for part in each)


def test_a_faster_link_and_longer_users_replicate_less() -> None:
    def held(gbit: int, user_tokens: float) -> int:
        return divide(SEEN._replace(user_tokens=user_tokens), "hrcs", gbit, LARGE, QUICK).items

    assert held(100, 400.0) <= held(10, 800.0) < held(10, 400.0)


def test_where_all_items_do_not_fit_replication_leaves_nothing() -> None:
    whole = divide(SEEN, "replicate", 10, SMALL, QUICK)
    assert whole.users == 0 and of_all(whole.items) == SMALL
    assert of_all(divide(SEEN, "hash", 10, SMALL, QUICK).users) == SMALL - 0.5 - ROOM


def test_the_division_is_what_a_node_is_told() -> None:
    divided = Divided(items=3 << 20, fetched=1 << 20, users=6 * PAGE, working=2 * PAGE)
    assert divided.settings() == ("fleet.items_mb=3.0", "fleet.fetched_mb=1.0")
    assert divided.limits() == {"user": 6, "item": 2}


def test_as_many_users_come_as_fit_where_each_item_is_on_one_node() -> None:
    books = workload(QUICK)
    left = (NODES * (LARGE - ROOM) - 1) * QUICK.items * 8
    assert books.users == pytest.approx(left / books.user_tokens, abs=1)
    assert books.user_tokens / (QUICK.candidates * books.item_tokens) == pytest.approx(1586 / 1500)


def test_a_users_requests_go_to_one_node_and_every_trace_has_the_same(tmp_path: Path) -> None:
    world, config = write_model(tmp_path / "model", QUICK)
    assert config == override(config, "cache.policy=hotness") and len(config.rank.tokens) == QUICK.shapes
    trace = Trace(world)
    first, second = trace.take(5), trace.take(7)
    for number, name in enumerate("ab"):
        both = [*first[name], *second[name]]
        assert [access.user % NODES for access in both] == [number] * 12
        again = Trace(world).take(12)[name]
        assert [access.user for access in again] == [access.user for access in both]
        assert all((mine.items == its.items).all() for mine, its in zip(again, both, strict=True))
    seen = see(world, first)
    assert seen.items.frequency.sum() == 2 * 5 * QUICK.candidates
    every = [*first["a"], *first["b"]]
    assert seen.user_tokens == pytest.approx(sum(access.user_tokens for access in every) / 10)
    lengths = world.traffic.item_tokens
    assert seen.item_tokens == pytest.approx(sum(lengths[access.items].sum() for access in every) / 10)
    (body, *_) = trace.bodies(first, "item_prefix")["b"]
    asked = msgspec.json.decode(body)
    assert asked["layout"] == "item_prefix" and asked["user_id"] == first["b"][0].user
    assert asked["candidates"] == [str(row) for row in first["b"][0].items]
    assert "layout" not in msgspec.json.decode(trace.bodies(first)["b"][0])


def test_nodes_side_by_side_take_as_long_as_the_slowest() -> None:
    found = together([Served(2, 3.0, 1.0, 50, 20, 30, 1), Served(2, 2.0, 4.0, 60, 50, 10, 2)])
    assert found == Served(4, 3.0, 5.0, 110, 70, 40, 3)


def test_claims_compare_the_rounds_of_one_size_of_memory() -> None:
    def row(
        name: str, gbit: int, memory: str, rounds: list[float], computed: float, wrong: float = 0.0
    ) -> Any:
        return {
            "placement": name,
            "gbit": gbit,
            "memory": memory,
            "rounds": rounds,
            "computed_tokens": computed,
            "bytes_over_predicted": wrong,
        }

    rows = [
        row("replicate", 0, "large", [10.0, 20.0, 30.0], 440.0),
        row("hash", 10, "large", [8.0, 10.0, 24.0], 400.0, 0.01),
        row("hash", 100, "large", [1.0, 1.0, 1.0], 400.0),
        row("hrcs", 10, "large", [12.0, 22.0, 36.0], 400.0),
        row("hrcs", 100, "large", [9.0, 18.0, 33.0], 550.0),
        row("replicate", 0, "small", [10.0], 300.0),
        row("hash", 100, "small", [10.0], 300.0),
        row("hrcs", 100, "small", [11.0], 200.0),
    ]
    found = {claim.id.removeprefix("fleet-items-"): claim for claim in bench.claims(rows)}
    assert {name: (claim.value, claim.holds) for name, claim in found.items()} == {
        "bytes-against-prediction": (0.01, True),
        "hrcs-over-replicate-10-gbit-large": (1.2, True),
        "computed-replicate-over-hrcs-10-gbit-large": (1.1, True),
        "hrcs-over-hash-10-gbit-large": (1.5, True),
        "replicate-over-hash-10-gbit-large": (1.25, True),
        "hrcs-over-replicate-100-gbit-large": (0.9, False),
        "computed-replicate-over-hrcs-100-gbit-large": (0.8, False),
        "hrcs-over-replicate-100-gbit-small": (1.1, True),
        "computed-replicate-over-hrcs-100-gbit-small": (1.5, True),
    }
    assert found["hrcs-over-replicate-10-gbit-large"].interval == (1.1, 1.2)
    assert found["hrcs-over-replicate-100-gbit-small"].interval is None
