# SPDX-License-Identifier: Apache-2.0
"""Where feature records lie: one interface, a Redis server or an SQLite file behind it.

A store holds bytes and knows nothing of records, but for the text of their schema, which it keeps beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jgr.config import UserError


class StoreError(UserError):
    """The store did not answer, or not as a store does; nothing is known of the items that it was asked for."""


class FeatureStore(Protocol):
    """Safe to use from several threads at once. All methods raise StoreError."""

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        """The values of the items, in order, in one round trip. None: the store has nothing of it."""

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        """Keep values, in place of earlier ones, all of them or none where the store can do that."""

    def schema(self) -> str | None:
        """The text of the schema; None where nothing was loaded."""

    def set_schema(self, text: str) -> None: ...

    def close(self) -> None:
        """Let go of connections and files; of those that threads still use, once they have ended."""
