# SPDX-License-Identifier: Apache-2.0
"""GET /v1/items: what it finds, in which order, and how far it looks; see fakes.py for the catalog."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.catalog import Catalog
from jgr.serving.catalog_api import MAX_SEARCHED
from jgr.serving.decoders.null import null_catalog
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.http import cold, items
from jgr.serving.http.items import find_items
from tests.serving import fakes
from tests.serving.fakes import CATALOG, ITEMS, PATIENCE_S, LiveServer

LETTERS = st.text(alphabet="abAB ", max_size=3)


def found(server: LiveServer, query: str) -> list[str]:
    reply = server.call(f"/v1/items{query}")
    assert reply.status == 200, reply.body
    return [item["item_id"] for item in reply.json["data"]]


@pytest.mark.parametrize(
    ("query", "items"),
    [
        ("", list(ITEMS)),
        ("?limit=2", ["a", "b"]),
        ("?query=b", ["b", "b2"]),
        ("?query=b2", ["b2"]),
        ("?query=B2", ["b2"]),
        ("?query=TITLE%20of%20C", ["c"]),
        ("?query=of%20b", ["b", "b2"]),
        ("?query=title&limit=3", ["a", "b", "b2"]),
        ("?query=7&limit=1", ["7"]),
        ("?query=nothing", []),
        ("?model=jgr&query=d", ["d"]),
        ("?item_id=d", ["d"]),
        ("?item_id=d&item_id=none&item_id=a&item_id=d&item_id=A&model=jgr", ["d", "a"]),
        ("?item_id=none", []),
        ("?item_id=", []),
        (f"?{'&'.join(['item_id=c'] * 100)}", ["c"]),
    ],
)
def test_items_are_found_by_their_ids_or_the_beginning_of_them_or_by_words(
    server: LiveServer, query: str, items: list[str]
) -> None:
    assert found(server, query) == items


def test_an_item_that_is_found_looks_as_if_it_had_been_asked_for(server: LiveServer) -> None:
    reply = server.call("/v1/items?query=b2&limit=1").json
    assert reply == {"data": [server.call("/v1/items/b2").json], "searched": 0}
    assert server.call("/v1/items?item_id=none&item_id=b2").json == reply
    assert server.call("/v1/items?query=of").json["searched"] == len(ITEMS)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?limit=-1", "limit"),
        ("?limit=1.5", "limit"),
        ("?limit=", "limit"),
        (f"?limit={'9' * 5000}", "limit"),
        ("?limit=" + quote("\uff11"), "limit"),
        (f"?query={'x' * 257}", "query"),
        ("?item_id=a&query=a", "query"),
        ("?item_id=a&limit=0", "limit"),
        (f"?{'&'.join(['item_id=a'] * 101)}", "item_id"),
    ],
)
def test_bad_parameters_are_named(server: LiveServer, query: str, field: str) -> None:
    reply = server.call(f"/v1/items{query}")
    assert (reply.status, reply.error["type"], reply.error["field"]) == (422, "invalid_request", field)


@pytest.mark.parametrize(
    ("method", "path", "field"),
    [
        ("GET", "/v1/items?item_id=%FF", "item_id"),
        ("GET", "/v1/items?item_id=a&item_id=%C3%A9%FF", "item_id"),
        ("GET", "/v1/items?query=%ED%A0%80", "query"),
        ("GET", "/v1/items?limit=%FF", "limit"),
        ("GET", "/v1/items?%6Dodel=%FF", "model"),
        ("GET", "/v1/items/a?model=%FF", "model"),
        ("GET", "/v1/catalogs?model=%FF", "model"),
        ("POST", "/v1/catalogs?model=%FF", "model"),
        ("POST", "/v1/catalogs/rollback?model=%FF", "model"),
        ("DELETE", "/v1/users/u/cache?tenant=%FF", "tenant"),
    ],
)
def test_a_parameter_that_is_no_utf_8_is_refused_by_its_name(method: str, path: str, field: str) -> None:
    with LiveServer("server.admin_key=4dm1n") as server:
        reply = server.call(path, method=method, authorization="Bearer 4dm1n")
        assert (reply.status, reply.error["field"]) == (422, field)
        assert reply.error["message"] == f"{field}: must be UTF-8, percent-encoded"


def test_what_stands_for_bytes_that_are_no_utf_8_may_be_asked_for(server: LiveServer) -> None:
    """And what no parameter names is not looked at."""
    assert found(server, "?query=%EF%BF%BD") == []
    assert found(server, "?item_id=a&other=%FF&%FF=1") == ["a"]


def test_bytes_that_are_no_utf_8_are_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = dataclasses.replace(CATALOG, item_ids=("\ufffd", *ITEMS[1:]))
    monkeypatch.setattr(fakes, "CATALOG", renamed)
    with LiveServer() as server:
        assert server.call("/v1/items/%EF%BF%BD").json["item_id"] == "\ufffd"
        assert server.call("/v1/items/%FF").error["field"] == "item_id"


def test_another_model_is_not_there(server: LiveServer) -> None:
    reply = server.call("/v1/items?model=other")
    assert (reply.status, reply.error["field"]) == (404, "model")
    assert server.call("/v1/items", {}).status == 405


def test_a_search_lets_others_have_their_turn_and_looks_only_so_far() -> None:
    catalog = null_catalog(MAX_SEARCHED + 1000)

    async def search(query: str) -> tuple[list[str], int, int]:
        turns, done = 0, False

        async def others() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        waiting = asyncio.create_task(others())
        listing = await find_items(catalog, query, 10, asyncio.Lock(), lambda: False)
        done = True
        await waiting
        return [item.item_id for item in listing.data], listing.searched, turns

    last = str(catalog.n_items - 1)
    ids, searched, turns = asyncio.run(search(f"item {last}"))
    assert (ids, searched) == ([], MAX_SEARCHED)
    assert turns > 10, "others have their turn meanwhile"
    ids, _, _ = asyncio.run(search(last))
    assert ids == [last], "a whole id is known wherever its item stands"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item takes as long as a turn of the loop may."""
    monkeypatch.setattr(items, "monotonic_ns", itertools.count(step=items._TURN_NS).__next__)


@pytest.mark.usefixtures("slow")
def test_searches_take_turns() -> None:
    """However many there are and however long the texts are, a turn of the loop has one search's items of one turn."""
    looked: list[int] = []
    turns: list[int] = []

    class Looked(list[dict[str, str]]):
        def __init__(self, number: int) -> None:
            super().__init__([{"title": "x"}] * 3)
            self.number = number

        def __getitem__(self, row: Any) -> Any:
            looked.append(self.number)
            return super().__getitem__(row)

    async def search_all() -> None:
        lock = asyncio.Lock()
        catalogs = [
            SimpleNamespace(n_items=3, item_ids="abc", metadata=Looked(number), row=lambda query: None)
            for number in range(5)
        ]
        searches = asyncio.gather(
            *(find_items(cast(Any, each), "nothing", 10, lock, lambda: False) for each in catalogs)
        )
        while not searches.done():
            turns.append(len(looked))
            await asyncio.sleep(0)
        assert [listing.searched for listing in await searches] == [3] * 5

    asyncio.run(search_all())
    assert looked == [0, 1, 2, 3, 4] * 3
    assert max(b - a for a, b in itertools.pairwise(turns)) == 1


@pytest.mark.usefixtures("slow")
def test_the_search_of_a_client_that_left_ends() -> None:
    async def search() -> bool:
        lock, turns = asyncio.Lock(), iter([False, False, True])
        with pytest.raises(ClientGone):
            await find_items(CATALOG, "nothing", 10, lock, lambda: next(turns))
        return lock.locked()

    assert not asyncio.run(search())


def test_a_search_is_told_that_its_client_left(monkeypatch: pytest.MonkeyPatch) -> None:
    began, told = threading.Event(), threading.Event()

    async def search(*arguments: Any) -> None:
        began.set()
        while not arguments[-1]():
            await asyncio.sleep(0)
        told.set()
        raise ClientGone

    monkeypatch.setattr(cold, "find_items", search)
    with LiveServer() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as asking:
            asking.sendall(b"GET /v1/items HTTP/1.1\r\nHost: x\r\n\r\n")
            assert began.wait(PATIENCE_S)
        assert told.wait(PATIENCE_S)


@given(st.dictionaries(LETTERS.filter(bool), LETTERS, min_size=1, max_size=5), LETTERS, st.integers(1, 3))
def test_what_is_found_is_what_fits(titles: dict[str, str], query: str, limit: int) -> None:
    symbols = [CATALOG.symbols[0][:1]] * len(titles)
    catalog = Catalog.build(
        list(titles), symbols, [{"title": title, "number": 7, "more": ["a"]} for title in titles.values()]
    )
    fitting = [
        item
        for item, title in titles.items()
        if item.lower().startswith(query.lower()) or query.lower() in title.lower()
    ]
    fitting.sort(key=lambda item: item != query)
    listing = asyncio.run(find_items(catalog, query, limit, asyncio.Lock(), lambda: False))
    assert [item.item_id for item in listing.data] == fitting[:limit]
