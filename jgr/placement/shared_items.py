# SPDX-License-Identifier: Apache-2.0
"""The items on one node's host: those that it holds for all nodes, and those that it got from others (BAT-7, BAT-12).

Both are entries of a meta service over pages of the host tier that nothing else uses. Those that the placement puts
here are pinned by the `CacheWorker`, so they do not go for others; what came from another node is pinned while it
arrives, and later goes when room is needed, the last used last. The device's meta service finds both below itself
(`jgr.cache.entries.Below`) and brings them up by the moves that exist.

The order of the steps is reserve, copy, publish: an entry is found once its bytes are queued in front of every later
move. Whoever reads an entry for another node pins it; its bytes may then be copied by any thread. All else is called
by one thread, that of the device's meta service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Content, Entry, Name, Valued
from jgr.cache.host import HostTier
from jgr.cache.meta import CacheMeta
from jgr.models.words import WORD, Cells
from jgr.placement.worker import CacheWorker, item_name

CHECKSUM_BYTES = 16


class Block(NamedTuple):
    """An item's keys and values as they stand in cells, [cells, words of a cell] uint32, and the hash of the bytes."""

    words: npt.NDArray[np.uint32]
    checksum: bytes

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


def checksum(words: npt.NDArray[np.uint32]) -> bytes:
    """The hash of a block's bytes, CHECKSUM_BYTES."""
    return hashlib.blake2b(np.ascontiguousarray(words).data, digest_size=CHECKSUM_BYTES).digest()


def block_of(words: npt.NDArray[np.uint32]) -> Block:
    return Block(words, checksum(words))


class SharedItems:
    """meta: of the pages `host.beyond`, for the kind "item". cells: their size. content: gives the tokens of a row.

    placed_bytes: how much of them the placement may use.
    """

    def __init__(
        self,
        meta: CacheMeta,
        host: HostTier,
        cells: Cells,
        content: Callable[[int], Content],
        placed_bytes: int,
    ) -> None:
        self.host, self.cells, self.content = host, cells, content
        self.placed_bytes = placed_bytes
        self._meta, self._worker = meta, CacheWorker(meta, content)
        self._before = host.pages.count * cells.per_page  # cells of the host that are not these
        self._to_fill: dict[int, tuple[int, ...]] = {}
        self._in_use = 0  # reservations, and readings of others
        self._closed: Callable[[], None] | None = None

    def close(self, closed: Callable[[], None]) -> None:
        """Let all go; `closed` is called once nobody reads or reserves anything."""
        self.clear()
        self._closed = closed
        self._use(0)

    # What the device's meta service finds below itself.

    def find(self, name: Name, content: Valued) -> tuple[int, tuple[int, ...]] | None:
        """See Below."""
        if name.kind != "item":
            return None
        entry = self._meta.find(name, content)
        if entry is None or entry.tokens != len(content):
            return None
        return entry.tokens, self._on_host(entry.cells)

    def valid_tokens(self, name: Name, content: Valued) -> int:
        """See Below."""
        return self._meta.valid_tokens(name, content) if name.kind == "item" else 0

    def holds(self, name: Name, digest: bytes) -> bool:
        """See Below."""
        entry = self._meta.by_name(name) if name.kind == "item" else None
        return entry is not None and entry.digest == digest

    def names(self, kind: str) -> Iterator[Name]:
        """See Below."""
        return self._meta.names(kind) if kind == "item" else iter(())

    # What comes from another node, for one request.

    def reserve(self, row: int) -> Entry | None:
        """Room for an item that nobody finds yet, pinned. None: there is no room, or it is there or arriving."""
        entry = self._meta.extend(item_name(row), self.content(row))
        self._use(entry is not None)
        return entry

    def publish(self, entry: Entry, block: Block) -> None:
        """The reserved item is found from now on. ValueError where the block is of another size: it is given up."""
        if not self._fits(entry.cells, block):
            self.give_up(entry)
            raise ValueError(f"{entry.name}: a block of another size")
        self.host.fill(self._on_host(entry.cells), block.words, self.cells)
        entry.made_from = block.checksum
        self._meta.written(entry)
        self._meta.release(entry)
        self._use(-1)

    def give_up(self, entry: Entry) -> None:
        """Free what was reserved."""
        self._meta.failed(entry)
        self._meta.release(entry)
        self._use(-1)

    def forget(self, row: int) -> None:
        """Drop an item unless the placement has put it here."""
        if not self._worker.holds(row):
            self._meta.drop(item_name(row))

    # The steps of the placement.

    def copy(self, rows: Iterable[int]) -> list[int] | None:
        """Take room for rows that are to be placed here; returns those whose bytes are to be given to `place`.

        None: there is no room before others have finished reading.
        """
        found = self._worker.copy(rows)
        if found is None:
            return None
        self._to_fill = found
        return list(found)

    def place(self, row: int, block: Block) -> None:
        """The bytes of a row that `copy` named. ValueError where they are not of its size."""
        cells = self._to_fill[row]
        if not self._fits(cells, block):
            raise ValueError(f"item {row}: a block of another size")
        self.host.fill(self._on_host(cells), block.words, self.cells)
        self._worker.arriving(row).made_from = block.checksum

    def publish_placed(self) -> None:
        """The last copy is found from now on."""
        self._to_fill = {}
        self._worker.publish()

    def give_up_placing(self) -> None:
        self._to_fill = {}
        self._worker.fail()

    def drop(self, rows: Iterable[int]) -> None:
        self._worker.drop(row for row in rows if self._worker.holds(row))

    def clear(self) -> None:
        """Nothing is placed here any more. What was stays until room is needed."""
        self._to_fill = {}
        self._worker.clear()

    # What others read.

    def pin(self, rows: Sequence[int], digests: Sequence[bytes]) -> list[Entry | None]:
        """The entries of placed rows, pinned; None where a row is not placed here, or is of another content."""
        found: list[Entry | None] = []
        for row, digest in zip(rows, digests, strict=True):
            entry = self._meta.by_name(item_name(row)) if self._worker.holds(row) else None
            if entry is not None and entry.digest != digest:
                entry = None
            if entry is not None:
                self._meta.hold(entry)
            found.append(entry)
        self._use(1)
        return found

    def unpin(self, entries: Iterable[Entry | None]) -> None:
        """End a `pin`."""
        for entry in entries:
            if entry is not None:
                self._meta.release(entry)
        self._use(-1)

    def stored(self, entry: Entry) -> Block:
        """The bytes of a pinned entry; any thread may ask. The checksum is the one that they came with."""
        return Block(self.host.stored(self._on_host(entry.cells), self.cells), entry.made_from)

    @property
    def placed(self) -> int:
        """Items that the placement has put here."""
        return self._worker.count

    @property
    def number(self) -> int:
        """Items that are here, for whatever reason."""
        return self._meta.number("item")

    def check(self) -> None:
        """Audit. AssertionError names what is broken."""
        self._worker.check()

    def _use(self, change: int) -> None:
        self._in_use += change
        if self._closed is not None and not self._in_use:
            closed, self._closed = self._closed, None
            closed()

    def _on_host(self, cells: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(cell + self._before for cell in cells)

    def _fits(self, cells: tuple[int, ...], block: Block) -> bool:
        return block.words.shape == (len(cells), self.cells.words) and block.words.dtype == np.uint32


def capacity_bytes(pages: int, page_bytes: int, cells: Cells, parts: int) -> int:
    """The bytes of items that so many pages hold; an item takes `parts` cells for each cell of its tokens."""
    assert cells.words * WORD <= page_bytes
    return pages * cells.per_page // parts * parts * cells.words * WORD
