# SPDX-License-Identifier: Apache-2.0
"""Turns a request's item ids into catalog rows, and a user's id into the name of the user's cache entries."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.serving.api import RankRequest
from jgr.serving.errors import invalid, quoted
from jgr.serving.prefill import Asked

Int32 = npt.NDArray[np.int32]

MAX_LISTED_IDS = 10
"""The most unknown ids that an answer lists."""
USER_ENTRY = "id:"
"""What stands before the user's id in the name of a user's cache entries, after the tenant; in no other entry's."""


def known_candidates(request: RankRequest, catalog: Catalog, limit: int) -> Int32:
    """The candidates' catalog rows, [c >= 1] int32: in the request's order, or in the catalog's for "all".

    RequestError for too many, for one that the catalog lacks or that comes twice, for top_k, and where the history's
    items are left out and none remains.
    """
    listed = None if request.candidates == "all" else request.candidates
    count = catalog.n_items if listed is None else len(listed)
    if count > limit:
        whole = ", all items of the catalog" if listed is None else ""
        raise invalid("candidates", f"candidates has {count} items{whole}; the limit is {limit}")
    if request.top_k is not None and request.top_k > count:
        raise invalid("top_k", f"top_k is {request.top_k}; there are only {count} candidates")
    rows = np.arange(count, dtype=np.int32) if listed is None else _listed(listed, catalog)
    if request.exclude_history:
        keep = np.ones(catalog.n_items, np.bool_)
        keep[catalog.rows(texts(request.history))[0]] = False
        rows = rows[keep[rows]]
        if not len(rows):
            raise invalid("exclude_history", "exclude_history: every candidate is in the history")
    return rows


def _listed(candidates: list[str | int], catalog: Catalog) -> Int32:
    """The rows of candidates that are named one by one."""
    item_ids = texts(candidates)
    rows, unknown = catalog.rows(item_ids)
    if unknown:
        at = item_ids.index(unknown[0])
        raise invalid(f"candidates[{at}]", f"item {quoted(unknown[0])} is not in the catalog")
    if len(set(item_ids)) < len(item_ids):
        first: dict[str, int] = {}
        for at, item_id in enumerate(item_ids):
            if first.setdefault(item_id, at) != at:
                raise invalid(
                    f"candidates[{at}]", f"item {quoted(item_id)} is already candidates[{first[item_id]}]"
                )
    return rows


def known_history(request: Asked, catalog: Catalog, limit: int, reject: bool) -> tuple[Int32, list[str]]:
    """The catalog rows of the history's known items, [h >= 1] int32, and the ids of the unknown ones.

    limit: the most items that a history may have. Raises RequestError for more, for a history without a known item,
    and, if `reject` is true, for any unknown item.
    """
    count = len(request.history)
    if count > limit:
        raise invalid("history", f"history has {count} items; the limit is {limit}")
    item_ids = texts(request.history)
    rows, unknown = catalog.rows(item_ids)
    if unknown and reject:
        at = item_ids.index(unknown[0])
        raise invalid(f"history[{at}]", f"item {quoted(unknown[0])} is not in the catalog")
    if not len(rows):
        raise invalid("history", "no item of the history is in the catalog")
    return rows, unknown


def user_entry(user_id: str | int | None, tenant: str = "") -> str:
    """The name of a user's cache entries; "" where user_id is null or empty, which means nobody.

    tenant: what the names of all entries of its users begin with; see Engine.submit.
    """
    return "" if user_id is None or user_id == "" else f"{tenant}{USER_ENTRY}{user_id}"


def texts(item_ids: list[str | int]) -> list[str]:
    """The item ids as text: integers become their decimal digits. The list itself where all are text."""
    try:
        "".join(cast(list[str], item_ids))  # the fastest way to see that all are text
    except TypeError:
        return list(map(str, item_ids))
    return cast(list[str], item_ids)
