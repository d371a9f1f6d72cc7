# SPDX-License-Identifier: Apache-2.0
"""The interface of feature stores, which a Redis server and an SQLite file implement.

A store holds bytes by item id, and the text of their schema. It does not interpret them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jgr.config import UserError


class StoreError(UserError):
    """The store did not answer, or not as a store should; nothing is known about the items that it was asked for."""


class FeatureStore(Protocol):
    """A store that several threads may use at once. All methods raise StoreError."""

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        """The values of the items, in order, in one round trip; None for an item that the store does not have."""

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        """Store values, replacing earlier ones; all or none of them, if the store can do that."""

    def schema(self) -> str | None:
        """The text of the schema; None if nothing was loaded yet."""

    def set_schema(self, text: str) -> None: ...

    def close(self) -> None:
        """Close connections and files; those that other threads still use are closed when these end."""
