# SPDX-License-Identifier: Apache-2.0
"""Whom the coordinator gives a number, and whom it tells what. The replicas note what they are asked, and hold
nothing; `test_items.py` has real ones."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from jgr.config import FleetConfig
from jgr.serving.cluster import placements
from jgr.serving.cluster.nodes import View
from jgr.serving.cluster.placements import Placements

N_ITEMS = 20


class Noted:
    """The replicas. numbers: by name, of those that are there. told: the last view of each. steps: who did which.
    deaf: who is not told the next view. hung: who answers nothing."""

    def __init__(self, *names: str) -> None:
        self.numbers: dict[str, int | None] = dict.fromkeys(names)
        self.told: dict[str, View] = {}
        self.steps: list[tuple[str, str]] = []
        self.deaf = self.hung = ""

    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]:
        if what == "counts":
            return {}  # nobody has asked for anything
        return {
            name: {"key": "k", "worker": 1, "number": number} for name, number in self.numbers.items()
        } | {"starting": {"key": "", "worker": 0, "number": None}}

    async def items(self, name: str, what: str, *arguments: Any) -> Any:
        if name == self.hung:
            await asyncio.Event().wait()
        if what == "facts":
            tokens = np.full(N_ITEMS, 4, np.int32).tobytes()
            return {"tokens": tokens, "token_bytes": 8, "cell_tokens": 4, "capacity": 10_000}
        if what == "join":
            self.numbers[name] = arguments[0]
            self.told.pop(name, None)
            return name, 1000 + arguments[0], "m"
        if what == "see":
            if name == self.deaf and self.steps:
                self.deaf = ""
                raise ConnectionError("not now")
            self.told[name] = arguments[0]
            return None
        assert what == "step"
        self.steps.append((name, arguments[0]))
        return True

    def published(self, name: str) -> list[int]:
        """The rows that a replica was told are held."""
        bits = np.unpackbits(np.frombuffer(self.told[name].published, np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()


def placing(fleet: Noted) -> Placements:
    """Two nodes hold the items; up to four replicas are there."""
    config = FleetConfig(replicas=2, max_replicas=4, items="hash", refresh_s=3600)
    return Placements(fleet, config, clock=lambda: 0.0)


def test_whoever_was_not_told_who_holds_what_is_told_at_the_next_look() -> None:
    async def run() -> None:
        fleet = Noted("a", "b")
        placements = placing(fleet)
        fleet.deaf = "b"
        assert await placements.look()
        assert fleet.deaf == "" and fleet.published("a") == list(range(N_ITEMS))
        assert fleet.published("b") == []
        assert await placements.look()
        assert fleet.published("b") == list(range(N_ITEMS))
        fleet.told.clear()
        assert await placements.look()
        assert fleet.told == {}, "both know it"

    asyncio.run(run())


def test_one_that_hangs_holds_up_no_look_and_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "TELL_S", 0.01)

    async def run() -> None:
        fleet = Noted("a", "b")
        placed = placing(fleet)
        assert await placed.look()
        del fleet.numbers["b"]
        fleet.numbers["c"], fleet.hung = None, "c"
        assert not await placed.look(), "no node 1"
        assert fleet.told["a"].peers.keys() == {0} and fleet.numbers == {"a": 0, "c": None}
        fleet.hung = ""
        assert await placed.look() and fleet.numbers == {"a": 0, "c": 1}
        fleet.numbers["d"], fleet.hung, before = None, "c", fleet.told["c"]
        assert await placed.look()
        assert fleet.told["a"].peers.keys() == {0, 1, 2} and fleet.told["c"] == before
        fleet.hung = ""
        assert await placed.look() and fleet.told["c"] == fleet.told["a"]

    asyncio.run(run())


def test_replicas_beyond_the_nodes_hold_nothing_and_are_told_who_holds_what() -> None:
    async def run() -> None:
        fleet = Noted("a", "b", "c", "d")
        placements = placing(fleet)
        assert await placements.look()
        assert fleet.numbers == {"a": 0, "b": 1, "c": 2, "d": 3}
        assert {name for name, _ in fleet.steps} == {"a", "b"}
        for name, view in fleet.told.items():
            assert (view.nodes, view.peers[0][0], view.peers[1][0]) == (2, "a", "b"), name
            assert fleet.published(name) == list(range(N_ITEMS)), name
        before = list(fleet.steps)
        del fleet.numbers["d"]
        fleet.numbers["e"] = None
        assert await placements.look()
        assert fleet.numbers == {"a": 0, "b": 1, "c": 2, "e": 3}
        assert fleet.published("e") == list(range(N_ITEMS)) and fleet.steps == before, "nothing is moved"

    asyncio.run(run())


def test_one_that_only_fetches_takes_the_place_of_a_node_that_is_gone() -> None:
    """Where a fleet becomes smaller, it may lose those that hold items."""

    async def run() -> None:
        fleet = Noted("a", "b", "c", "d")
        placements = placing(fleet)
        assert await placements.look()
        fleet.steps.clear()
        del fleet.numbers["a"]
        assert await placements.look()
        assert fleet.numbers == {"b": 1, "c": 0, "d": 3}, "d stays where it is"
        assert fleet.steps == [("c", "copy"), ("c", "publish")]
        for name in "bcd":
            assert fleet.told[name].peers[0][0] == "c" and fleet.published(name) == list(range(N_ITEMS))
        del fleet.numbers["b"]
        assert await placements.look()
        assert fleet.numbers == {"c": 0, "d": 1} and fleet.told["d"].peers.keys() == {0, 1}

    asyncio.run(run())
