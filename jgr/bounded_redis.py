# SPDX-License-Identifier: Apache-2.0
"""A Redis server that is asked within a time and for a number of bytes, whatever it sends.

The one idea: redis-py connects, keeps connections and sends; its replies are read here. Its own parsers give a socket's
timeout to each piece of a reply, so one that comes in drops has no end, and they take as many bytes and elements as a
reply says it has. Here every piece has what is left of one deadline, and a reply of another size than it may have is
refused where it begins. redis-py closes a connection whose reply was not read to its end.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, parse_url
from redis.exceptions import InvalidResponse
from redis.retry import Retry

SCHEMES = ("redis://", "rediss://", "unix://")
LINE_BYTES = 4096
"""The longest line of a reply: a status, an error, a number."""
READ_BYTES = 1 << 16
DROPPED_BYTES = 16 << 20
"""The longest value that is read to be dropped, see _Bounds; a longer one is refused where it begins."""


@dataclass(frozen=True)
class _Bounds:
    """until_s: when a reply must be whole, by the clock. values: how many it has where it is an array. most: bytes of
    the longest one. longer: what stands for one that is longer, which is read and dropped; None: it is refused."""

    until_s: float
    timeout_s: float
    clock: Callable[[], float]
    values: int = 1
    most: int = LINE_BYTES
    longer: bytes | None = None

    def left_s(self) -> float:
        """Raises redis.TimeoutError where nothing is left."""
        left = self.until_s - self.clock()
        if left <= 0:
            raise self.late()
        return left

    def late(self) -> redis.TimeoutError:
        return redis.TimeoutError(f"Timeout: its answer was not whole within {self.timeout_s:g} s")


_bounds: ContextVar[_Bounds] = ContextVar("bounds")
"""The bounds of what this thread asks now: the pool gives a connection to one thread at a time."""


class BoundedRedis:
    """A client of the server at an address. timeout_s: of a question, with the connection that it may need.

    Raises ValueError for an address that is none.
    """

    def __init__(self, address: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self.clock = timeout_s, clock
        try:
            options: dict[str, Any] = cast(Any, parse_url)(address)
        except ValueError as cause:
            if not address.startswith(SCHEMES):
                raise
            # What it says may have a part of the password in it.
            raise ValueError(
                "the address is not redis://[:password@]host:port/db; in a password, / # and ? are %2F %23 and %3F"
            ) from cause
        base = options.pop("connection_class", Connection)
        options |= {
            "parser_class": _Parser,
            "protocol": 2,  # no maps and no messages between replies
            "decode_responses": False,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        }
        kind = type(base.__name__, (_Timely, base), {})
        self._client: Any = redis.Redis(connection_pool=ConnectionPool(connection_class=kind, **options))

    def ask(self, *command: Any, until_s: float | None = None) -> Any:
        """The reply to a command: a status, an int, or None; what redis-py makes of some.

        until_s: by the clock; None: timeout_s from now. Raises redis.RedisError or OSError.
        """
        with self._within(until_s):
            return self._client.execute_command(*command)

    def ask_each(self, commands: Sequence[Sequence[Any]], until_s: float | None = None) -> list[Any]:
        """The replies to several commands in one round trip, as `ask` gives them."""
        with self._within(until_s), self._client.pipeline(transaction=False) as asking:
            for command in commands:
                asking.execute_command(*command)
            return cast(list[Any], asking.execute())

    def value(self, key: str, most: int) -> bytes | None:
        """The value of a key, of so many bytes at most; None where there is none. Raises as `ask` does."""
        with self._within(None, most=most):
            found = self._client.execute_command("GET", key)
        if found is None or isinstance(found, bytes):
            return found
        raise self._out_of_step("GET", found)

    def values(
        self, keys: Sequence[str], most: int, until_s: float | None = None, longer: bytes | None = None
    ) -> list[bytes | None]:
        """The values [n >= 1] of keys in one round trip, each of so many bytes at most. longer: see _Bounds. Raises as
        `ask` does."""
        with self._within(until_s, len(keys), most, longer):
            found = self._client.execute_command("MGET", *keys)
        if isinstance(found, list) and len(found) == len(keys):
            return found
        raise self._out_of_step("MGET", found)

    @contextlib.contextmanager
    def _within(
        self, until_s: float | None, values: int = 1, most: int = LINE_BYTES, longer: bytes | None = None
    ) -> Iterator[None]:
        if until_s is None:
            until_s = self.clock() + self.timeout_s
        token = _bounds.set(_Bounds(until_s, self.timeout_s, self.clock, values, most, longer))
        try:
            yield
        finally:
            _bounds.reset(token)

    def _out_of_step(self, command: str, found: object) -> InvalidResponse:
        """The next reply may be out of step with what is asked then, so connections that nobody uses are closed."""
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.connection_pool.disconnect(inuse_connections=False)
        return InvalidResponse(f"it answered {command} with {type(found).__name__}")

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.close()


class _Timely:
    """Stands before a class of redis-py's connections: connects and sends within what is left."""

    _sock: Any
    socket_connect_timeout: float

    def _connect(self) -> Any:
        self.socket_connect_timeout = _bounds.get().left_s()
        return cast(Any, super())._connect()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        left_s = _bounds.get().left_s()
        if self._sock:
            self._sock.settimeout(left_s)
        cast(Any, super()).send_packed_command(command, check_health)


class _Parser:
    """Reads a connection's replies: what redis-py asks of a parser, for statuses, errors, numbers, values and arrays of
    values."""

    def __init__(self, socket_read_size: int) -> None:
        self._sock: Any = None
        self._held, self._at = bytearray(), 0

    def on_connect(self, connection: Any) -> None:
        self._sock = connection._sock
        self._held, self._at = bytearray(), 0

    def on_disconnect(self) -> None:
        self._sock = None
        self._held, self._at = bytearray(), 0

    def can_read(self, timeout: float | None = 0) -> bool:
        """Whether a reply has begun, or the server has closed the connection."""
        if self._sock is None:
            raise redis.ConnectionError("the connection is closed")
        if self._at < len(self._held) or (hasattr(self._sock, "pending") and self._sock.pending()):
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1e3))

    def read_response(self, *_: Any, **__: Any) -> Any:
        bounds = _bounds.get()
        with self._as_one(bounds):
            kind, said = self._line(bounds)
            if kind == b"+":
                return said
            if kind == b"-":
                return redis.ResponseError(said.decode(errors="replace"))
            if kind == b":":
                return _number(said)
            if kind != b"*":
                return self._value(kind, said, bounds)
            if (count := _number(said)) != bounds.values:
                raise InvalidResponse(f"a reply of {count} values, where {bounds.values} were asked for")
            return self._values(count, bounds)

    @contextlib.contextmanager
    def _as_one(self, bounds: _Bounds) -> Iterator[None]:
        """A reply is read from here on; what was read of it is dropped once it ends."""
        try:
            yield
        except TimeoutError:
            raise bounds.late() from None
        finally:
            del self._held[: self._at]
            self._at = 0

    def _values(self, count: int, bounds: _Bounds) -> list[bytes | None]:
        found: list[bytes | None] = []
        # Most values are as long as the one before, and need no search: `usual` is how such a value begins.
        usual, size, held = b"$%d\r\n" % bounds.most, bounds.most, self._held
        for _ in range(count):
            at, end = self._at, self._at + len(usual) + size
            if held.startswith(usual, at) and held.startswith(b"\r\n", end):
                found.append(bytes(held[at + len(usual) : end]))
                self._at = end + 2
                continue
            value = self._value(*self._line(bounds), bounds)
            found.append(value)
            if value:
                usual, size = b"$%d\r\n" % len(value), len(value)
        return found

    def _value(self, kind: bytes, said: bytes, bounds: _Bounds) -> bytes | None:
        if kind != b"$":
            raise InvalidResponse(f"{kind!r} begins no value")
        size = _number(said)
        if size == -1:
            return None
        if bounds.most < size <= DROPPED_BYTES and bounds.longer is not None:
            self._drop(size + 2, bounds)
            return bounds.longer
        if not 0 <= size <= bounds.most:
            raise InvalidResponse(f"a value of {size} bytes, where at most {bounds.most} were asked for")
        end = self._at + size
        while len(self._held) < end + 2:
            self._more(bounds)
        if self._held[end : end + 2] != b"\r\n":
            raise InvalidResponse("a value that is longer than it says")
        value = bytes(memoryview(self._held)[self._at : end])
        self._at = end + 2
        return value

    def _drop(self, size: int, bounds: _Bounds) -> None:
        """Read so many bytes, and keep none of them."""
        while (held := len(self._held) - self._at) < size:
            size -= held
            self._held.clear()
            self._at = 0
            self._more(bounds)
        self._at += size

    def _line(self, bounds: _Bounds) -> tuple[bytes, bytes]:
        """The first byte of a line, and the others."""
        while (end := self._held.find(b"\r\n", self._at, self._at + LINE_BYTES)) < 0:
            if len(self._held) - self._at >= LINE_BYTES:
                raise InvalidResponse(f"a line of more than {LINE_BYTES} bytes")
            self._more(bounds)
        line = bytes(memoryview(self._held)[self._at : end])
        self._at = end + 2
        return line[:1], line[1:]

    def _more(self, bounds: _Bounds) -> None:
        left_s = bounds.left_s()
        if self._sock is None:
            raise redis.ConnectionError("the connection is closed")
        self._sock.settimeout(left_s)
        found = cast(bytes, self._sock.recv(READ_BYTES))
        if not found:
            raise redis.ConnectionError("Connection closed by server.")
        self._held += found


def _number(said: bytes) -> int:
    if not said.removeprefix(b"-").isdigit() or len(said) > 20:
        raise InvalidResponse(f"{said[:20]!r} is no number")
    return int(said)
