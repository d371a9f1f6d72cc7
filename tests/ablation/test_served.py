# SPDX-License-Identifier: Apache-2.0
"""A tiny ablation of BAT on real engines: what is counted is what a person counts from the requests and the titles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jgr.ablation import worlds
from jgr.ablation.bat import BAT
from jgr.ablation.measure import TOLERANCE, Found, measure
from jgr.ablation.system import ALL, NONE, Variant, configured, variants
from jgr.ablation.traffic import Request
from jgr.client.embedded import Engine
from jgr.config import override

USERS_CACHED, ITEMS_CACHED = "without items-first", "without users-first"
TINY_SHAPES = ("rank.tokens=96", "rank.context=96", "rank.candidates=12", "profiles.tokens=96")
LONG = 5
"""Items of the long history: more tokens than three candidates have."""


class Counted:
    """The shop, and tokens as one counts them by hand: a word of a title is a token, an item's own one is another."""

    def __init__(self, world: worlds.World) -> None:
        self.catalog = world.dataset.catalog
        self.ids = self.catalog.item_ids
        self._words = [len(str(of["title"]).split()) for of in self.catalog.metadata]

    def items(self, ids: Sequence[str]) -> int:
        return sum(self._words[self.ids.index(item)] + 1 for item in ids)

    def user(self, request: Request) -> int:
        return 1 + self.items(request.history)  # the prompt begins with <bos>

    def prompt(self, request: Request) -> int:
        return self.user(request) + self.items(request.candidates) + 1  # it ends with <sid>


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> worlds.World:
    made = worlds.made(BAT, tmp_path_factory.mktemp("model"), worlds.TINY)
    config = override(made.config, *TINY_SHAPES, "model.compilation_cache=")
    return worlds.World(config, made.dataset)


@pytest.fixture(scope="module")
def requests(world: worlds.World) -> list[Request]:
    ids = world.dataset.catalog.item_ids
    first, second = ids[10 : 10 + LONG], [ids[30]]
    return [
        Request("long", list(first), [ids[1], ids[2], ids[3]]),
        Request("short", list(second), [ids[3], ids[4], ids[5]]),
        Request("long", list(first), [ids[5], ids[6], ids[7]]),
        Request("short", list(second), [ids[1], ids[2], ids[3]]),
    ]


@pytest.fixture(scope="module")
def found(world: worlds.World, requests: list[Request]) -> Found:
    chosen = [one for one in variants(BAT) if one.name in (ALL, USERS_CACHED, ITEMS_CACHED, NONE)]
    rounds = [[[request] for request in requests]]  # one after the other, in one round

    def engine(one: Variant) -> Engine:
        return Engine(configured(world.config, one.settings), kinds=["rank"])

    return measure(BAT, chosen, engine, rounds)


def by_name(found: Found) -> dict[str, dict[str, int]]:
    return {run.variant.name: run.counts for run in found.runs}


def test_without_a_cache_every_token_is_computed(
    found: Found, world: worlds.World, requests: list[Request]
) -> None:
    by_hand = Counted(world)
    counts = by_name(found)[NONE]
    assert counts["reused"] == counts["pages"] == 0
    assert counts["computed"] == sum(map(by_hand.prompt, requests))
    assert counts["runs"] == len(requests)


def test_what_is_reused_of_users_is_what_came_before_of_them(
    found: Found, world: worlds.World, requests: list[Request]
) -> None:
    by_hand = Counted(world)
    counts = by_name(found)[USERS_CACHED]
    assert counts["reused"] == by_hand.user(requests[2]) + by_hand.user(requests[3])
    assert counts["reused"] + counts["computed"] == sum(map(by_hand.prompt, requests))
    assert (counts["user first"], counts["items first"]) == (4, 0)


def test_what_is_reused_of_items_is_what_came_before_of_them(
    found: Found, world: worlds.World, requests: list[Request]
) -> None:
    by_hand = Counted(world)
    seen: set[str] = set()
    reused = 0
    for request in requests:
        reused += by_hand.items([item for item in request.candidates if item in seen])
        seen |= set(request.candidates)
    counts = by_name(found)[ITEMS_CACHED]
    assert counts["reused"] == reused > 0
    assert counts["reused"] + counts["computed"] == sum(map(by_hand.prompt, requests))
    assert (counts["user first"], counts["items first"]) == (0, 4)


def test_the_whole_puts_the_longer_first_and_reuses_both(
    found: Found, world: worlds.World, requests: list[Request]
) -> None:
    """There is room for all: the long user goes first both times, the short one behind the items."""
    by_hand = Counted(world)
    longer = [by_hand.user(request) >= by_hand.items(request.candidates) for request in requests]
    assert longer == [True, False, True, False]
    counts = by_name(found)[ALL]
    assert (counts["user first"], counts["items first"]) == (2, 2)
    (shared,) = set(requests[1].candidates) & set(requests[3].candidates)  # of those with the items first
    assert counts["reused"] == by_hand.user(requests[2]) + by_hand.items([shared])
    assert counts["reused"] + counts["computed"] == sum(map(by_hand.prompt, requests))


def test_answers_are_the_same_within_an_order_of_the_prompt(found: Found) -> None:
    assert {name: of.is_right for name, of in found.differences.items()} == dict.fromkeys(
        by_name(found), True
    )
    assert max(of.largest for of in found.differences.values()) < TOLERANCE
    assert found.differences[USERS_CACHED].reordered == 2
    assert found.differences[NONE].largest == 0.0
    scores = [item.score for item in found.runs[0].answers[0].items]
    assert max(scores) - min(scores) > 100 * TOLERANCE, "scores that hardly differ would be the same anyway"


def test_one_round_is_not_timed(found: Found) -> None:
    assert found.untimed.startswith("not timed: ")


def test_other_systems_make_models_that_their_variants_can_load(tmp_path: Path) -> None:
    """Without compiling: the folder is written, and its configuration is one that can be loaded."""
    from jgr.ablation.flame import FLAME
    from jgr.ablation.hlem import HLEM
    from jgr.ablation.xgr import XGR
    from jgr.serving.versions.loading import load_any

    for system in (XGR, FLAME, HLEM):
        made = worlds.made(system, tmp_path / system.name, worlds.TINY)
        for one in (variants(system)[0], variants(system)[-1]):
            engine = load_any(configured(override(made.config, "model.compilation_cache="), one.settings))
            assert engine.info.catalog_items == made.dataset.catalog.n_items
            engine.served.close(True)
            engine.served.join(30.0)
