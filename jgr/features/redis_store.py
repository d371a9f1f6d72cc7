# SPDX-License-Identifier: Apache-2.0
"""Feature records in a Redis server: each item's record is the string `jgr:item:<id>`, the schema is `jgr:schema`.

MGET returns nothing for a key that is not a string. So that such a key is not taken for an item without features, the
types of the keys that were not found are asked for too; if all are found there is one round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jgr.features.stores import StoreError

PREFIX = "jgr:item:"
SCHEMA = "jgr:schema"
_NOT_A_RECORD = b""


class RedisStore:
    """A store in a Redis server. address: redis://host:port/db, as redis-py reads it.

    timeout_s: how long to wait for a connection, and for each answer. A broken connection is made again once, at once;
    further retries are the caller's.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        try:
            self._client = redis.Redis.from_url(
                address,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as cause:
            raise StoreError(f"features.store: {cause}") from None

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        """The values of the items, see FeatureStore; b"" for a key that is not a string."""
        keys = [PREFIX + item for item in item_ids]
        try:
            values = cast(list[bytes | None], self._client.mget(keys))
            absent = [place for place, value in enumerate(values) if value is None]
            if absent:
                with self._client.pipeline(transaction=False) as asking:
                    for place in absent:
                        asking.type(keys[place])
                    for place, kind in zip(absent, asking.execute(), strict=True):
                        # A key that is a string now was written in between: the next call finds it.
                        values[place] = None if kind in (b"none", b"string") else _NOT_A_RECORD
        except (redis.RedisError, OSError) as cause:
            raise _unusable(cause) from cause
        return values

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        try:
            self._client.mset({PREFIX + item: value for item, value in zip(item_ids, values, strict=True)})
        except (redis.RedisError, OSError) as cause:
            raise _unusable(cause) from cause

    def schema(self) -> str | None:
        try:
            text = cast(bytes | None, self._client.get(SCHEMA))
        except (redis.RedisError, OSError) as cause:
            raise _unusable(cause) from cause
        return None if text is None else text.decode(errors="replace")

    def set_schema(self, text: str) -> None:
        try:
            self._client.set(SCHEMA, text)
        except (redis.RedisError, OSError) as cause:
            raise _unusable(cause) from cause

    def close(self) -> None:
        self._client.close()


def _unusable(cause: Exception) -> StoreError:
    return StoreError(f"the Redis server failed: {cause or type(cause).__name__}")
