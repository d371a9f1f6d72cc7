# SPDX-License-Identifier: Apache-2.0
"""Opens the feature store at an address."""

from __future__ import annotations

from jgr import extras
from jgr.features.sqlite_store import SqliteStore
from jgr.features.stores import FeatureStore, StoreError

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def open_store(address: str, timeout_s: float, *, create: bool = False) -> FeatureStore:
    """Open the store at redis://host:port/db (also rediss://, unix://), or in the SQLite file of that path.

    timeout_s: how long to wait for a connection or an answer. create: make the file if it is missing. Raises StoreError
    for a malformed address and for a file that is not a store; a Redis server is not asked yet. Raises UserError where
    jgr[redis] is missing.
    """
    if address.startswith(REDIS_SCHEMES):
        extras.require("redis", "features.store in a Redis server")
        from jgr.features.redis_store import RedisStore

        return RedisStore(address, timeout_s)
    if "://" in address:
        scheme = address.partition("://")[0]  # the rest may hold a password
        raise StoreError(f"features.store: {scheme}:// is none of {', '.join(REDIS_SCHEMES)}, nor a file")
    return SqliteStore(address, timeout_s, create=create)
