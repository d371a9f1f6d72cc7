# SPDX-License-Identifier: Apache-2.0
"""A catalog's texts as two arrays, for catalogs with too many items for a Python object each.

The one idea: all texts are in one array of bytes, which may be a mapped file, and are decoded when they are asked
for. An id is found by its hash: the hashes of all ids are sorted, and the ids of a request are hashed, looked for and
compared with the texts that their hashes lead to by a few array operations for all of them, so that equal hashes cost
time but never give a wrong answer.

Letters: n texts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.fields import CONTROL_CHARACTER

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Uint8 = npt.NDArray[np.uint8]
Uint64 = npt.NDArray[np.uint64]
T = TypeVar("T")

_ROWS, _BYTES = 1 << 14, 1 << 24
"""The most texts, and the most bytes, that are decoded or hashed at a time; at least one text."""
_WORD, _HALF, _FACTOR = 8, np.uint64(32), np.uint64(0x9E3779B97F4A7C15)
_STEPS = 8
"""Steps from where a hash may stand to where it does; beyond them it is looked for in all."""
_OBJECTS = msgspec.json.Decoder(dict[str, Any])


class TextTable:
    """n texts. data: [bytes] uint8, one text after the other. offsets: [n + 1] int64, the texts' starts and the end."""

    def __init__(self, data: Uint8, offsets: Int64) -> None:
        self.data, self.offsets = data, offsets

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> TextTable:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return cls(np.frombuffer(b"".join(texts), np.uint8), np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, first: int, last: int | None = None) -> bytes:
        """The bytes of text `first`, or of the texts first .. last - 1, joined."""
        end = self.offsets[first + 1 if last is None else last]
        return self.data[self.offsets[first] : end].tobytes()

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows that together cover all rows, each small enough to work on at once."""
        first = 0
        while first < len(self):
            bounded = int(np.searchsorted(self.offsets, self.offsets[first] + _BYTES, side="right")) - 1
            last = max(first + 1, min(bounded, first + _ROWS, len(self)))
            yield first, last
            first = last

    def hashes(self) -> Uint64:
        """The hash of each text, [n] uint64."""
        found = np.empty(len(self), np.uint64)
        for first, last in self.chunks():
            offsets = self.offsets[first : last + 1]
            lengths = np.diff(offsets)
            padded = np.zeros((last - first, -(-int(lengths.max()) // _WORD) * _WORD), np.uint8)
            padded[np.arange(padded.shape[1]) < lengths[:, None]] = self.data[offsets[0] : offsets[-1]]
            found[first:last] = _hash(padded.view(np.uint64))
        return found

    def equal(self, rows: Int32, texts: Uint8, lengths: Int64) -> npt.NDArray[np.bool_]:
        """Whether each of the texts of these rows is the other one, [m]. texts: [m, width] uint8, of which the first
        `lengths` bytes count, as far as there are so many."""
        starts, column = self.offsets[rows], np.arange(texts.shape[1])
        same = self.data.take(starts[:, None] + column, mode="clip") == texts
        same |= column >= lengths[:, None]
        matching: npt.NDArray[np.bool_] = same.all(axis=1) & (self.offsets[rows + 1] - starts == lengths)
        return matching


def _hash(words: Uint64) -> Uint64:
    """Hashes of texts, [n] uint64. words: [n, k], the texts padded by zeros, however many."""
    factors = np.multiply.accumulate(np.full(words.shape[1], _FACTOR))
    mixed = words ^ (words >> _HALF)
    mixed *= factors
    found: Uint64 = mixed.sum(axis=1)
    found ^= found >> _HALF
    found *= _FACTOR
    return found


class _Lazy(Sequence[T]):
    """A sequence that decodes elements when they are asked for. It equals any sequence with equal elements."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self._at(row) for row in range(*index.indices(len(self))))
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._at(row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    @abstractmethod
    def _at(self, row: int) -> T: ...


class RowOf(dict[str, int]):
    """The row of each item id, -1 for any other text. One built-in call looks it up, since requests name hundreds."""

    def __missing__(self, item_id: str) -> int:
        return -1


class ItemIds(_Lazy[str]):
    """The item ids of a catalog: distinct UTF-8 texts of at least one byte."""

    def __init__(self, table: TextTable) -> None:
        self.table = table
        hashes = table.hashes()
        order = np.argsort(hashes)
        self._rows, self._hashes = order.astype(np.int32), hashes[order]
        self._longest = int(np.diff(table.offsets).max(initial=1))
        bits = len(table).bit_length()
        self._shift = np.uint64(64 - bits)
        # How many hashes begin with less than these bits. Hashes are spread evenly, so few steps are left from there.
        self._starts = np.searchsorted(self._hashes, np.arange(1 << bits, dtype=np.uint64) << self._shift)
        self._starts = self._starts.astype(np.int32)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of what ids are found by; the ids themselves may be in a mapped file."""
        return self._rows.nbytes + self._hashes.nbytes + self._starts.nbytes

    def _at(self, row: int) -> str:
        return self.table.text(row).decode()

    def __iter__(self) -> Iterator[str]:
        for first, last in self.table.chunks():
            yield from self[first:last]

    def find(self, item_ids: Sequence[str]) -> Int32:
        """The rows of the ids, [len(item_ids)] int32; -1 for an unknown id."""
        count = len(item_ids)
        if not count or not len(self):
            return np.full(count, -1, np.int32)
        texts: Sequence[str | bytes] = item_ids
        if not "".join(item_ids).isascii():
            texts = [item_id.encode("utf-8", "surrogatepass") for item_id in item_ids]
        lengths = np.fromiter(map(len, texts), np.int64, count)
        width = -(-min(max(int(lengths.max()), 1), self._longest) // _WORD) * _WORD
        # What is longer is cut, and is unknown by its length.
        padded = np.array(texts, f"S{width}").view(np.uint8).reshape(count, width)
        hashes = _hash(padded.view(np.uint64))
        at = self._first(hashes)
        found = self._rows.take(at, mode="clip")
        same = self.table.equal(found, padded, lengths)
        if not same.all():
            found[~same] = -1
            for i in np.flatnonzero(~same).tolist():
                found[i] = self._among_equal(int(at[i]), hashes[i], padded[i : i + 1], lengths[i : i + 1])
        return found

    def _first(self, hashes: Uint64) -> Int32:
        """How many of the sorted hashes are less than each of these."""
        at: Int32 = self._starts[hashes >> self._shift]
        behind = np.flatnonzero(self._hashes.take(at, mode="clip") < hashes)
        for _ in range(_STEPS):
            if not len(behind):
                return at
            at[behind] += 1
            behind = behind[self._hashes.take(at[behind], mode="clip") < hashes[behind]]
        at[behind] = np.searchsorted(self._hashes, hashes[behind])
        return at

    def _among_equal(self, at: int, wanted: np.uint64, text: Uint8, length: Int64) -> int:
        """The row of a text among those of its hash, the first of which is at `at`; -1: none is."""
        while at < len(self) and self._hashes[at] == wanted:
            row = self._rows[at : at + 1]
            if self.table.equal(row, text, length)[0]:
                return int(row[0])
            at += 1
        return -1

    def repeated(self) -> tuple[int, int] | None:
        """The first two rows with the same id, for the id that occurs first; None if all ids are distinct."""
        equal = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        suspects = np.unique(self._rows[np.concatenate([equal, equal + 1])]).tolist()
        first: dict[bytes, int] = {}
        for row in suspects:
            text = self.table.text(row)
            if first.setdefault(text, row) != row:
                return first[text], row
        return None


class Metadata(_Lazy[dict[str, Any]]):
    """The metadata of a catalog's items: JSON objects, each a line of the table. Without a table all are {}."""

    def __init__(self, table: TextTable | None, n: int) -> None:
        self.table, self._n = table, n

    def __len__(self) -> int:
        return self._n

    def _at(self, row: int) -> dict[str, Any]:
        return {} if self.table is None else _OBJECTS.decode(self.table.text(row))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.table is None:
            yield from ({} for _ in range(self._n))
        else:
            for first, last in self.table.chunks():
                yield from _OBJECTS.decode_lines(self.table.text(first, last))


def text_fault(table: TextTable, max_chars: int) -> int | None:
    """The first row that is not UTF-8 of 1 to max_chars characters, none of control; None if there is none."""

    def fits(text: str) -> bool:
        return len(text) <= max_chars and not CONTROL_CHARACTER.search(text)

    for first, last in table.chunks():
        # Whole chunks are checked at once; a fault in one is looked for in its rows.
        starts, data = (
            table.data[table.offsets[first:last]],
            table.data[table.offsets[first] : table.offsets[last]],
        )
        plain = (
            np.diff(table.offsets[first : last + 1]).max() <= max_chars
            and not (starts & 0xC0 == 0x80).any()
            and not ((data < 0x20) | (data == 0x7F)).any()
        )
        if not (plain and _decodes(table.text(first, last), len)):
            for row in range(first, last):
                if not _decodes(table.text(row), fits):
                    return row
    return None


def object_fault(table: TextTable) -> int | None:
    """The first row that is not one line with a JSON object, free of NaN and infinity; None if there is none."""
    for first, last in table.chunks():
        text = table.text(first, last)
        starts, ends = (
            table.data[table.offsets[first:last]],
            table.data[table.offsets[first + 1 : last + 1] - 1],
        )
        framed = (starts == ord("{")).all() and (ends == ord("\n")).all()
        if not (framed and _are_objects(text, last - first)):
            for row in range(first, last):
                line = table.text(row)
                if line[:1] != b"{" or line[-1:] != b"\n" or not _are_objects(line, 1):
                    return row
    return None


def _decodes(text: bytes, fits: Callable[[str], object]) -> bool:
    try:
        return bool(text) and bool(fits(text.decode()))
    except UnicodeDecodeError:
        return False


def _are_objects(lines: bytes, n: int) -> bool:
    """Whether each of n lines that begin with a brace holds an object."""
    try:
        return lines.count(b"\n") == len(_OBJECTS.decode_lines(lines)) == n
    except (ValueError, RecursionError):
        return False
