# SPDX-License-Identifier: Apache-2.0
"""Feature records in an SQLite file: the embedded store, for one machine without a server."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from jgr.features.stores import StoreError

_VARIABLES = 1000
"""The most variables in a statement; SQLite allows 32,766."""
_TABLES = """
CREATE TABLE IF NOT EXISTS features (item TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS schema (one INTEGER PRIMARY KEY CHECK (one = 1), text TEXT NOT NULL);
"""


class SqliteStore:
    """A store in an SQLite file. timeout_s: how long to wait for another writer. create: make the file if missing."""

    def __init__(self, path: str, timeout_s: float, *, create: bool = False) -> None:
        self._path, self._timeout_s = Path(path), timeout_s
        if not create and not self._path.is_file():
            raise StoreError(f"{path}: there is no such feature store; run jgr features load")
        # If the file is deleted, a thread that connects later must not make an empty one.
        self._uri = f"{self._path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        # A connection belongs to one thread.
        self._connections: list[sqlite3.Connection] = []
        self._mine = threading.local()
        self._lock = threading.Lock()
        try:
            if create:
                self._connection().executescript(_TABLES)
            names = (
                self._connection().execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            )
        except sqlite3.Error as cause:
            raise self._unusable(cause) from cause
        if not {("features",), ("schema",)} <= set(names):
            self.close()
            raise StoreError(f"{path}: is a database, and no feature store; run jgr features load")

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        """The values of the items, see FeatureStore; b"" for a value that is not bytes."""
        found: dict[str, object] = {}
        try:
            for start in range(0, len(item_ids), _VARIABLES):
                part = item_ids[start : start + _VARIABLES]
                marks = ",".join("?" * len(part))
                rows = self._connection().execute(f"SELECT * FROM features WHERE item IN ({marks})", part)
                found.update(rows)
        except sqlite3.Error as cause:
            raise self._unusable(cause) from cause
        values = map(found.get, item_ids)
        return [value if value is None or isinstance(value, bytes) else b"" for value in values]

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        rows = zip(item_ids, values, strict=True)
        try:
            with self._connection() as connection:
                connection.executemany("INSERT OR REPLACE INTO features VALUES (?, ?)", rows)
        except sqlite3.Error as cause:
            raise self._unusable(cause) from cause

    def schema(self) -> str | None:
        try:
            row = self._connection().execute("SELECT text FROM schema").fetchone()
        except sqlite3.Error as cause:
            raise self._unusable(cause) from cause
        return None if row is None else str(row[0])

    def set_schema(self, text: str) -> None:
        try:
            with self._connection() as connection:
                connection.execute("INSERT OR REPLACE INTO schema VALUES (1, ?)", (text,))
        except sqlite3.Error as cause:
            raise self._unusable(cause) from cause

    def close(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def _connection(self) -> sqlite3.Connection:
        mine: sqlite3.Connection | None = getattr(self._mine, "connection", None)
        if mine is None:
            # check_same_thread: `close` closes the connections of all threads.
            mine = sqlite3.connect(self._uri, timeout=self._timeout_s, check_same_thread=False, uri=True)
            self._mine.connection = mine
            with self._lock:
                self._connections.append(mine)
        return mine

    def _unusable(self, cause: sqlite3.Error) -> StoreError:
        return StoreError(f"{self._path}: cannot be used as a feature store: {cause}")
