# SPDX-License-Identifier: Apache-2.0
"""A table's rows in a Redis server, for what this machine lacks (HLEM-1: remote shards).

A row is the value of the key jgr:rows:<table>:<model>:<row>: its bytes, behind a checksum over key and bytes. So a
value of another row or width, or a damaged one, is noticed whoever wrote it; it is an error, and never a row. What the
table is stands in jgr:rows:<table>:<model>.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jgr.embeddings.shards import ShardError
from jgr.fields import one_line
from jgr.models.table_file import TableHeader

PREFIX = "jgr:rows:"
CHECKSUM = 8
AT_ONCE = 1024
"""Rows of one MGET, and of one MSET."""

Int64 = npt.NDArray[np.int64]


class RedisShard:
    """The rows of a table that a server holds. timeout_s: for a connection, and for all that a read takes.

    Raises ShardError where the server does not answer, or has no such table of this model.
    """

    def __init__(
        self,
        address: str,
        table: str,
        model: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._timeout_s, self._clock = table, timeout_s, clock
        self._client = _connect(address, timeout_s)
        self._key = f"{PREFIX}{table}:{model}"
        found = self._ask(lambda: self._client.get(self._key))
        if found is None:
            raise ShardError(f"table {table}: the server of embeddings.remote has no rows of model {model!r}")
        try:
            self.header = msgspec.json.decode(found, type=TableHeader)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ShardError(f"table {table}: the server of embeddings.remote: {one_line(error)}") from None

    def read(self, rows: Int64) -> npt.NDArray[Any]:
        """See Shard. ShardError also for an answer that is late, or not of these rows."""
        until_s, header = self._clock() + self._timeout_s, self.header
        found = np.empty((len(rows), header.width), header.numpy_dtype)
        for at in range(0, len(rows), AT_ONCE):
            keys = [f"{self._key}:{row}" for row in rows[at : at + AT_ONCE].tolist()]
            values = cast(list[bytes | None], self._ask(partial(self._client.mget, keys)))
            if self._clock() > until_s:
                raise ShardError(f"table {self._table}: embeddings.remote took over {self._timeout_s:g} s")
            for place, (key, value) in enumerate(zip(keys, values, strict=True), at):
                if value is None:
                    raise ShardError(f"table {self._table}: embeddings.remote lacks row {rows[place]}")
                data = value[CHECKSUM:]
                if len(data) != header.row_bytes or value[:CHECKSUM] != _checksum(key, data):
                    raise ShardError(f"table {self._table}: embeddings.remote gave a wrong row {rows[place]}")
                found[place] = np.frombuffer(data, header.numpy_dtype)
        return found

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.close()

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (redis.RedisError, OSError) as cause:
            raise ShardError(
                f"table {self._table}: the server of embeddings.remote failed: {cause or type(cause).__name__}"
            ) from cause


def upload(address: str, header: TableHeader, rows: npt.NDArray[Any], timeout_s: float) -> None:
    """Put rows [held, width] into a server, where `RedisShard` finds them. header: what they are. Raises ShardError."""
    client, key = _connect(address, timeout_s), f"{PREFIX}{header.name}:{header.model}"
    try:
        for at in range(0, header.held, AT_ONCE):
            some = np.ascontiguousarray(rows[at : at + AT_ONCE])
            keys = [f"{key}:{header.first + at + place}" for place in range(len(some))]
            data = zip(keys, (row.tobytes() for row in some), strict=True)
            client.mset({name: _checksum(name, row) + row for name, row in data})
        client.set(key, msgspec.json.encode(header))  # last: a table that is not whole is not found
    except (redis.RedisError, OSError) as cause:
        raise ShardError(f"the Redis server failed: {cause or type(cause).__name__}") from cause
    finally:
        client.close()


def _connect(address: str, timeout_s: float) -> redis.Redis:
    try:
        return redis.Redis.from_url(
            address,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
    except ValueError as cause:
        raise ShardError(f"embeddings.remote: {cause}") from None


def _checksum(key: str, data: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b"\0" + data, digest_size=CHECKSUM).digest()
