# SPDX-License-Identifier: Apache-2.0
"""Reads OpenOneRec's table of items (MODEL-23): one JSON object, semantic id -> its items, most popular first.

    {"8454660": [{"pid": 17, "count": 9}, ...], ...}      the id as one number: (a * 8192 + b) * 8192 + c
    {"0.1032.516": [...], ...}                            or its codes, joined by dots

The tokens of this id are <s_a_0>, <s_b_1032>, <s_c_516>.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jgr.catalog.catalog import Catalog, CatalogError
from jgr.fields import UserError, once
from jgr.files import read_whole

BASE = 8192
LEVELS = ("a", "b", "c")


def load_sid2pid(path: Path) -> Catalog:
    """Read the catalog, most popular item first. Raises CatalogError, naming the file and the key.

    An item with several semantic ids is refused, since jgr's items have one each.
    """
    content = read_whole(path, CatalogError)
    try:
        table = json.loads(content, object_pairs_hook=once)
    except UserError as error:
        raise CatalogError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(table, dict) or not table:
        raise CatalogError(f"{path}: expected a JSON object, semantic id -> items")
    found = []
    for key, items in table.items():
        codes = _codes(path, key)
        if not isinstance(items, list) or not items:
            raise CatalogError(f"{path}: {key!r}: expected a list of items, each with a pid")
        for place, item in enumerate(items):
            pid, count = _item(path, key, item)
            found.append((-count, place, pid, codes))
    found.sort(key=lambda item: item[:2])
    symbols = [
        tuple(f"<s_{level}_{code}>" for level, code in zip(LEVELS, codes, strict=True))
        for _, _, _, codes in found
    ]
    try:
        return Catalog.build([pid for _, _, pid, _ in found], symbols, [{} for _ in found])
    except CatalogError as error:
        raise CatalogError(f"{path}: {error}") from None


def _codes(path: Path, key: str) -> tuple[int, ...]:
    parts = key.split(".")
    if not all(part.isascii() and part.isdecimal() and len(part) <= 15 for part in parts):
        raise CatalogError(f"{path}: {key!r} is no semantic id")
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        (number,) = numbers
        numbers = [number // BASE**2, number // BASE % BASE, number % BASE]
    if len(numbers) != len(LEVELS) or max(numbers) >= BASE:
        raise CatalogError(f"{path}: {key!r}: expected {len(LEVELS)} codes below {BASE}")
    return tuple(numbers)


def _item(path: Path, key: str, item: Any) -> tuple[str, int]:
    """The pid and count of an entry; an entry that is only a pid has count 0."""
    pid, count = (item.get("pid"), item.get("count", 0)) if isinstance(item, dict) else (item, 0)
    if type(pid) not in (int, str) or type(count) is not int:
        raise CatalogError(
            f"{path}: {key!r}: expected items such as {{'pid': 17, 'count': 9}}, found {str(item)[:80]!r}"
        )
    return str(pid), count
