# SPDX-License-Identifier: Apache-2.0
"""Interactions as next-item examples: train, valid and test.

The one idea: an example is a *window* of a user's sequence, the history, and the item that comes after it.
All examples of a dataset are windows of the same flat array, so the nested prefixes of a long sequence cost
two integers each.

- `sequences` holds the events that may be trained on: it ends before the user's first valid or test target.
- An example's history may hold earlier targets of the same user, also of an earlier split (the time split of
  MiniOneRec). It never holds its own target's position or anything later.

Letters: n sequences or examples, u users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.config import UserError
from jgr.files import read_lines

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MINIONEREC_HEADER = b"user_id:token\titem_id_list:token_seq\titem_id:token"
MAX_ROW = 2**31 - 1
LONGEST_S = 2**31 - 1
"""The most seconds from the first event that a model reads to the last: it counts them in int32."""
UNRECORDED = "unrecorded"
"""The action of an event whose feedback was not recorded."""


class DataError(UserError):
    """Interactions that cannot be used; the message names the file and line, or the user."""


def refuse_long(seconds: Int64, what: str, error: type[UserError]) -> None:
    """Raise `error`, which begins with `what`, where a history is longer than a model can count. seconds: of each."""
    longest = int(seconds.max(initial=0))
    if longest > LONGEST_S:
        raise error(
            f"{what}: a history spans {longest} seconds, over 68 years; "
            "if the times are in another unit, name it with jgr prepare --time_unit"
        )


@dataclass(frozen=True, eq=False)
class Ragged:
    """n row sequences as windows of one flat array; windows may overlap.

    rows: [total] int32 catalog rows. starts, stops: [n] int64; sequence i is rows[starts[i]:stops[i]].
    times: [total] int64, when each event happened, in seconds; None if not known.
    actions: [total] int32, bits of what the user did, see Interactions.actions. scenarios: [total] int32, where the
    item was shown, -1: not known. Both are None for a dataset without feedback.
    """

    rows: Int32
    starts: Int64
    stops: Int64
    times: Int64 | None = None
    actions: Int32 | None = None
    scenarios: Int32 | None = None

    @classmethod
    def of(cls, sequences: Sequence[npt.ArrayLike]) -> Ragged:
        """Copy sequences of rows end to end. Raises DataError unless they hold integers from 0 to 2^31 - 1."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        stops = np.cumsum([array.size for array in arrays], dtype=np.int64)
        for i, array in enumerate(arrays):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise DataError(f"sequence {i}: expected a list of rows, found {array.dtype} {array.shape}")
        rows = np.concatenate([np.zeros(0, np.int64), *(array.astype(np.int64) for array in arrays)])
        if len(rows) and not 0 <= rows.min() <= rows.max() <= MAX_ROW:
            raise DataError(f"rows must be 0 to {MAX_ROW}, found {rows.min()} to {rows.max()}")
        return cls(rows.astype(np.int32), np.append(0, stops)[: len(arrays)], stops)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Int32:
        """Sequence i, a view."""
        return self.rows[self.starts[i] : self.stops[i]]

    def __iter__(self) -> Iterator[Int32]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> Int64:
        return self.stops - self.starts

    def select(self, indices: slice | Int64) -> Ragged:
        """The sequences at `indices`, sharing the flat array."""
        return replace(self, starts=self.starts[indices], stops=self.stops[indices])

    def times_of(self, i: int) -> Int64:
        """The times of sequence i's events, a view. Raises DataError if the dataset has no times."""
        if self.times is None:
            raise DataError("the dataset has no times")
        return self.times[self.starts[i] : self.stops[i]]

    def positions(self) -> tuple[Int64, Int64]:
        """Each element's index into `rows`, and the index of its sequence, end to end: both [sum of lengths]."""
        lengths = self.lengths
        owner = np.repeat(np.arange(len(self)), lengths)
        begin = np.cumsum(lengths) - lengths
        return np.arange(len(owner)) + (self.starts - begin)[owner], owner

    def flatten(self) -> tuple[Int32, Int64]:
        """The sequences end to end and the index of each row's sequence, both [sum of lengths]."""
        places, owner = self.positions()
        return self.rows[places], owner


@dataclass(frozen=True, eq=False)
class Examples:
    """n next-item examples.

    histories: n sequences of rows, oldest first. targets: [n] int32 rows. users: [n] int32, indices into `user_ids`.
    target_times: [n] int64, in seconds; None if not known.
    """

    histories: Ragged
    targets: Int32
    users: Int32
    target_times: Int64 | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, indices: slice | Int64) -> Examples:
        times = None if self.target_times is None else self.target_times[indices]
        return Examples(self.histories.select(indices), self.targets[indices], self.users[indices], times)


@dataclass(frozen=True, eq=False)
class Interactions:
    """One dataset with its splits.

    user_ids: [u]. sequences: u, each user's training sequence (empty for a user who only occurs in valid or test).
    train: every position of `sequences` but a sequence's first, or the examples that the source gives. actions: the
    name of each bit of an event's actions; empty if the dataset has no feedback.
    """

    user_ids: tuple[str, ...]
    sequences: Ragged
    train: Examples
    valid: Examples
    test: Examples
    actions: tuple[str, ...] = ()


def leave_one_out(sequences: Sequence[npt.ArrayLike], user_ids: Sequence[str] | None = None) -> Interactions:
    """Split each sequence: the last item is its test target, the one before its valid target, the rest is for training.

    sequences: u sequences of catalog rows, oldest first, none empty; one of fewer than 3 items is trained on
    as a whole. user_ids: [u], by default "0", "1", ...
    """
    ids = tuple(user_ids) if user_ids is not None else tuple(map(str, range(len(sequences))))
    if len(ids) != len(sequences) or not ids:
        raise DataError(f"{len(sequences)} sequences of {len(ids)} users: needs as many, and at least one")
    whole = Ragged.of(sequences)
    lengths = whole.lengths
    if not lengths.all():
        raise DataError(f"user {ids[int(np.argmin(lengths))]!r} has an empty sequence")
    users = np.flatnonzero(lengths >= 3)
    held = np.where(lengths >= 3, 2, 0)
    train = Ragged(whole.rows, whole.starts, whole.stops - held)
    # Every position but a sequence's first is a training target.
    position, owner = Ragged(whole.rows, train.starts + 1, train.stops).positions()
    return Interactions(
        ids,
        train,
        _windows(whole.rows, whole.starts[owner], position, owner),
        _windows(whole.rows, whole.starts[users], whole.stops[users] - 2, users),
        _windows(whole.rows, whole.starts[users], whole.stops[users] - 1, users),
    )


def _windows(rows: Int32, starts: Int64, positions: Int64, users: Int64) -> Examples:
    """Examples whose target stands at `positions` of the flat array and whose history begins at `starts`."""
    return Examples(Ragged(rows, starts, positions), rows[positions], users.astype(np.int32))


def load_minionerec(
    folder: str | Path, catalog: Catalog, counts: tuple[int, int, int] | None = None
) -> Interactions:
    """Read `{train,valid,test}.inter[.gz]`: a header, then lines of user id, history of item ids, target.

    Every row must continue its user's earlier rows, over the three files in this order: its history is the
    last items of the sequence so far. So no history can hold a target of its own future.
    counts: expected numbers of rows in train, valid and test. Raises DataError, naming file and line.
    """
    reader = _MiniOneRec(catalog)
    examples = [reader.read(_existing(Path(folder), "train"))]
    trained = [len(sequence) for sequence in reader.sequences]
    examples += [reader.read(_existing(Path(folder), split)) for split in ("valid", "test")]
    found = tuple(len(split) for split in examples)
    if counts is not None and found != counts:
        raise DataError(f"{folder}: {found} rows in train, valid and test, expected {counts}")
    whole = Ragged.of(reader.sequences)
    lengths = np.array(trained + [0] * (len(whole) - len(trained)), np.int64)
    splits: list[Examples] = []
    for rows in examples:
        user, size, position = np.array(rows, np.int64).reshape(-1, 3).T
        at = whole.starts[user] + position
        splits.append(_windows(whole.rows, at - size, at, user))
    sequences = Ragged(whole.rows, whole.starts, whole.starts + lengths)
    train, valid, test = splits
    return Interactions(tuple(reader.users), sequences, train, valid, test)


def _existing(folder: Path, split: str) -> Path:
    for suffix in ("", ".gz"):
        path = folder / f"{split}.inter{suffix}"
        if path.exists():
            return path
    raise DataError(f"{folder}: has no {split}.inter or {split}.inter.gz")


class _MiniOneRec:
    """Rebuilds each user's sequence while the files stream by.

    users: id -> index. sequences: u lists of rows.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.users: dict[str, int] = {}
        self.sequences: list[list[int]] = []
        self._catalog = catalog

    def read(self, path: Path) -> list[tuple[int, int, int]]:
        """For each row: the user, the history's length, and the target's position in the user's sequence."""
        examples: list[tuple[int, int, int]] = []
        number = 0
        for number, line in read_lines(path, DataError):
            if number == 1:
                if line != MINIONEREC_HEADER:
                    raise DataError(f"{path}:1: the header must be {MINIONEREC_HEADER.decode()!r}")
                continue
            try:
                examples.append(self._example(line))
            except ValueError as cause:
                raise DataError(f"{path}:{number}: {cause}") from None
        if not examples:
            raise DataError(f"{path}:{number}: the file holds no rows")
        return examples

    def _example(self, line: bytes) -> tuple[int, int, int]:
        fields = line.decode("utf-8").split("\t")
        if len(fields) != 3 or not all(fields):
            raise ValueError(
                f"expected user, history and target, separated by tabs, found {len(fields)} fields"
            )
        user_id, history_ids, target_id = fields
        history = [self._row(item_id) for item_id in history_ids.split(" ")]
        target = self._row(target_id)
        if user_id not in self.users:
            self.users[user_id] = len(self.sequences)
            self.sequences.append(list(history))
        user = self.users[user_id]
        sequence = self.sequences[user]
        if sequence[-len(history) :] != history:
            raise ValueError(f"the history does not continue the earlier rows of user {user_id!r}")
        sequence.append(target)
        return user, len(history), len(sequence) - 1

    def _row(self, item_id: str) -> int:
        row = self._catalog.row(item_id)
        if row is None:
            raise ValueError(f"item {item_id!r} is not in the catalog")
        return row
