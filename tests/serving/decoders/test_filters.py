# SPDX-License-Identifier: Apache-2.0
"""The filters of /v1/recommend, over real HTTP, with a real model behind it: what is left is found, and all of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import override
from jgr.serving.decoders.loading import load_engine
from jgr.serving.http.listener import Listener
from tests.serving import tiny_model
from tests.serving.fakes import LiveServer, Pending, Reply

N = 700
WIDTH = 8
SETTINGS = (
    "profiles.batch=4",
    "profiles.tokens=32",
    f"profiles.widths={WIDTH}",
    "profiles.candidates=8",
    "catalog.segment_rows=1",
    "server.max_filter_items=800",
)
SEGMENTS = {
    "eu": {row for row in range(N) if row % 2},
    "stock": {row for row in range(N) if row % 3 == 0},
    "new": set(range(N - 30, N)),
    "rare": {5, 9, 15, 300},
}


def make_catalog() -> Catalog:
    """700 items on 3 levels of 9 codes, so that about half of them share an id."""
    codes = np.random.default_rng(0).integers(0, 9, (N, 3))
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    metadata = [{"segments": [name for name, rows in SEGMENTS.items() if row in rows]} for row in range(N)]
    return Catalog.build([f"i{row}" for row in range(N)], symbols, metadata)


class Server:
    def __init__(self, port: int, catalog: Catalog) -> None:
        self.port = port
        self.catalog = catalog

    def call(self, path: str, body: Any) -> Reply:
        return Pending(self.port, "POST", path, body, {}).reply()

    def recommend(self, rows: list[int], filters: Any = None, **fields: Any) -> Any:
        body = {"history": ids(rows), "top_k": WIDTH, "filters": filters, **fields}
        reply = self.call("/v1/recommend", body)
        assert reply.status == 200, reply.body
        return reply.json

    def ids_of(self, rows: set[int]) -> int:
        """How many semantic ids these items have."""
        return len({tuple(self.catalog.codes[row]) for row in rows})

    def check(self, answer: Any, history: list[int], left: set[int]) -> None:
        """All items are of those left, their scores are those that `rank` gives, and nothing is missing."""
        found = [int(item["item_id"][1:]) for item in answer["items"]]
        assert len(found) == min(WIDTH, len(left)) and len(set(found)) == len(found) and set(found) <= left
        assert answer["usage"]["dead_beams"] == WIDTH - min(WIDTH, self.ids_of(left))
        ranked = self.call("/v1/rank", {"history": ids(history), "candidates": ids(found)}).json["items"]
        scores = {item["item_id"]: item["score"] for item in ranked}
        for item in answer["items"]:
            assert abs(item["score"] - scores[item["item_id"]]) < 1e-4


def ids(rows: Any) -> list[str]:
    return [f"i{row}" for row in rows]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "make_catalog", lambda depth: make_catalog())
        config = override(tiny_model.make_folder(tmp_path_factory.mktemp("model") / "tiny"), *SETTINGS)
    ready = threading.Event()
    listener = Listener(load_engine(config), config, on_ready=lambda url: ready.set())
    thread = threading.Thread(target=listener.serve_until_stopped, daemon=True)
    thread.start()
    assert ready.wait(300)
    yield Server(int(listener.url.rpartition(":")[2]), make_catalog())
    listener.stop()
    thread.join()


HISTORY = [3, 77, 600]


def test_a_history_of_most_of_the_catalog_leaves_the_rest(served: Server) -> None:
    for left in (range(20), range(3)):
        history = [row for row in range(N) if row not in left]
        served.check(served.recommend(history, exclude_history=True), history, set(left))
    nothing = served.recommend(list(range(N)), exclude_history=True)
    assert nothing["items"] == [] and nothing["usage"]["dead_beams"] == WIDTH


def test_lists(served: Server) -> None:
    some = [1, 2, 3, 5, 8, 13]
    served.check(served.recommend(HISTORY, {"allow": ids(some * 2)}), HISTORY, set(some))
    served.check(
        served.recommend(HISTORY, {"allow": ids(some)}, exclude_history=True), HISTORY, {*some} - {3}
    )
    both = {"allow": ids(some), "deny": ids([5]), "exclude": ids([8, 8])}
    served.check(served.recommend(HISTORY, both), HISTORY, {1, 2, 3, 13})
    rest = {"exclude": ids(range(0, 350)), "deny": ids(range(350, N - 5))}
    served.check(served.recommend(HISTORY, rest), HISTORY, set(range(N - 5, N)))
    free = served.recommend(HISTORY)
    assert free["items"] == served.recommend(HISTORY, {})["items"]
    best = free["items"][0]["item_id"]
    without = served.recommend(HISTORY, {"exclude": [best]})
    assert best not in {item["item_id"] for item in without["items"]}


def test_segments(served: Server) -> None:
    """Also more combinations than the device has rows for."""
    for n in (1, 2, 3, 4):
        for names in combinations(SEGMENTS, n):
            left = set.intersection(*(SEGMENTS[name] for name in names))
            if left:
                served.check(served.recommend(HISTORY, {"segments": [*names]}), HISTORY, left)
    denied = SEGMENTS["new"] & SEGMENTS["eu"] - {N - 1, N - 7}
    answer = served.recommend(HISTORY, {"segments": ["new", "eu"], "deny": ids(denied)})
    served.check(answer, HISTORY, {N - 1, N - 7})
    answer = served.recommend(HISTORY, {"segments": ["rare"], "allow": ids([5, 6, 300])})
    served.check(answer, HISTORY, {5, 300})


def test_neighbours_do_not_share_filters(served: Server) -> None:
    filters: list[Any] = [
        None,
        {"segments": ["rare"]},
        {"allow": ids([4, 40, 400])},
        {"segments": ["new", "stock"], "deny": ids([690])},
        {"exclude": ids(range(600))},
        {"segments": ["eu", "stock"]},
    ]
    alone = [served.recommend(HISTORY, one)["items"] for one in filters]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda one: served.recommend(HISTORY, one)["items"], filters * 4))
    for answer, want in zip(together, alone * 4, strict=True):
        scores = [item["score"] for item in want]
        np.testing.assert_allclose([item["score"] for item in answer], scores, atol=1e-4)


def test_unknown_items_are_counted(served: Server) -> None:
    filters = {"exclude": ["x", "i1"], "deny": ["y", 7], "allow": ["z", "i2"]}
    answer = served.recommend(HISTORY, filters)
    assert [item["item_id"] for item in answer["items"]] == ["i2"]
    assert answer["usage"]["unknown_filter_items"] == 4
    assert "unknown_filter_items" not in served.recommend(HISTORY)["usage"]


@pytest.mark.parametrize(
    ("filters", "field", "words"),
    [
        ({"segments": ["eu", "stok"]}, "filters.segments[1]", "no segment 'stok'; the nearest is 'stock'"),
        ({"segments": ["eu"] * 17}, "filters.segments", "must be a list of length 16 or less"),
        ({"allow": []}, "filters.allow", "1 or more"),
        ({"allow": ["nowhere"]}, "filters", "nothing of the catalog is left"),
        ({"allow": ["i5"], "deny": ["i5"]}, "filters", "nothing of the catalog is left"),
        ({"segments": ["rare", "new"]}, "filters", "nothing of the catalog is left"),
        ({"exclude": ["a"] * 400, "deny": ["a"] * 401}, "filters.deny", "more than 800 items"),
        ({"exclude": [1.5]}, "filters.exclude[0]", "not a decimal number"),
        ({"denny": []}, "filters", "denny"),
        ([], "filters", "not a list"),
    ],
)
def test_bad_filters_are_refused_by_name(served: Server, filters: Any, field: str, words: str) -> None:
    reply = served.call("/v1/recommend", {"history": ids(HISTORY), "top_k": 1, "filters": filters})
    assert reply.status == 422
    assert reply.error["field"] == field and words in reply.error["message"]


def test_nothing_was_compiled_by_a_request(served: Server) -> None:
    served.recommend(HISTORY, {"segments": ["eu", "new"], "deny": ids([1])})
    metrics = Pending(served.port, "GET", "/metrics", None, {}).reply().body.decode()
    assert 'jgr_compilations_total{phase="request"} 0.0' in metrics


def test_models_and_openapi_state_the_limits(served: Server) -> None:
    (model,) = Pending(served.port, "GET", "/v1/models", None, {}).reply().json["data"]
    assert model["segments"] == sorted(SEGMENTS) and model["max_filter_items"] == 800
    document = Pending(served.port, "GET", "/openapi.json", None, {}).reply().json
    fields = document["components"]["schemas"]["Filters"]["properties"]
    assert fields["exclude"]["maxItems"] == fields["deny"]["maxItems"] == 800
    assert {"type": "null"} in fields["allow"]["anyOf"]
    assert 800 in [option.get("maxItems") for option in fields["allow"]["anyOf"]]


def test_items_of_one_id_are_capped() -> None:
    with LiveServer("beam.items_per_id=1") as server:
        body = {"history": ["b", "b2"], "top_k": 5}
        assert ids_in(server.call("/v1/recommend", body)) == ["d", "7", "a", "b", "c"]
        # The cap counts what may be returned: b is out, so that its twin stands for their id.
        body["filters"] = {"deny": ["b"]}
        reply = server.call("/v1/recommend", body)
        assert ids_in(reply) == ["d", "7", "a", "b2", "c"]
        assert (
            server.call("/v1/recommend", body | {"filters": {"segments": ["eu"]}})
            .error["message"]
            .endswith("the catalog has none")
        )


def ids_in(reply: Reply) -> list[str]:
    return [item["item_id"] for item in reply.json["items"]]
