# SPDX-License-Identifier: Apache-2.0
"""Blocks between an owner and a reader over real sockets and shared memory, and all that can be wrong with them."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr import extras
from jgr.fields import UserError
from jgr.placement import transport
from jgr.placement.landing import SHARED, SharedLanding, TransportError
from jgr.placement.shared_items import Block, block_of
from jgr.placement.transport import (
    MAGIC,
    Bucket,
    ItemServer,
    Peer,
    SocketTransport,
    machine,
)

SECRET, MODEL, WORDS = b"s" * 32, "model@1", 6
PATIENCE_S = 60.0


class Owner:
    """Holds blocks of some rows; counts what is lent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.blocks = {
            row: block_of(rng.integers(0, 2**32, (1 + row % 3, WORDS), np.uint32)) for row in range(20)
        }
        self.lent = self.asked = 0
        self.broken: set[int] = set()
        self._changed = threading.Condition()

    def none_is_lent(self) -> bool:
        """Whether all is given back in time: that is just after a reader has the last byte, not before it."""
        with self._changed:
            return self._changed.wait_for(lambda: self.lent == 0, PATIENCE_S)

    @contextmanager
    def read(self, rows: Sequence[int], digests: Sequence[bytes]) -> Iterator[list[Block | None]]:
        self.lent += 1
        self.asked += len(rows)
        found = [
            self.blocks.get(row) if of == digest(row) else None for row, of in zip(rows, digests, strict=True)
        ]
        yield [
            Block(block.words ^ 1, block.checksum) if row in self.broken and block is not None else block
            for row, block in zip(rows, found, strict=True)
        ]
        with self._changed:
            self.lent -= 1
            self._changed.notify_all()


def digest(row: int) -> bytes:
    return row.to_bytes(16, "little")


def wanted(*rows: int) -> dict[int, tuple[bytes, int]]:
    return {row: (digest(row), 1 + row % 3) for row in rows}


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def server(owner: Owner) -> Iterator[ItemServer]:
    server = ItemServer(owner.read, SECRET, MODEL)
    yield server
    server.close()


@pytest.fixture(params=["shared", "socket"])
def peer(request: pytest.FixtureRequest, server: ItemServer) -> Peer:
    """The owner on this machine, and as if it were on another one."""
    return Peer("127.0.0.1", server.port, machine() if request.param == "shared" else "elsewhere")


def reader(secret: bytes = SECRET, model: str = MODEL) -> SocketTransport:
    return SocketTransport(secret, model, WORDS)


def same(found: dict[int, Block], owner: Owner, rows: Sequence[int]) -> None:
    assert list(found) == list(rows)
    for row, block in found.items():
        np.testing.assert_array_equal(block.words, owner.blocks[row].words)
        assert block.checksum == owner.blocks[row].checksum


def test_blocks_arrive_whole_and_a_connection_is_used_again(owner: Owner, peer: Peer) -> None:
    before = set(SHARED.glob("jgr-items-*"))
    mine = reader()
    same(mine.fetch(peer, wanted(3, 7, 5), PATIENCE_S), owner, [3, 7, 5])
    same(mine.fetch(peer, wanted(*range(20)), PATIENCE_S), owner, range(20))
    assert (len(mine._idle[peer]), owner.none_is_lent()) == (1, True)
    assert set(SHARED.glob("jgr-items-*")) <= before, "what is open has no name any more"
    mine.close()


def test_connections_to_who_is_gone_are_closed(owner: Owner, peer: Peer) -> None:
    other = ItemServer(owner.read, SECRET, MODEL)
    replaced = Peer("127.0.0.1", other.port, peer.machine)
    mine = reader()
    for each in (peer, replaced):
        same(mine.fetch(each, wanted(3), PATIENCE_S), owner, [3])
    (kept,), (gone,) = mine._idle[peer], mine._idle[replaced]
    mine.keep([peer])
    assert mine._idle == {peer: [kept]}
    assert gone._conversation.connection.fileno() == -1 and kept._conversation.connection.fileno() >= 0
    same(mine.fetch(replaced, wanted(3), PATIENCE_S), owner, [3])
    assert mine._idle == {peer: [kept]}, "what was read from meanwhile is not kept either"
    mine.keep([replaced, peer])
    same(mine.fetch(replaced, wanted(3), PATIENCE_S), owner, [3])
    assert mine._idle.keys() == {peer, replaced}
    mine.close()
    assert mine._idle == {}
    other.close()


def test_a_row_that_is_not_there_or_of_other_tokens_is_left_out(owner: Owner, peer: Peer) -> None:
    mine = reader()
    asked = wanted(1, 99, 2) | {4: (digest(5), 2)}
    same(mine.fetch(peer, asked, PATIENCE_S), owner, [1, 2])
    mine.close()


def test_a_block_that_is_not_what_its_owner_says_is_left_out(owner: Owner, peer: Peer) -> None:
    owner.broken = {2}
    mine = reader()
    same(mine.fetch(peer, wanted(1, 2, 3), PATIENCE_S), owner, [1, 3])
    mine.close()


def test_a_block_of_another_size_ends_the_conversation(owner: Owner, peer: Peer) -> None:
    owner.blocks[6] = block_of(np.zeros((2, WORDS), np.uint32))
    with pytest.raises(TransportError, match="another size"):
        reader().fetch(peer, wanted(6), PATIENCE_S)


@pytest.mark.parametrize(
    ("secret", "model", "says"),
    [(b"x" * 32, MODEL, "127.0.0.1"), (SECRET, "model@2", "another model")],
)
def test_who_does_not_know_the_secret_or_has_another_model_gets_nothing(
    owner: Owner, server: ItemServer, secret: bytes, model: str, says: str
) -> None:
    peer = Peer("127.0.0.1", server.port, "elsewhere")
    with pytest.raises(TransportError, match=says):
        reader(secret, model).fetch(peer, wanted(1), PATIENCE_S)
    assert owner.asked == 0


def listening(act: object) -> tuple[Peer, threading.Thread]:
    """Somebody who accepts one connection and does this with it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            act(connection)  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    return Peer("127.0.0.1", listener.getsockname()[1], "elsewhere"), thread


def test_a_reader_trusts_no_owner_that_does_not_know_the_secret() -> None:
    def act(connection: socket.socket) -> None:
        connection.sendall(MAGIC + bytes(32))
        connection.recv(1 << 12)
        connection.sendall(bytes(64))

    peer, thread = listening(act)
    with pytest.raises(TransportError, match="does not know the fleet's secret"):
        reader().fetch(peer, wanted(1), PATIENCE_S)
    thread.join(PATIENCE_S)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), MAGIC[:3]])
def test_who_speaks_otherwise_or_hangs_up_is_an_error(said: bytes) -> None:
    peer, thread = listening(lambda connection: connection.sendall(said))
    with pytest.raises(TransportError):
        reader().fetch(peer, wanted(1), PATIENCE_S)
    thread.join(PATIENCE_S)


def test_an_owner_that_ends_in_the_middle_is_an_error_and_nobody_waits(
    owner: Owner, peer: Peer, server: ItemServer
) -> None:
    mine = reader()
    mine.fetch(peer, wanted(1), PATIENCE_S)
    server.close()
    with pytest.raises(TransportError):
        mine.fetch(peer, wanted(2), PATIENCE_S)
    with pytest.raises(TransportError):
        mine.fetch(peer, wanted(2), PATIENCE_S)


def test_a_slow_owner_is_given_up_at_the_time_that_was_given() -> None:
    ended = threading.Event()
    peer, thread = listening(lambda connection: ended.wait(PATIENCE_S))
    # The fake clock has passed the limit when the first byte is waited for.
    now_s = iter([0.0, 0.0, 10.1])
    mine = SocketTransport(SECRET, MODEL, WORDS, clock=lambda: next(now_s))
    with pytest.raises(TransportError, match="too slow"):
        mine.fetch(peer, wanted(1), 10.0)
    ended.set()
    thread.join(PATIENCE_S)


def test_bytes_are_put_nowhere_but_into_a_readers_own_file(tmp_path: Path, server: ItemServer) -> None:
    for name in ("/dev/shm/../../etc/passwd", str(tmp_path / "jgr-items-x"), "/dev/shm/other"):
        with pytest.raises(TransportError, match="under /dev/shm"):
            SharedLanding.of_peer(name)
    small = SHARED / f"jgr-items-{tmp_path.name}-small"
    small.write_bytes(b"1")
    try:
        with pytest.raises(TransportError, match="another size"):
            SharedLanding.of_peer(str(small))
        link = SHARED / f"jgr-items-{tmp_path.name}-link"
        link.symlink_to(small)
        with pytest.raises(OSError, match="symbolic"):
            SharedLanding.of_peer(str(link))
        link.unlink()
    finally:
        small.unlink()


def test_shared_memory_that_is_full_ends_a_conversation_and_no_process(
    owner: Owner, server: ItemServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Peer("127.0.0.1", server.port, machine())
    mine = reader()
    with monkeypatch.context() as patch:
        full = SharedLanding(Path("/dev/full"), os.open("/dev/full", os.O_RDWR))
        patch.setattr(SharedLanding, "of_peer", lambda name: full)
        with pytest.raises(TransportError):
            mine.fetch(here, wanted(3, 7), PATIENCE_S)
    same(mine.fetch(here, wanted(3, 7), PATIENCE_S), owner, [3, 7])
    mine.close()


def test_containers_of_one_kernel_with_shared_memory_of_their_own_are_two_machines(
    owner: Owner, server: ItemServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner would not find the file that the reader names, and items never came over."""
    with monkeypatch.context() as patch:
        patch.setattr(transport, "SHARED", Path("/proc"))  # a mount of another device
        there = Peer("127.0.0.1", server.port, machine())
        patch.setattr(transport, "SHARED", Path("/proc/none"))
        without = machine()
    assert len({machine(), there.machine, without}) == 3
    mine = reader()
    assert (mine._landing(there), mine._machine) == (None, machine())
    same(mine.fetch(there, wanted(3), PATIENCE_S), owner, [3])
    mine.close()


def test_an_error_without_words_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **named: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", fails)
    with pytest.raises(TransportError, match=r"^host:7: TimeoutError$"):
        reader().fetch(Peer("host", 7, ""), wanted(3), PATIENCE_S)


def test_a_process_without_files_for_a_while_lets_readers_in_later(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, accept = [OSError(errno.EMFILE, "Too many open files")] * 2, socket.socket.accept

    def scarce(listener: socket.socket) -> Any:
        if refused:
            raise refused.pop()
        return accept(listener)

    monkeypatch.setattr(transport, "BUSY_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", scarce)
    server = ItemServer(owner.read, SECRET, MODEL)
    mine = reader()
    same(mine.fetch(Peer("127.0.0.1", server.port, ""), wanted(3), PATIENCE_S), owner, [3])
    assert not refused
    mine.close()
    server.close()


def test_bytes_by_nixl_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=re.escape("fleet.transport=nixl needs nixl_cu12: pip install 'jgr[nixl]'")
    ):
        SocketTransport(SECRET, MODEL, WORDS, nixl=True)


def test_a_frame_that_was_changed_on_its_way_is_refused(owner: Owner, server: ItemServer) -> None:
    """Somebody between both ends changes one bit of the request."""
    there = socket.create_server(("127.0.0.1", 0))

    def between() -> None:
        near, _ = there.accept()
        far = socket.create_connection(("127.0.0.1", server.port))
        with there, near, far:
            near.sendall(far.recv(1 << 12))  # the owner's first words
            far.sendall(near.recv(1 << 12))  # the reader's proof
            near.sendall(far.recv(1 << 12))  # the owner's proof
            asked = bytearray(near.recv(1 << 12))
            asked[-1] ^= 1
            far.sendall(asked)
            near.sendall(far.recv(1 << 12))  # nothing: it hangs up

    thread = threading.Thread(target=between)
    thread.start()
    peer = Peer("127.0.0.1", there.getsockname()[1], "elsewhere")
    with pytest.raises(TransportError):
        reader().fetch(peer, wanted(1), PATIENCE_S)
    thread.join(PATIENCE_S)
    assert owner.asked == 0


ODD_FRAMES = [b"\x93\x90\x90\xa1\xff", b"\x93\x90\x90" + b"\x91" * 100_000, b"\x91\x90", b"\xc1", b""]
"""Bytes that are no text, nesting without an end, a field too few, no msgpack, nothing."""


@pytest.mark.parametrize("odd", [*ODD_FRAMES, b"\x93\x90\x90\xb4/dev/shm/jgr-items-\x00"])
def test_a_reader_that_sends_something_else_ends_its_own_conversation_alone(
    owner: Owner, server: ItemServer, peer: Peer, monkeypatch: pytest.MonkeyPatch, odd: bytes
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    mine = reader()
    reading = mine._take(peer, time.monotonic() + PATIENCE_S)
    reading._conversation.send(odd)
    with pytest.raises(OSError):
        reading._conversation.receive(transport.Given, time.monotonic() + PATIENCE_S)
    reading.close()
    same(mine.fetch(peer, wanted(3), PATIENCE_S), owner, [3])
    assert not failed
    mine.close()


@pytest.mark.parametrize("odd", ODD_FRAMES[1:])
def test_an_owner_that_sends_something_else_is_told_as_one_that_gives_nothing(
    server: ItemServer, peer: Peer, monkeypatch: pytest.MonkeyPatch, odd: bytes
) -> None:
    def answer(self: ItemServer, conversation: Any, asked: Any, landing: Any) -> None:
        conversation.send(odd)

    monkeypatch.setattr(ItemServer, "_answer", answer)
    with pytest.raises(TransportError, match="a frame that is no Given"):
        reader().fetch(peer, wanted(3), PATIENCE_S)


def test_a_bucket_lets_bytes_through_at_its_speed() -> None:
    slept: list[float] = []
    bucket = Bucket(100.0, clock=lambda: 7.0, sleep=slept.append)
    for count in (50, 100, 0):
        bucket.spend(count)
    assert slept == pytest.approx([0.5, 1.5, 1.5])
