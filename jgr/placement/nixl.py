# SPDX-License-Identifier: Apache-2.0
"""Items' bytes from the owner's memory into the reader's by NIXL, which takes RDMA where a machine has it.

A reader tells where its memory is within an authenticated frame, and the owner writes there. NIXL itself asks nobody
for a secret and checks nothing, so a block counts only by its checksum, which comes in a frame, as always.

The memory of a reader stays where it is as long as its process lives: an owner may still be writing when a reader has
given up. What comes too late is written over, or is found by the checksum.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jgr import extras
from jgr.placement.landing import LANDING_BYTES, TransportError
from jgr.placement.shared_items import Block

SCHEME = "nixl"
SLOTS = 8
"""So many answers may be on their way to a process at once by NIXL; more come on their sockets."""
WRITE_S = 5.0
"""How long a write may take, in seconds."""
READERS = 64
"""So many readers an owner remembers."""

_making = threading.Lock()
_made: dict[str, Any] = {}  # the one reader and the one writer of this process


class NixlReader:
    """The memory of this process in which bytes arrive."""

    def __init__(self) -> None:
        self._agent = _agent("reader")
        self.memory = np.zeros((SLOTS, LANDING_BYTES), np.uint8)
        self._agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], mem_type="DRAM")
        self._about = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._free, self._lock = list(range(SLOTS)), threading.Lock()

    def take(self) -> NixlSlot | None:
        """A part that nobody else has; None: there is none left."""
        with self._lock:
            return NixlSlot(self, self._free.pop()) if self._free else None

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def name(self, slot: int) -> str:
        """What an owner is told of a part."""
        return f"{SCHEME}:{self.memory[slot].ctypes.data:x}:{self._about}"


class NixlSlot:
    """A reader's part of the memory; see Landing."""

    def __init__(self, reader: NixlReader, slot: int) -> None:
        self._reader, self._slot, self._there = reader, slot, True
        self.name = reader.name(slot)

    def get(self, at: int, size: int) -> bytes:
        return self._reader.memory[self._slot, at : at + size].tobytes()

    def remove(self) -> None:
        if self._there:
            self._there = False
            self._reader.give_back(self._slot)


class NixlLanding:
    """The memory of a reader, as an owner knows it; see PeerLanding."""

    def __init__(self, name: str, reader: str, address: int) -> None:
        self.name, self._reader, self._address = name, reader, address

    @classmethod
    def of_peer(cls, name: str) -> NixlLanding:
        """The memory that a reader named. TransportError unless that is for NIXL."""
        scheme, _, rest = name.partition(":")
        address, _, about = rest.partition(":")
        if scheme != SCHEME:
            raise TransportError("bytes are only given by NIXL")
        try:
            return cls(name, _writer().know(base64.b64decode(about, validate=True)), int(address, 16))
        except ValueError:
            raise TransportError("no memory that NIXL knows") from None

    def put(self, blocks: Sequence[Block]) -> None:
        """Write them one after the other. TransportError where that fails."""
        _writer().write(blocks, self._reader, self._address)

    def close(self) -> None:
        """Another connection may be of the same reader, so it is remembered."""


class NixlWriter:
    """This process as an owner. One answer is written at a time."""

    def __init__(self) -> None:
        self._agent = _agent("owner")
        self._staging = np.zeros(LANDING_BYTES, np.uint8)
        self._agent.register_memory([(self._staging.ctypes.data, LANDING_BYTES, 0, "")], mem_type="DRAM")
        self._readers: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def know(self, about: bytes) -> str:
        """The name of a reader by what it tells of itself. TransportError where NIXL makes nothing of that."""
        with self._lock:
            if about not in self._readers:
                while len(self._readers) >= READERS:
                    self._agent.remove_remote_agent(self._readers.pop(next(iter(self._readers))))
                self._readers[about] = _done(self._agent.add_remote_agent, about)
            return self._readers[about]

    def write(self, blocks: Sequence[Block], reader: str, address: int) -> None:
        """Copy the blocks to an address of a reader. TransportError."""
        size = sum(block.nbytes for block in blocks)
        if not size:
            return
        with self._lock:
            at = 0
            for block in blocks:
                self._staging[at : at + block.nbytes] = (
                    np.ascontiguousarray(block.words).reshape(-1).view(np.uint8)
                )
                at += block.nbytes
            mine, theirs = (
                self._agent.get_xfer_descs([(where, size, 0)], mem_type="DRAM")
                for where in (self._staging.ctypes.data, address)
            )
            transfer = _done(self._agent.initialize_xfer, "WRITE", mine, theirs, reader)
            try:
                until_s = time.monotonic() + WRITE_S
                state = _done(self._agent.transfer, transfer)
                while state == "PROC":
                    if time.monotonic() > until_s:
                        raise TransportError("NIXL is too slow")
                    time.sleep(0)  # others may go on
                    state = _done(self._agent.check_xfer_state, transfer)
                if state != "DONE":
                    raise TransportError(f"NIXL says {state}")
            finally:
                _done(self._agent.release_xfer_handle, transfer)


def nixl_reader() -> NixlReader:
    """This process's. UserError where NIXL is not installed."""
    extras.require("nixl", "fleet.transport=nixl")
    with _making:
        reader: NixlReader = _made.get("reader") or NixlReader()
        _made["reader"] = reader
        return reader


def _writer() -> NixlWriter:
    with _making:
        writer: NixlWriter = _made.get("writer") or NixlWriter()
        _made["writer"] = writer
        return writer


def _agent(role: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # of NIXL 1.5; it needs no GPU

    return nixl_agent(f"jgr-{role}-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))


def _done(call: Any, *given: Any) -> Any:
    """What a call of NIXL gives. TransportError where it fails."""
    try:
        return call(*given)
    except Exception as error:  # its errors have no class in common
        raise TransportError(f"NIXL: {type(error).__name__}: {error}") from error
