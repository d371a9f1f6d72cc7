# SPDX-License-Identifier: Apache-2.0
"""Feature records in a Redis server: each item's record is the string `jgr:item:<id>`, the schema is `jgr:schema`.

MGET returns nothing for a key that is not a string. So that such a key is not taken for an item without features, the
types of the keys that were not found are asked for too; if all are found there is one round trip. A value that is
longer than any record is not kept, so a wrong one costs its own item and not the others that were asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import redis

from jgr.bounded_redis import BoundedRedis
from jgr.features.schema import MAX_RECORD_BYTES
from jgr.features.stores import StoreError
from jgr.fields import one_line

PREFIX = "jgr:item:"
SCHEMA = "jgr:schema"
MAX_SCHEMA_BYTES = 1 << 22
_NOT_A_RECORD = b""


class RedisStore:
    """A store in a Redis server. address: redis://host:port/db, as redis-py reads it.

    timeout_s: the longest time that an answer may take, with the connection that it may need, whatever the server
    sends. A broken connection is made again once, at once; further retries are the caller's.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        try:
            self._server = BoundedRedis(address, timeout_s)
        except ValueError as cause:
            raise StoreError(f"features.store: {cause}") from None

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        """The values of the items, see FeatureStore; b"" for a key that is not a string, or is longer than a record."""
        if not item_ids:
            return []
        keys = [PREFIX + item for item in item_ids]
        until_s = self._server.clock() + self._server.timeout_s
        with _usable():
            values = self._server.values(keys, MAX_RECORD_BYTES, until_s, longer=_NOT_A_RECORD)
            absent = [place for place, value in enumerate(values) if value is None]
            if absent:
                kinds = self._server.ask_each([("TYPE", keys[place]) for place in absent], until_s)
                for place, kind in zip(absent, kinds, strict=True):
                    # A key that is a string now was written in between: the next call finds it.
                    values[place] = None if kind in (b"none", b"string") else _NOT_A_RECORD
        return values

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        with _usable():
            named = zip(item_ids, values, strict=True)
            self._server.ask("MSET", *(part for item, value in named for part in (PREFIX + item, value)))

    def schema(self) -> str | None:
        with _usable():
            text = self._server.value(SCHEMA, MAX_SCHEMA_BYTES)
        return None if text is None else text.decode(errors="replace")

    def set_schema(self, text: str) -> None:
        with _usable():
            self._server.ask("SET", SCHEMA, text)

    def close(self) -> None:
        self._server.close()


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError, ValueError, TypeError) as cause:
        # The last two come of options of the address.
        raise StoreError(
            f"the Redis server of features.store failed: {one_line(cause) or type(cause).__name__}"
        ) from cause
