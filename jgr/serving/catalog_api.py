# SPDX-License-Identifier: Apache-2.0
"""The part of the wire contract (`jgr.serving.api`) that tells of catalogs and their items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jgr.serving.fleet_api import ReloadState

MAX_SEARCHED = 1 << 15
"""The most items of a catalog that a search by words looks at."""


class CatalogItem(Struct, kw_only=True):
    """An item of the catalog."""

    item_id: Annotated[str, Meta(description="The catalog's id of the item.")]
    semantic_id: Annotated[
        list[str | int], Meta(description="The item's semantic id: a token name or token id for each level.")
    ]
    metadata: Annotated[dict[str, Any], Meta(description="The item's metadata in the catalog.")]
    catalog_version: Annotated[str, Meta(description="Content hash of the catalog.")]


class ItemList(Struct, kw_only=True):
    """Items of the catalog that were looked for."""

    data: Annotated[
        list[CatalogItem],
        Meta(
            description="The item whose id is the query, if there is one; then the others, in the catalog's order. Of "
            "item_id: the items that are there, in the order of the request."
        ),
    ]
    searched: Annotated[
        int,
        Meta(
            description="Number of the catalog's items that were looked at, from the first on, until there were "
            f"enough; {MAX_SEARCHED} at most."
        ),
    ]


CatalogState = Literal["active", "activating", "previous", "idle"]


class CatalogInfo(Struct, kw_only=True):
    """A catalog that the server holds."""

    version: Annotated[str, Meta(description="Content hash: equal catalogs have equal versions.")]
    items: Annotated[int, Meta(description="Number of items in the catalog.")]
    state: Annotated[
        CatalogState,
        Meta(
            description="active: requests are answered from it. activating: it is being made active. previous: a "
            "rollback returns to it. idle: none of these."
        ),
    ]
    uploaded_at: Annotated[
        str | None,
        Meta(description="Time of the upload; UTC, RFC 3339. null: it came with a start or reload."),
    ]


class CatalogList(Struct, kw_only=True):
    """The catalogs of this server, oldest first."""

    data: Annotated[list[CatalogInfo], Meta(description="The catalogs, oldest first.")]
    activation: Annotated[
        ReloadState,
        Meta(
            description="State of the last activation or rollback. running: until the new catalog is served and the "
            "old one's requests are finished. failed: nothing was changed."
        ),
    ]
    activation_error: Annotated[
        str | None, Meta(description="Why the last activation failed. null: it did not.")
    ]
