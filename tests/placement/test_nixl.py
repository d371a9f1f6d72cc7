# SPDX-License-Identifier: Apache-2.0
"""Blocks by NIXL: they arrive as over a socket, and what a reader says of its memory is not believed."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from jgr.placement.landing import TransportError
from jgr.placement.nixl import SLOTS, NixlLanding, nixl_reader
from jgr.placement.transport import ItemServer, Peer, SocketTransport
from tests.placement.test_transport import MODEL, PATIENCE_S, SECRET, WORDS, Owner, same, wanted

pytestmark = pytest.mark.nixl


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def peer(owner: Owner) -> Iterator[Peer]:
    server = ItemServer(owner.read, SECRET, MODEL, nixl=True)
    yield Peer("127.0.0.1", server.port, "elsewhere")
    server.close()


def reader() -> SocketTransport:
    return SocketTransport(SECRET, MODEL, WORDS, nixl=True)


def test_blocks_arrive_whole_and_wrong_ones_are_left_out(owner: Owner, peer: Peer) -> None:
    mine = reader()
    same(mine.fetch(peer, wanted(3, 1, 7), PATIENCE_S), owner, [3, 1, 7])
    arrived = nixl_reader().memory[:, :64]
    assert arrived.any(), "the bytes came by NIXL"
    same(mine.fetch(peer, wanted(2), PATIENCE_S), owner, [2])
    owner.broken = {5}
    same(mine.fetch(peer, wanted(4, 5), PATIENCE_S), owner, [4])
    assert mine.fetch(peer, wanted(30), PATIENCE_S) == {}, "nobody has it"
    mine.close()


def test_where_all_of_the_memory_is_taken_bytes_come_on_the_socket(owner: Owner, peer: Peer) -> None:
    memory = nixl_reader()
    taken = [memory.take() for _ in range(SLOTS)]
    assert None not in taken and memory.take() is None, "what another test took it gave back"
    before = memory.memory[:, :64].copy()
    mine = reader()
    same(mine.fetch(peer, wanted(3, 1), PATIENCE_S), owner, [3, 1])
    np.testing.assert_array_equal(memory.memory[:, :64], before)
    for slot in taken:
        assert slot is not None
        slot.remove()
        slot.remove()  # a second time changes nothing
    again = [memory.take() for _ in range(SLOTS)]
    assert len({slot.name for slot in again if slot is not None}) == SLOTS and memory.take() is None
    for slot in again:
        assert slot is not None
        slot.remove()
    mine.close()


def test_a_peer_that_is_gone_holds_no_part_of_the_memory(owner: Owner, peer: Peer) -> None:
    memory, mine = nixl_reader(), reader()
    same(mine.fetch(peer, wanted(3), PATIENCE_S), owner, [3])
    assert len(memory._free) == SLOTS - 1
    mine.keep([])
    assert len(memory._free) == SLOTS
    mine.close()


def test_what_is_no_readers_memory_is_refused(owner: Owner, peer: Peer) -> None:
    nonsense = base64.b64encode(b"nonsense").decode()
    for name in ("/dev/shm/jgr-items-1", "nixl", "nixl:10:!", "nixl:10:", f"nixl:10:{nonsense}"):
        with pytest.raises(TransportError):
            NixlLanding.of_peer(name)
    slot = nixl_reader().take()
    assert slot is not None
    scheme, _, about = slot.name.split(":")
    elsewhere = NixlLanding.of_peer(f"{scheme}:10:{about}")
    with pytest.raises(TransportError, match="NIXL"):
        elsewhere.put([owner.blocks[1]])
    NixlLanding.of_peer(slot.name).put([owner.blocks[1]])
    size = owner.blocks[1].nbytes
    assert slot.get(0, size) == owner.blocks[1].words.tobytes()
    slot.remove()
