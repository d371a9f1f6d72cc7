# SPDX-License-Identifier: Apache-2.0
"""A table's rows in a Redis server, for what this machine lacks (HLEM-1: remote shards).

A row is the value of the key jgr:rows:<table>:<model>:<row>: its bytes, behind a checksum over key, bytes and the
digest of the whole table. So a value of another row, width, type or table, or a damaged one, is noticed whoever wrote
it; it is an error, and never a row. What the table is stands in jgr:rows:<table>:<model>.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import redis

from jgr.bounded_redis import BoundedRedis
from jgr.embeddings.breaker import Breaker
from jgr.embeddings.shards import ShardAway, ShardError
from jgr.fields import one_line
from jgr.files import refuse_overwriting
from jgr.models.table_file import HEADER_BYTES, TableHeader, digest_of

PREFIX = "jgr:rows:"
CHECKSUM = 8
AT_ONCE = 1024
AT_ONCE_BYTES = 4 << 20
"""The most rows, and bytes of more rows than one, of one MGET and of one MSET."""

Int64 = npt.NDArray[np.int64]
Show = Callable[[int, int, str], None]
"""Is told of rows that are done, rows in all, and what is done with them."""


class DamagedHeader(ShardError):
    """What a server has where a table's header would be is none."""


class RedisShard:
    """The rows of a table that a server holds. timeout_s: for a connection, and for all that a read takes. Once it has
    not answered several times, most reads fail at once, so that they do not keep what serves the others.

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
        self._table, self._clock = table, clock
        self._server = _Server(address, table, model, timeout_s, clock)
        self._breaker, self._lock, self._why = Breaker(), threading.Lock(), ""
        found = self._server.header()
        if found is None:
            raise ShardError(
                f"table {table}: the server of embeddings.remote has no rows of model {model!r}; jgr embeddings upload "
                "puts them there"
            )
        self.header = found

    def read(self, rows: Int64) -> npt.NDArray[Any]:
        """See Shard. ShardError also for an answer that is late, or not of these rows."""
        with self._lock:
            if not self._breaker.may(self._clock()):
                raise ShardAway(
                    f"table {self._table}: the server of embeddings.remote was not asked, since it failed "
                    f"{self._breaker.failed_in_row} times in a row, at last so: {self._why}"
                )
        why: str | None = "it raised an error"  # None: it answered
        try:
            found = self._server.read(rows, self.header)
            why = None
        except ShardAway as error:
            why = str(error)
            raise
        except ShardError:  # a wrong answer is one
            why = None
            raise
        finally:
            with self._lock:
                if why is None:
                    self._breaker.worked()
                else:
                    self._breaker.failed(self._clock())
                    self._why = why
        return found

    def close(self) -> None:
        self._server.close()


class _Server:
    """A table's keys in a server. Every failure is a ShardError with the table's name."""

    def __init__(
        self,
        address: str,
        table: str,
        model: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self.key = table, f"{PREFIX}{table}:{model}"
        self._timeout_s, self._clock = timeout_s, clock
        try:
            self._redis = BoundedRedis(address, timeout_s, clock)
        except ValueError as cause:
            raise ShardError(f"embeddings.remote: {cause}") from None

    def header(self) -> TableHeader | None:
        """What the rows are; None where the server has none. Raises DamagedHeader."""
        with self._named():
            found = self._redis.value(self.key, HEADER_BYTES)
        if found is None:
            return None
        try:
            return msgspec.json.decode(found, type=TableHeader)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedHeader(
                f"table {self._table}: what the server of embeddings.remote has at {self.key} is no header: "
                f"{one_line(error)}; jgr embeddings upload --overwrite writes it anew"
            ) from None

    def read(self, rows: Int64, header: TableHeader) -> npt.NDArray[Any]:
        until_s = self._clock() + self._timeout_s
        found = np.empty((len(rows), header.width), header.numpy_dtype)
        step = rows_at_once(header)
        for at in range(0, len(rows), step):
            keys = [f"{self.key}:{row}" for row in rows[at : at + step].tolist()]
            values = self.values(keys, header.row_bytes, until_s)
            for place, (key, value) in enumerate(zip(keys, values, strict=True), at):
                if value is None:
                    raise ShardError(f"table {self._table}: embeddings.remote lacks row {rows[place]}")
                data = value[CHECKSUM:]
                if len(data) != header.row_bytes or value[:CHECKSUM] != _checksum(header, key, data):
                    raise ShardError(f"table {self._table}: embeddings.remote gave a wrong row {rows[place]}")
                found[place] = np.frombuffer(data, header.numpy_dtype)
        if self._clock() > until_s:
            raise ShardAway(f"table {self._table}: embeddings.remote took over {self._timeout_s:g} s")
        return found

    def values(self, keys: list[str], row_bytes: int, until_s: float | None = None) -> list[bytes | None]:
        """The values of rows' keys, as many, which may be wrong ones; b"" for one that is longer than a row's."""
        with self._named():
            return self._redis.values(keys, CHECKSUM + row_bytes, until_s, longer=b"")

    def ask(self, *command: Any) -> Any:
        """See BoundedRedis.ask."""
        with self._named():
            return self._redis.ask(*command)

    def close(self) -> None:
        self._redis.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError, ValueError, TypeError) as cause:
            # The last two come of options of the address.
            raise ShardAway(
                f"table {self._table}: the server of embeddings.remote failed: "
                f"{one_line(cause) or type(cause).__name__}"
            ) from cause


def rows_at_once(header: TableHeader) -> int:
    """Rows of one MGET, and of one MSET."""
    return max(1, min(AT_ONCE, AT_ONCE_BYTES // (CHECKSUM + header.row_bytes)))


def upload(
    address: str,
    header: TableHeader,
    rows: npt.NDArray[Any],
    timeout_s: float,
    *,
    overwrite: bool = True,
    show: Show = lambda done, total, status: None,
) -> int:
    """Put rows [held, width] into a server, where `RedisShard` finds them; returns how many it did not have yet.

    header: what they are; its digest is made anew. timeout_s: for each question. overwrite: replace other rows of the
    model that the server has. What an upload that was ended has left there is not sent again. At last all rows are
    read back: a server that is too small may drop some without a word. Raises ShardError; UserError where other rows
    would be overwritten.
    """
    if len(rows) != header.held:
        raise ValueError(f"{len(rows)} rows, the header says {header.held}")
    # Some at a time: a mapped table need not be in memory as a whole.
    parts = (rows[at : at + AT_ONCE] for at in range(0, len(rows), AT_ONCE))
    header = msgspec.structs.replace(header, sha256=digest_of(parts, header.dtype))
    server = _Server(address, header.name, header.model, timeout_s)
    try:
        try:
            before, damaged = server.header(), False
        except DamagedHeader:
            before, damaged = None, True
        if damaged or before not in (None, header):
            if not _same_table(before, header):
                refuse_overwriting(Path("Redis"), overwrite, "--remote", "other rows of this model")
            server.ask("DEL", server.key)  # a table that is not whole is not found
        new = _put(server, header, rows, show)
        _check(server, header, show)
        server.ask("SET", server.key, msgspec.json.encode(header))
        return new
    finally:
        server.close()


def _same_table(one: TableHeader | None, other: TableHeader) -> bool:
    """Whether both are rows of one table, which may be others of them."""
    return one is not None and (one.whole, one.dtype) == (other.whole, other.dtype)


def _put(server: _Server, header: TableHeader, rows: npt.NDArray[Any], show: Show) -> int:
    step, new = rows_at_once(header), 0
    longest = 4 * header.width  # what was there before may be of a wider type
    for at in range(0, header.held, step):
        some = np.ascontiguousarray(rows[at : at + step])
        keys = [f"{server.key}:{header.first + at + place}" for place in range(len(some))]
        wanted = {
            key: _checksum(header, key, row.tobytes()) + row.tobytes()
            for key, row in zip(keys, some, strict=True)
        }
        there = dict(zip(keys, server.values(keys, longest), strict=True))
        lacking = {key: value for key, value in wanted.items() if there[key] != value}
        if lacking:
            server.ask("MSET", *(part for pair in lacking.items() for part in pair))
        new += len(lacking)
        show(at + len(some), header.held, "uploading")
    return new


def _check(server: _Server, header: TableHeader, show: Show) -> None:
    """Read all rows back. ShardError where one is missing or not what was put there."""
    step, digest = rows_at_once(header), hashlib.sha256()
    end = header.first + header.held
    try:
        for at in range(header.first, end, step):
            digest.update(server.read(np.arange(at, min(at + step, end)), header).tobytes())
            show(min(at + step, end) - header.first, header.held, "checking")
        if digest.hexdigest() != header.sha256:
            raise ShardError(f"table {header.name}: its rows are not those that were put there (SHA-256)")
    except ShardError as error:
        raise ShardError(
            f"{error} (read back after the upload; a server with too little maxmemory drops rows)"
        ) from None


def _checksum(of: TableHeader, key: str, data: bytes) -> bytes:
    named = f"{of.dtype} {of.whole} {key}".encode()
    return hashlib.blake2b(named + b"\0" + data, digest_size=CHECKSUM).digest()
