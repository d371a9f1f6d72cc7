# SPDX-License-Identifier: Apache-2.0
"""Finds items of a catalog by their ids or by words, for people who look for some.

The one idea: there is no index. Items are looked at in turns of the event loop, one search after the other, so that no
request waits behind searches, and at most so many of them; an id that is given whole is looked up, in a catalog of any
size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any

from starlette.datastructures import QueryParams

from jgr.catalog.catalog import Catalog
from jgr.serving.catalog_api import MAX_SEARCHED, CatalogItem, ItemList
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.errors import invalid, quoted

LISTED, MAX_LISTED = 20, 100
"""How many items a listing has, by default and at most."""
MAX_QUERY_CHARS = 256
_TURN_NS = 500_000
"""For so long, and for one item at least, all searches together look at items in a turn of the event loop."""


def catalog_item(catalog: Catalog, row: int) -> CatalogItem:
    """The item of a row as answers show it."""
    codes = catalog.codes[row].tolist()
    return CatalogItem(
        item_id=catalog.item_ids[row],
        semantic_id=[names[code] for names, code in zip(catalog.symbols, codes, strict=True)],
        metadata=catalog.metadata[row],
        catalog_version=catalog.version,
    )


def asked_ids(parameters: QueryParams) -> list[str]:
    """The ids of the items to list; empty: a search is wanted. Raises RequestError, which names the parameter."""
    ids = parameters.getlist("item_id")
    if len(ids) > MAX_LISTED:
        raise invalid("item_id", f"item_id: must be there at most {MAX_LISTED} times, not {len(ids)}")
    if ids and "query" in parameters:
        raise invalid("query", "query: leave it out beside item_id, which searches nothing")
    return ids


def items_of(catalog: Catalog, ids: Sequence[str]) -> ItemList:
    """The items of these ids that the catalog has, once each and in the order of the ids."""
    rows = [row for item_id in dict.fromkeys(ids) if (row := catalog.row(item_id)) is not None]
    return ItemList(data=[catalog_item(catalog, row) for row in rows], searched=0)


def asked(parameters: QueryParams) -> tuple[str, int]:
    """The query, and how many items are wanted. Raises RequestError, which names the parameter."""
    query, limit = parameters.get("query", ""), parameters.get("limit", str(LISTED))
    if len(query) > MAX_QUERY_CHARS:
        raise invalid("query", f"query: must have at most {MAX_QUERY_CHARS} characters")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
        raise invalid("limit", f"limit: must be 1 to {MAX_LISTED}, not {quoted(limit)}")
    return query, int(limit)


async def find_items(
    catalog: Catalog, query: str, limit: int, turn: asyncio.Lock, left: Callable[[], bool]
) -> ItemList:
    """The item whose id the query is, then those that fit it among the first MAX_SEARCHED, in the catalog's order.

    turn: the lock that all searches of an event loop share. Raises ClientGone when `left` says so of the client.
    """
    exact = catalog.row(query)
    rows = [] if exact is None else [exact]
    wanted, end, row = query.casefold(), min(catalog.n_items, MAX_SEARCHED), 0
    while row < end and len(rows) < limit:
        async with turn:
            await asyncio.sleep(0)
            if left():
                raise ClientGone
            end_ns, more = monotonic_ns() + _TURN_NS, True
            while more:
                if row != exact and fits(wanted, catalog.item_ids[row], catalog.metadata[row]):
                    rows.append(row)
                row += 1
                more = row < end and len(rows) < limit and monotonic_ns() < end_ns
    return ItemList(data=[catalog_item(catalog, row) for row in rows], searched=row)


def fits(wanted: str, item_id: str, metadata: Mapping[str, Any]) -> bool:
    """Whether an item's id begins with what is wanted, or a text of its metadata has it. wanted: casefolded."""
    if item_id.casefold().startswith(wanted):
        return True
    return any(isinstance(text, str) and wanted in text.casefold() for text in metadata.values())
