# SPDX-License-Identifier: Apache-2.0
"""A server that answers something else than it was asked for, too much of it, or in drops: an error each time, which
names table and shard and is counted, within the time and for about the bytes that a right answer takes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jgr.embeddings.redis_shard import RedisShard, upload
from jgr.embeddings.shards import ShardError, Shards
from jgr.models import table_file
from tests.features.redis_process import Proxy, RedisProcess

ROWS = np.random.default_rng(5).standard_normal((40, 6)).astype(np.float16)
ASKED = np.array([30, 31], np.int64)
FLOOD = 64 << 20
DROPS = 60

Lie = Callable[[socket.socket], None]


class LyingProxy(Proxy):
    """lie: what is sent in place of the server's answer to `command`; None: the answer."""

    def __init__(self, server: Path) -> None:
        self.lie: Lie | None = None
        self.command = b"MGET"
        self.ended = threading.Event()
        super().__init__(server)

    def close(self) -> None:
        """Also a second time."""
        if not self.ended.is_set():
            self.ended.set()
            super().close()

    def _pump(self, source: socket.socket, target: socket.socket, other: threading.Thread | None) -> None:
        if other is not None:
            return super()._pump(source, target, other)
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if self.lie and b"\r\n" + self.command + b"\r\n" in content:
                    self.lie(source)
                else:
                    target.sendall(content)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[LyingProxy]:
    server = RedisProcess(tmp_path)
    header = table_file.write(tmp_path / "t", "items", [ROWS], width=6, dtype="float16", model="m")
    upload(server.address, header, ROWS, 5.0)
    proxy = LyingProxy(server.socket)
    yield proxy
    proxy.close()
    server.kill()


def saying(answer: bytes) -> Lie:
    return lambda client: client.sendall(answer)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"*1\r\n$3\r\nabc\r\n", "failed: a reply of 1 values, where 2"),
        (b"*3\r\n$-1\r\n$-1\r\n$-1\r\n", "failed: a reply of 3 values, where 2"),
        (b"*1000000000\r\n", "failed: a reply of 1000000000 values, where 2"),
        (b"*-1\r\n", "failed: a reply of -1 values, where 2"),
        (b":7\r\n", "failed: it answered MGET with int"),
        (b"$-1\r\n", "failed: it answered MGET with NoneType"),
        (b"+OK\r\n", "failed: it answered MGET with bytes"),
        (b"*2\r\n:1\r\n:2\r\n", "failed: b':' begins no value"),
        (b"*2\r\n*0\r\n*0\r\n", r"failed: b'\*' begins no value"),
        (b"*2\r\n$-7\r\n", "failed: a value of -7 bytes, where at most 20"),
        (b"*2\r\n$one\r\n", "failed: b'one' is no number"),
        (b"*2\r\n$3\r\nabcdefg\r\n", "failed: a value that is longer than it says"),
        (b"HTTP/1.1 400 Bad Request\r\n", "failed: b'H' begins no value"),
        (b"-" + 5000 * b"a", "failed: a line of more than 4096 bytes"),
        (b"-ERR of\x1b[2Jthe server\r\n", "failed: ERR of\ufffd\\[2Jthe server"),
    ],
)
def test_a_wrong_reply_is_a_counted_error_and_the_next_one_is_right(
    proxy: LyingProxy, answer: bytes, message: str
) -> None:
    shards = Shards({"items": [RedisShard(proxy.address, "items", "m", 5.0)]})
    proxy.lie = saying(answer)
    with pytest.raises(ShardError, match=rf"^table items: the server of embeddings\.remote {message}"):
        shards.read("items", ASKED)
    assert shards.counts["items"] == {"failed": 2}
    proxy.lie = None
    assert (
        shards.read("items", ASKED) == ROWS[ASKED]
    ).all()  # over a new connection, nothing is left of the lie
    assert shards.counts["items"] == {"failed": 2, "remote": 2}
    shards.close()


@pytest.mark.parametrize("command", [b"GET", b"MGET"])
def test_a_reply_of_gigabytes_is_refused_where_it_begins(proxy: LyingProxy, command: bytes) -> None:
    sent = []
    proxy.command = command

    def flood(client: socket.socket) -> None:
        client.sendall(b"$3000000000\r\n" if command == b"GET" else b"*2\r\n$3000000000\r\n")
        for _ in range(FLOOD >> 16):
            client.sendall(bytes(1 << 16))
            sent.append(1 << 16)
        client.shutdown(socket.SHUT_RDWR)

    def ask() -> None:
        remote = RedisShard(proxy.address, "items", "m", 60.0)
        remote.read(ASKED)

    proxy.lie = flood
    with pytest.raises(
        ShardError, match=r"table items: .*embeddings\.remote.* a value of 3000000000 bytes, where at most"
    ):
        ask()
    proxy.close()  # the threads have ended
    assert sum(sent) < FLOOD // 2  # what the sockets' buffers hold


@pytest.mark.parametrize("command", [b"GET", b"MGET"])
def test_an_answer_in_drops_ends_with_the_time_of_the_whole_read(proxy: LyingProxy, command: bytes) -> None:
    """Every drop comes well before timeout_s is over, the last one long after it."""
    drops: list[int] = []
    proxy.command = command

    def drip(client: socket.socket) -> None:
        client.sendall(b"$59\r\n" if command == b"GET" else b"*2\r\n$20\r\n")
        for at in range(DROPS):
            proxy.ended.wait(0.1)  # between two drops
            client.sendall(b"{")
            drops.append(at)

    remote = RedisShard(proxy.address, "items", "m", 0.5) if command == b"MGET" else None
    proxy.lie = drip
    with pytest.raises(ShardError, match=r"table items: .*embeddings\.remote.* within 0.5 s"):
        (remote or RedisShard(proxy.address, "items", "m", 0.5)).read(ASKED)
    assert len(drops) < DROPS // 2
    proxy.close()


def test_several_questions_of_one_read_have_one_deadline(
    proxy: LyingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jgr.embeddings.redis_shard.AT_ONCE", 2)
    now_s, asked = [0.0], []
    remote = RedisShard(proxy.address, "items", "m", 5.0, lambda: now_s[0])
    assert (remote.read(np.arange(9)) == ROWS[:9]).all()
    monkeypatch.setattr("jgr.embeddings.redis_shard.CHECKSUM", 0)
    monkeypatch.setattr("jgr.embeddings.redis_shard._checksum", lambda of, key, data: b"")

    def late(client: socket.socket) -> None:
        asked.append(now_s[0])
        now_s[0] += 2.0
        client.sendall(b"*2\r\n" + 2 * (b"$12\r\n" + bytes(12) + b"\r\n"))

    proxy.lie = late
    with pytest.raises(ShardError, match=r"table items: .*embeddings\.remote.* 5 s"):
        remote.read(np.arange(20))
    assert asked == [0.0, 2.0, 4.0]
    remote.close()
