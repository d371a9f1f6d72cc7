# SPDX-License-Identifier: Apache-2.0
"""Items' blocks from one node to another (BAT-7): authenticated sockets, and shared memory on one machine.

A reader connects, and both ends prove that they know the fleet's secret and speak of the same model: each sends 32
random bytes and gets their HMAC back, so the secret never travels and an old conversation cannot be repeated. Frames
carry a keyed hash of their number and content. A block's own checksum stands in such a frame, so its bytes need no
other: who reads compares them, and a wrong block is as good as none.

A reader on the same machine names a file under /dev/shm in which the owner puts the bytes, or its memory for NIXL
(jgr/placement/landing.py, nixl.py); else they follow the answer on the socket. A conversation that ends badly, or too
late, is closed, since what comes next on it is not known.

Nothing here knows a cache: the owner's side asks `Source`. Both sides block, in threads of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from jgr.boot import boot_id
from jgr.placement.landing import LANDING_BYTES, SHARED, Landing, PeerLanding, SharedLanding, TransportError
from jgr.placement.nixl import NixlLanding, NixlReader, nixl_reader
from jgr.placement.shared_items import CHECKSUM_BYTES, Block, checksum

MAGIC = b"jgrkv\x00\x001"
NONCE, TAG = 32, 32
MOST_FRAME = 1 << 20
MOST_ROWS = 4096
HELLO_S, SEND_S = 5.0, 30.0
"""How long the other end may take to prove itself, and to take an answer, in seconds."""
BUSY_S = 1.0
"""How long after a connection that could not be let in the next one is."""
IDLE_CONNECTIONS = 4
MOST_CONNECTIONS = 256
T = TypeVar("T", bound=msgspec.Struct)
_HEADER = struct.Struct("<I")
_log = logging.getLogger(__name__)


class Asked(msgspec.Struct, array_like=True):
    """rows, and the digest of each one's tokens. landing: where the bytes shall go; "": they follow on the socket."""

    rows: list[int]
    digests: list[bytes]
    landing: str = ""


class Given(msgspec.Struct, array_like=True):
    """cells: of each row that was asked for, 0 where it is not here. checksums: of their bytes."""

    cells: list[int]
    checksums: list[bytes]


class Peer(NamedTuple):
    """Where a node gives its items. machine: which machine that is on."""

    host: str
    port: int
    machine: str


Source = Callable[[Sequence[int], Sequence[bytes]], "contextlib.AbstractContextManager[list[Block | None]]"]
"""The blocks of rows with these digests; they do not change while the context is open."""


class Transport(Protocol):
    """What a reader asks for blocks."""

    def fetch(
        self, peer: Peer, wanted: Mapping[int, tuple[bytes, int]], timeout_s: float
    ) -> dict[int, Block]:
        """The blocks of rows that the peer has, checked. wanted: the digest and number of cells of each row.

        TransportError where nothing usable came in time. It blocks.
        """

    def keep(self, peers: Iterable[Peer]) -> None:
        """Only these are there now: what is kept open to others is closed. It does not block."""

    def close(self) -> None: ...


def machine() -> str:
    """What tells this machine, and its shared memory, from others: containers of one kernel may have /dev/shm of their
    own, and a file in one is in no other."""
    kernel = boot_id() or socket.gethostname()
    return f"{kernel}/{SHARED.stat().st_dev}" if SHARED.is_dir() else kernel


class Bucket:
    """A link of a speed that is not this machine's, for measurements: `spend` waits until so many bytes had passed."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_s, self._lock = 0.0, threading.Lock()

    def spend(self, count: int) -> None:
        with self._lock:
            now_s = self._clock()
            self._free_s = max(self._free_s, now_s) + count / self.bytes_per_s
            wait_s = self._free_s - now_s
        if wait_s > 0:
            self._sleep(wait_s)


class _Conversation:
    """One end of an open connection. given, taken: the keys of the two directions."""

    def __init__(self, connection: socket.socket, given: bytes, taken: bytes) -> None:
        self.connection, self._given, self._taken = connection, given, taken
        self._sent = self._received = 0

    def send(self, body: bytes) -> None:
        self.connection.sendall(_HEADER.pack(len(body)) + _tag(self._given, self._sent, body) + body)
        self._sent += 1

    def receive(self, kind: type[T], until_s: float | None = None) -> T:
        """What the next frame holds. TransportError where it is not the other end's, or holds something else."""
        (size,) = _HEADER.unpack(_exactly(self.connection, _HEADER.size, until_s))
        if size > MOST_FRAME:
            raise TransportError(f"a frame of {size} bytes")
        tag = _exactly(self.connection, TAG, until_s)
        body = _exactly(self.connection, size, until_s)
        if not hmac.compare_digest(tag, _tag(self._taken, self._received, body)):
            raise TransportError("a frame that the other end has not sent")
        self._received += 1
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TransportError(f"a frame that is no {kind.__name__}: {error}") from None


class ItemServer:
    """Gives blocks to those who know the secret.

    host: the address to listen on. secret: the fleet's. identity: of the model, which readers must have too. source:
    called in the threads of the connections. bucket: the speed of the link, for measurements. nixl: whether readers
    take bytes by NIXL, and not by shared memory.
    """

    def __init__(
        self,
        source: Source,
        secret: bytes,
        identity: str,
        host: str = "127.0.0.1",
        bucket: Bucket | None = None,
        nixl: bool = False,
    ) -> None:
        self._nixl = nixl
        self._source, self._secret, self._identity, self._bucket = source, secret, _hash(identity), bucket
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock, self._closed, self._busy = threading.Lock(), False, threading.Event()
        threading.Thread(target=self._accept, name="jgr-item-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        with self._lock:
            self._closed = True
            self._busy.set()
            connections = [self._listener, *self._open]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("items: a reader cannot be let in: %s", error)
                self._busy.wait(BUSY_S)  # as where this process has no more files
                continue
            with self._lock:
                refused = self._closed or len(self._open) >= MOST_CONNECTIONS
                if not refused:
                    self._open.add(connection)
            if refused:
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="jgr-item-reader", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        landing: PeerLanding | None = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            conversation = self._greet(connection)
            while True:
                connection.settimeout(None)
                asked = conversation.receive(Asked)
                if len(asked.rows) != len(asked.digests) or len(asked.rows) > MOST_ROWS:
                    raise TransportError("more rows than may be asked for")
                if asked.landing and (landing is None or landing.name != asked.landing):
                    landing = (NixlLanding if self._nixl else SharedLanding).of_peer(asked.landing)
                connection.settimeout(SEND_S)
                self._answer(conversation, asked, landing if asked.landing else None)
        except (OSError, TransportError) as error:
            if str(error):
                _log.debug("a reader of items has ended: %s", error)
        finally:
            if landing is not None:
                landing.close()
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> _Conversation:
        until_s = time.monotonic() + HELLO_S
        mine = secrets.token_bytes(NONCE)
        connection.sendall(MAGIC + mine)
        theirs = _exactly(connection, NONCE, until_s)
        identity, proof = _exactly(connection, NONCE, until_s), _exactly(connection, TAG, until_s)
        said = mine + theirs + identity
        if not hmac.compare_digest(proof, _proof(self._secret, b"reader", said)):
            _log.warning("items: a reader does not know the fleet's secret")
            raise TransportError("another secret")
        connection.sendall(_proof(self._secret, b"owner", said + self._identity) + self._identity)
        if identity != self._identity:
            raise TransportError("another model")
        return _Conversation(
            connection, _proof(self._secret, b"down", said), _proof(self._secret, b"up", said)
        )

    def _answer(self, conversation: _Conversation, asked: Asked, landing: PeerLanding | None) -> None:
        with self._source(asked.rows, asked.digests) as blocks:
            chosen: list[Block] = []
            given, total = Given([], []), 0
            for block in blocks:
                if block is None or total + block.nbytes > LANDING_BYTES:
                    given.cells.append(0)
                    given.checksums.append(b"")
                    continue
                total += block.nbytes
                chosen.append(block)
                given.cells.append(len(block.words))
                given.checksums.append(block.checksum)
            if self._bucket is not None:
                self._bucket.spend(total)
            if landing is not None:
                landing.put(chosen)
            conversation.send(msgspec.msgpack.encode(given))
            if landing is None:
                for block in chosen:
                    conversation.connection.sendall(np.ascontiguousarray(block.words).data)


class SocketTransport:
    """Reads blocks over connections that are kept. cell_words: words of a cell. shares: whether bytes may come through
    shared memory on one machine. clock: seconds. nixl: bytes come by NIXL from every peer; UserError where it is not
    installed."""

    def __init__(
        self,
        secret: bytes,
        identity: str,
        cell_words: int,
        shares: bool = True,
        clock: Callable[[], float] = time.monotonic,
        nixl: bool = False,
    ) -> None:
        self._secret, self._identity, self._cell_words = secret, _hash(identity), cell_words
        self._nixl: NixlReader | None = nixl_reader() if nixl else None
        self._shares, self._clock = shares and SHARED.is_dir(), clock
        self._machine = machine()
        self._idle: dict[Peer, list[_Reading]] = {}
        self._there: frozenset[Peer] | None = None  # None: nobody has said yet who is
        self._lock = threading.Lock()

    def fetch(
        self, peer: Peer, wanted: Mapping[int, tuple[bytes, int]], timeout_s: float
    ) -> dict[int, Block]:
        """See Transport."""
        until_s = self._clock() + timeout_s
        found: dict[int, Block] = {}
        try:
            reading = self._take(peer, until_s)
            try:
                for rows in self._portions(wanted):
                    found |= reading.read(rows, {row: wanted[row] for row in rows}, until_s)
            except BaseException:
                reading.close()
                raise
            self._give_back(peer, reading)
        except OSError as error:
            raise TransportError(f"{peer.host}:{peer.port}: {str(error) or type(error).__name__}") from error
        return found

    def keep(self, peers: Iterable[Peer]) -> None:
        """See Transport. One that is read from now is closed when it is given back."""
        with self._lock:
            self._there = frozenset(peers)
            gone = [reading for peer in self._idle.keys() - self._there for reading in self._idle.pop(peer)]
        for reading in gone:
            reading.close()

    def close(self) -> None:
        self.keep(())

    def _portions(self, wanted: Mapping[int, tuple[bytes, int]]) -> Iterator[list[int]]:
        rows: list[int] = []
        room = LANDING_BYTES
        for row, (_, cells) in wanted.items():
            size = cells * self._cell_words * 4
            if rows and (size > room or len(rows) == MOST_ROWS):
                yield rows
                rows, room = [], LANDING_BYTES
            rows.append(row)
            room -= size
        if rows:
            yield rows

    def _take(self, peer: Peer, until_s: float) -> _Reading:
        with self._lock:
            idle = self._idle.get(peer)
            if idle:
                return idle.pop()
        left_s = max(0.001, until_s - self._clock())
        connection = socket.create_connection((peer.host, peer.port), timeout=left_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            conversation = self._greet(connection, until_s)
            return _Reading(conversation, self._cell_words, self._landing(peer), self._clock)
        except BaseException:
            connection.close()
            raise

    def _landing(self, peer: Peer) -> Landing | None:
        if self._nixl is not None:
            return self._nixl.take()
        return SharedLanding.new() if self._shares and peer.machine == self._machine else None

    def _give_back(self, peer: Peer, reading: _Reading) -> None:
        with self._lock:
            if self._there is None or peer in self._there:
                idle = self._idle.setdefault(peer, [])
                if len(idle) < IDLE_CONNECTIONS:
                    idle.append(reading)
                    return
        reading.close()

    def _greet(self, connection: socket.socket, until_s: float) -> _Conversation:
        said = _exactly(connection, len(MAGIC) + NONCE, until_s, self._clock)
        if said[: len(MAGIC)] != MAGIC:
            raise TransportError("not an owner of items, or of another version of jgr")
        mine = secrets.token_bytes(NONCE)
        said = said[len(MAGIC) :] + mine + self._identity
        connection.sendall(mine + self._identity + _proof(self._secret, b"reader", said))
        proof = _exactly(connection, TAG, until_s, self._clock)
        identity = _exactly(connection, NONCE, until_s, self._clock)
        if not hmac.compare_digest(proof, _proof(self._secret, b"owner", said + identity)):
            raise TransportError("the owner does not know the fleet's secret")
        if identity != self._identity:
            raise TransportError("the owner has another model")
        return _Conversation(
            connection, _proof(self._secret, b"up", said), _proof(self._secret, b"down", said)
        )


class _Reading:
    """A connection to an owner, used by one thread at a time."""

    def __init__(
        self,
        conversation: _Conversation,
        cell_words: int,
        landing: Landing | None,
        clock: Callable[[], float],
    ) -> None:
        self._conversation, self._cell_words, self._landing = conversation, cell_words, landing
        self._clock = clock

    def read(
        self, rows: list[int], wanted: Mapping[int, tuple[bytes, int]], until_s: float
    ) -> dict[int, Block]:
        connection, landing = self._conversation.connection, self._landing
        connection.settimeout(max(0.001, until_s - self._clock()))
        name = "" if landing is None else landing.name
        self._conversation.send(msgspec.msgpack.encode(Asked(rows, [wanted[row][0] for row in rows], name)))
        given = self._conversation.receive(Given, until_s)
        expected = [(0, wanted[row][1]) for row in rows]
        if not len(given.cells) == len(given.checksums) == len(rows) or any(
            cells not in allowed for cells, allowed in zip(given.cells, expected, strict=True)
        ):
            raise TransportError("blocks of another size than the items'")
        found: dict[int, Block] = {}
        at = 0
        for row, cells, digest in zip(rows, given.cells, given.checksums, strict=True):
            size = cells * self._cell_words * 4
            if not size:
                continue
            raw = (
                _exactly(connection, size, until_s, self._clock) if landing is None else landing.get(at, size)
            )
            at += size
            words = np.frombuffer(raw, np.uint32).reshape(cells, self._cell_words)
            if len(digest) == CHECKSUM_BYTES and hmac.compare_digest(checksum(words), digest):
                found[row] = Block(words, digest)
            else:
                _log.warning("items: the block of row %d is not what its owner says", row)
        return found

    def close(self) -> None:
        self._conversation.connection.close()
        if self._landing is not None:
            self._landing.remove()


def _exactly(
    connection: socket.socket,
    count: int,
    until_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """So many bytes. OSError where they do not come in time, or the other end closes."""
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        if until_s is not None:
            left_s = until_s - clock()
            if left_s <= 0:
                raise TimeoutError("too slow")
            connection.settimeout(left_s)
        got = connection.recv_into(view[at:])
        if not got:
            raise ConnectionError("the other end has closed the connection" if at else "")
        at += got
    return bytes(found)


def _hash(identity: str) -> bytes:
    return hashlib.blake2b(identity.encode(), digest_size=NONCE).digest()


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + said, "sha256")


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + body, digest_size=TAG, key=key).digest()
