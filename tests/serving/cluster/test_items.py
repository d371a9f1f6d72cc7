# SPDX-License-Identifier: Apache-2.0
"""Items over the replicas of a fleet, in one process: where they are, what is fetched, and that answers stay the same.

The reference is a replica without any of this. All replicas of the file serve one folder, and each test's are new.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgr
from jgr.catalog.catalog import load_catalog
from jgr.config import UserError
from jgr.placement.items import ItemPlacement, expected_bytes
from jgr.placement.landing import TransportError
from jgr.placement.shared_items import Block, block_of
from jgr.placement.transport import Peer
from jgr.placement.worker import item_name
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.placements import BURST_S
from tests.serving.cluster.local import LocalFleet
from tests.serving.cluster.sharing import (
    HISTORY,
    IDS,
    SETTINGS,
    Reference,
    item_bytes,
    scores,
    served,
    share,
    write_ranker,
)
from tests.serving.decoders.test_cached_server import N_ITEMS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Reference]:
    """Scores of the items of these rows, in one prompt, as `scores` has them."""
    reference = Reference(folder)
    yield reference
    reference.close()


def placement_of(fleet: LocalFleet) -> ItemPlacement:
    placement = fleet.placements.placement
    assert placement is not None
    return placement


class Broken:
    """A transport that is not what it should be. blocks: what it gives; None: it fails."""

    def __init__(self, give: Callable[[Mapping[int, tuple[bytes, int]]], dict[int, Block]]) -> None:
        self.give, self.asked = give, 0

    def fetch(
        self, peer: Peer, wanted: Mapping[int, tuple[bytes, int]], timeout_s: float
    ) -> dict[int, Block]:
        self.asked += 1
        return self.give(wanted)

    def keep(self, peers: Iterable[Peer]) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("transport", ["auto", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_items_of_another_replica_are_fetched_and_answers_are_the_same(
    folder: Path, alone: Reference, transport: str
) -> None:
    asked = [list(range(0, 6)), list(range(6, 12)), [20, 3, 25, 8]]

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        placement = placement_of(fleet)
        assert len(placement.dropped) == 0 and not placement.replicated.any()
        came: list[tuple[int, Any]] = []
        for worker, name in enumerate("ab"):
            for rows in asked:
                answer = await fleet.rank(name, HISTORY, [IDS[row] for row in rows])
                assert scores(answer) == alone(rows)
                assert answer["usage"]["cached_tokens"] == 2 * len(rows), "none was computed"
                came.append((worker, np.array(rows, np.int32)))
        new = [(0, np.arange(12)), (0, np.array([20, 25])), (1, np.arange(12)), (1, np.array([20, 25]))]
        for what, purpose in ((new, "request"), ([], "placement")):
            predicted = expected_bytes(placement, what, whole_cells=True)
            for worker, name in enumerate("ab"):
                assert await item_bytes(fleet, name, purpose) == predicted[:, worker].sum(), (name, purpose)
        assert expected_bytes(placement, new, whole_cells=True).sum() > 0
        assert share(fleet, "a").counts()["requests"] == pytest.approx(3, rel=0.01)
        fleet.replicas["a"].models.deployments[0].engine.check()
        share(fleet, "a")._items().check()

    served(folder, ["fleet.items=hash", f"fleet.transport={transport}"], run)


def test_what_is_not_kept_goes_with_its_request(folder: Path, alone: Reference) -> None:
    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        rows = np.arange(6, dtype=np.int32)
        for _ in range(3):
            answers = await asyncio.gather(*[fleet.rank("a", HISTORY, IDS[:6]) for _ in range(2)])
            for answer in answers:
                assert scores(answer) == alone(range(6))
        once = expected_bytes(placement_of(fleet), [(0, rows)], whole_cells=True).sum()
        most = fleet.replicas["a"].models.deployments[0].engine.info.max_candidates
        assert most < len(IDS)
        assert await share(fleet, "a").fetch(Hint(items=tuple(IDS)), user_tokens=2.0) == (), (
            "it will be refused"
        )
        assert await item_bytes(fleet, "a", "request") == 3 * once, "two at a time share what comes"
        assert share(fleet, "a")._used == {}

    settings = ["fleet.items=hash", "fleet.keep_fetched=false", "fleet.transport=socket"]
    served(folder, settings, run)


def test_the_hottest_items_are_everywhere_after_a_refresh_and_readers_see_one_copy_always(
    folder: Path, alone: Reference
) -> None:
    """Requests go on while the placement moves from one set of hot items to another."""

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        for hot in (range(0, 6), range(12, 18)):
            for _ in range(8):
                await fleet.rank("a", HISTORY, [IDS[row] for row in hot])
            fleet.placements._world.placed_s = -1e9  # type: ignore[union-attr]
            moving = asyncio.create_task(fleet.placements.look())
            while not moving.done():
                rows = [*[*hot][:3], 28, 29]
                for name in "ab":
                    answer = await fleet.rank(name, HISTORY, [IDS[row] for row in rows])
                    assert scores(answer) == alone(rows)
            assert await moving
            placement = placement_of(fleet)
            assert placement.replicated[list(hot)].all() and not placement.replicated.all()
            for number, name in enumerate("ab"):
                held = [row for row in range(N_ITEMS) if share(fleet, name)._items()._worker.holds(row)]
                assert held == np.flatnonzero(placement.held()[number]).tolist()
                share(fleet, name)._items().check()

    # Two thirds of all accesses may go over the links, which are slow.
    settings = ["fleet.items=hrcs", "fleet.link_gbit=0.001", "fleet.items_mb=0.03", "fleet.items_window_s=1"]
    served(folder, settings, run)


def test_items_that_become_hot_are_everywhere_before_the_next_refresh(folder: Path) -> None:
    async def run(fleet: LocalFleet) -> None:
        now_s = [0.0]
        fleet.placements._clock = lambda: now_s[0]
        for _ in range(8):
            await fleet.rank("a", HISTORY, [IDS[row] for row in range(6)])
        assert await fleet.placements.look()
        before = placement_of(fleet)
        assert before.replicated[:6].all() and not before.replicated[12:18].any()
        for name in ("a", "b", "a"):  # 24 times, most of them too long ago
            for _ in range(8 if name == "a" else 4):
                await fleet.rank(name, HISTORY, [IDS[row] for row in range(12, 15)])
            assert await fleet.placements.look()
            assert placement_of(fleet) is before
            now_s[0] += BURST_S + 1
        for name in "ab":
            for _ in range(8):
                await fleet.rank(name, HISTORY, [IDS[row] for row in range(12, 15)])
        assert await fleet.placements.look()
        after = placement_of(fleet)
        assert after.replicated[12:15].all() and not after.replicated[15:18].any()
        for number, name in enumerate("ab"):
            held = [row for row in range(N_ITEMS) if share(fleet, name)._items()._worker.holds(row)]
            assert held == np.flatnonzero(after.held()[number]).tolist() and {12, 13, 14} <= {*held}
        assert await fleet.placements.look()
        assert placement_of(fleet) is after

    settings = ["fleet.items=hrcs", "fleet.link_gbit=0.001", "fleet.items_mb=0.03"]
    served(folder, settings, run)


def test_items_that_are_asked_for_together_have_one_home_and_move_when_that_changes(
    folder: Path, alone: Reference
) -> None:
    rng = np.random.default_rng(2)
    halves = np.arange(N_ITEMS) < N_ITEMS // 2
    crossed = np.arange(N_ITEMS) % 2 == 0

    async def ask(fleet: LocalFleet, of: np.ndarray, count: int) -> None:
        for at in range(count):
            rows = rng.choice(np.flatnonzero(of == bool(at % 2)), 5, replace=False)
            await fleet.rank("ab"[at % 3 % 2], HISTORY, [IDS[row] for row in rows])

    async def refresh(fleet: LocalFleet) -> None:
        fleet.placements._world.placed_s = -1e9  # type: ignore[union-attr]
        looking = asyncio.create_task(fleet.placements.look())
        rows = [1, 2, 20, 21]
        while not looking.done():
            for name in "ab":
                assert scores(await fleet.rank(name, HISTORY, [IDS[row] for row in rows])) == alone(rows)
        assert await looking

    def parted(fleet: LocalFleet, of: np.ndarray) -> bool:
        homes = placement_of(fleet).home
        return {int(home) for home in homes[of]} != {int(home) for home in homes[~of]} and (
            len(set(homes[of].tolist())) == len(set(homes[~of].tolist())) == 1
        )

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        assert placement_of(fleet).home.tolist() == [row % 2 for row in range(N_ITEMS)], "nobody has come yet"
        await ask(fleet, halves, 60)
        await refresh(fleet)
        assert parted(fleet, halves)
        for number, name in enumerate("ab"):
            held = [row for row in range(N_ITEMS) if share(fleet, name)._items()._worker.holds(row)]
            assert held == np.flatnonzero(placement_of(fleet).held()[number]).tolist()
            node = share(fleet, name)._node
            assert [node.owner(row) for row in range(N_ITEMS) if row not in held] == [1 - number] * (
                N_ITEMS - len(held)
            )
        await ask(fleet, halves, 30)
        await refresh(fleet)
        fleet.placements._world.requests.clear()  # type: ignore[union-attr]
        await ask(fleet, crossed, 60)
        await refresh(fleet)
        assert parted(fleet, crossed), "what requests found on one node had fallen"
        for name in "ab":
            fleet.replicas[name].models.deployments[0].engine.check()
            share(fleet, name)._items().check()

    served(folder, ["fleet.items=similarity", "fleet.hot=0"], run)


def test_a_read_that_goes_wrong_becomes_a_computation(folder: Path, alone: Reference) -> None:
    released = threading.Event()

    def slow(wanted: Mapping[int, tuple[bytes, int]]) -> dict[int, Block]:
        released.wait(60)
        return {}

    def fails(wanted: Mapping[int, tuple[bytes, int]]) -> dict[int, Block]:
        raise TransportError("cut")

    def breaks(wanted: Mapping[int, tuple[bytes, int]]) -> dict[int, Block]:
        raise ValueError("something nobody has thought of")

    def has_none(wanted: Mapping[int, tuple[bytes, int]]) -> dict[int, Block]:
        return {}

    def has_others(wanted: Mapping[int, tuple[bytes, int]]) -> dict[int, Block]:
        return {row: block_of(np.zeros((cells + 1, 256), np.uint32)) for row, (_, cells) in wanted.items()}

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        mine = share(fleet, "a")
        for number, give in enumerate((slow, fails, breaks, has_none, has_others)):
            mine._node.transport = broken = Broken(give)
            mine.fleet = replace(mine.fleet, fetch_ms=50.0 if give is slow else 60_000.0)
            mine._links.keep([])  # which would leave the node alone for a while
            rows = range(6 * number, 6 * number + 6)
            answer = await fleet.rank("a", HISTORY, [IDS[row] for row in rows])
            assert scores(answer) == alone(rows), give
            assert broken.asked == 1 or give is slow
            assert answer["usage"]["cached_tokens"] == 6, "what is at home here"
            found = await fleet.series("a", "jgr_fleet_items_missing_total")
            assert (found["fetched",], found["computed",]) == (0, 3 * number + 3)
            released.set()
            while mine._tasks:
                await asyncio.wait(mine._tasks)
            assert not mine._arriving and mine._items()._in_use == 0
            assert mine._links.closed(1, fleet.replicas["a"]._now_ns()) == (give in (fails, breaks))
        again = await fleet.rank("a", HISTORY, IDS[:6])
        assert scores(again) == alone(range(6))
        mine._items().check()

    served(folder, ["fleet.items=hash"], run)


def test_a_replica_that_is_replaced_gets_its_items_again(folder: Path, alone: Reference) -> None:
    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        fleet.gone.add("b")
        assert not await fleet.placements.look(), "items at home on b are not held"
        assert share(fleet, "a")._node.peers.keys() == {0}
        answer = await fleet.rank("a", HISTORY, IDS[:6])
        assert scores(answer) == alone(range(6))
        fleet.gone.clear()
        share(fleet, "b")._leave()  # as a process that has just begun
        assert await fleet.placements.look()
        assert share(fleet, "b")._items().placed == N_ITEMS // 2
        assert await item_bytes(fleet, "a", "request") == 0
        await fleet.rank("a", HISTORY, IDS[6:12])
        assert await item_bytes(fleet, "a", "request") > 0

    served(folder, ["fleet.items=hash"], run)


def test_a_replica_beyond_the_nodes_fetches_and_holds_nothing_until_one_is_gone(
    folder: Path, alone: Reference
) -> None:
    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        answer = await fleet.rank("c", HISTORY, IDS[:6])
        assert scores(answer) == alone(range(6)) and answer["usage"]["cached_tokens"] == 12
        found = await fleet.series("c", "jgr_fleet_items_missing_total")
        assert (found["fetched",], found["computed",]) == (6, 0)
        came = await fleet.series("c", "jgr_fleet_item_bytes_total")
        assert {labels[:1] + labels[-2:] for labels in came} == {("0", "request", "2"), ("1", "request", "2")}
        assert [share(fleet, name)._items().placed for name in "abc"] == [N_ITEMS // 2, N_ITEMS // 2, 0]
        fleet.gone.add("a")
        assert await fleet.placements.look(), "c is node 0 now"
        assert share(fleet, "c").about()["number"] == 0
        assert share(fleet, "c")._items().placed == N_ITEMS // 2
        answer = await fleet.rank("b", HISTORY, IDS[6:12])
        assert scores(answer) == alone(range(6, 12)) and answer["usage"]["cached_tokens"] == 12
        share(fleet, "c")._items().check()

    served(folder, ["fleet.items=hash"], run, beyond=1)


def test_items_in_plain_order_are_fetched_too(folder: Path) -> None:
    blocks = ["cache.policy=blocks", "cache.repair_tokens=1"]
    asked = [[7, 2, 20, 11], [3, 25, 8]]
    engine = jgr.Engine(str(folder), [*SETTINGS[1:], *blocks], ["rank"])
    try:
        wanted = [engine.rank(HISTORY, [IDS[row] for row in rows]) for rows in asked]
    finally:
        engine.close()

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        for rows, want in zip(asked, wanted, strict=True):
            answer = await fleet.rank("a", HISTORY, [IDS[row] for row in rows])
            assert scores(answer) == pytest.approx({i.item_id: i.score for i in want.items}, abs=1e-4)
            assert want.usage.layout == answer["usage"]["layout"] == "causal"
            assert answer["usage"]["cached_tokens"] > want.usage.cached_tokens, "items came"
        assert await item_bytes(fleet, "a", "request") > 0
        share(fleet, "a")._items().check()

    served(folder, ["fleet.items=hash", *blocks], run)


def test_requests_whose_user_comes_first_fetch_nothing(folder: Path) -> None:
    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        await fleet.rank("a", HISTORY, IDS[:6], layout="user_prefix")
        await fleet.rank("a", IDS[:12], IDS[:3], user_id="u")  # there is room for the user
        assert await item_bytes(fleet, "a", "request") == 0

    served(folder, ["fleet.items=hash", "cache.policy=hotness"], run)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["cache.policy=user"], "no model keeps items"),
        (["rank.method=likelihood"], "no model keeps items"),
        (["server.journal=/tmp/journal"], "cannot be replayed with fleet.items"),
        (["fleet.kv=/nowhere"], "no such folder"),
    ],
)
def test_what_cannot_share_its_items_is_told_at_the_start(
    folder: Path, settings: list[str], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        asyncio.run(LocalFleet(folder, [*SETTINGS, "fleet.items=hash", *settings]).start())


def test_a_change_of_catalog_places_items_anew(folder: Path) -> None:
    """Rows mean other items then: nothing of the old ones is given for them."""

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        key = share(fleet, "a").about()["key"]
        for name in "ab":
            share(fleet, name)._key = lambda engine: f"{key} changed"
        assert await fleet.placements.look()
        assert share(fleet, "a").about()["number"] is not None
        entry = share(fleet, "a")._items().pin([0], [b"x" * 16])
        assert entry == [None]
        share(fleet, "a")._items().unpin(entry)
        assert item_name(0).kind == "item"

    served(folder, ["fleet.items=hash"], run)


@pytest.mark.parametrize("kind", ["hrcs", "similarity"])
def test_what_was_hot_is_hot_in_the_next_catalog_by_its_id(folder: Path, kind: str) -> None:
    """BAT-12: the items' order is reversed, one is gone, and its row another item's."""
    old = load_catalog(folder / "catalog.jsonl")
    symbols = [
        {"item_id": item, "semantic_id": [f"<a_{row}>"], "metadata": old.metadata[row]}
        for row, item in enumerate(old.item_ids)
    ]
    lines = "\n".join(json.dumps(each) for each in [*symbols[:0:-1], symbols[0] | {"item_id": "new"}])

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        for name in "ab":
            await fleet.rank(name, HISTORY, ["i0", "i7", "i9"])
            await fleet.rank(name, HISTORY, ["i7", "i11"])
        for name in "ab":
            version = (await fleet.call(name, "POST", "/v1/catalogs", lines.encode()))["version"]
            await fleet.call(name, "POST", f"/v1/catalogs/{version}/activate")
            while (await fleet.call(name, "GET", "/v1/catalogs"))["activation"] == "running":
                await asyncio.sleep(0)
            assert share(fleet, name).about()["key"].endswith(version)
            ids = share(fleet, name)._engine.catalog.item_ids
            rows, frequency = (
                np.frombuffer(share(fleet, name).counts()[of], dtype)
                for of, dtype in (("rows", np.int32), ("frequency", np.float32))
            )
            found = {ids[row]: round(float(times), 2) for row, times in zip(rows, frequency, strict=True)}
            assert found == {"i7": 2.0, "i9": 1.0, "i11": 1.0}
            assert share(fleet, name).counts()["requests"] == pytest.approx(2, rel=0.01)
        assert await fleet.placements.look()
        hottest = placement_of(fleet).items.frequency.argmax()
        assert share(fleet, "a")._engine.catalog.item_ids[hottest] == "i7"

    served(folder, [f"fleet.items={kind}", "server.admin_key=4dm1n"], run)
