# SPDX-License-Identifier: Apache-2.0
"""Tables as their shards: files of this machine first, then another process (HLEM-1).

A row that no shard has, or whose shard does not answer as it should, is an error that names table and shard. No row is
ever made up: a zero in its place would be a score that looks right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jgr.config import UserError
from jgr.models.table_file import TableFile, TableHeader

Int64 = npt.NDArray[np.int64]


class ShardError(UserError):
    """Rows of a table could not be had."""


class Shard(Protocol):
    """Some rows of one table."""

    @property
    def header(self) -> TableHeader:
        """What its rows are, `first` and `held` among it."""

    def read(self, rows: Int64) -> npt.NDArray[Any]:
        """The rows [n, width], all of them its own. Raises ShardError."""

    def close(self) -> None: ...


class ShardAway(ShardError):
    """The shard did not answer at all, or not in time."""


class LocalShard:
    """A file of this machine, see `TableFile`."""

    def __init__(self, file: TableFile) -> None:
        self.header, self._file = file.header, file

    def read(self, rows: Int64) -> npt.NDArray[Any]:
        """See Shard. ShardError also where the file was written to: its rows are shared with whoever does that."""
        self._require_unchanged()  # to read what was cut off would end the process
        found: npt.NDArray[Any] = self._file.rows[rows - self.header.first]
        self._require_unchanged()
        return found

    def close(self) -> None:
        """The file is closed when nobody holds it any more."""

    def _require_unchanged(self) -> None:
        if not self._file.unchanged:
            raise ShardError(
                f"table {self.header.name}: {self._file.path} was written to while it is served; replace it by "
                "renaming another file to its name, and load the model again"
            )


class Shards:
    """Tables by name, each as shards in the order in which they are asked. Several threads may read.

    Raises ShardError where the shards of a table differ in what its rows are, or leave rows out.
    """

    def __init__(self, tables: Mapping[str, Sequence[Shard]]) -> None:
        self._tables = {name: tuple(shards) for name, shards in tables.items()}
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in tables}
        """By table: local and remote, rows that were read; failed, rows that could not be had."""
        for name, shards in self._tables.items():
            _fit(name, [shard.header for shard in shards])

    def reopen(self, table: str, file: TableFile) -> None:
        """Read the local rows of a table from a file that was opened anew, which has the same ones."""
        self._tables[table] = tuple(
            LocalShard(file) if isinstance(shard, LocalShard) else shard for shard in self._tables[table]
        )

    def header(self, table: str) -> TableHeader:
        """What the rows of a table are."""
        return self._tables[table][0].header

    def read(self, table: str, rows: Int64) -> npt.NDArray[Any]:
        """The rows [n, width] of a table, in its own dtype. Raises ShardError."""
        header, counts = self.header(table), self.counts[table]
        found = np.empty((len(rows), header.width), header.numpy_dtype)
        left = np.ones(len(rows), bool)
        for shard in self._tables[table]:
            of = shard.header
            own = np.flatnonzero(left & (rows >= of.first) & (rows < of.first + of.held))
            if not len(own):
                continue
            try:
                found[own] = shard.read(rows[own])
            except Exception:
                # A shard that fails with anything but ShardError is a fault of ours, and the rows are missing too.
                counts["failed"] += len(own)
                raise
            counts["local" if isinstance(shard, LocalShard) else "remote"] += len(own)
            left[own] = False
        if left.any():
            raise ShardError(f"table {table}: row {rows[left][0]} is in no shard")
        return found

    def close(self) -> None:
        for shards in self._tables.values():
            for shard in shards:
                shard.close()


def _fit(name: str, headers: Sequence[TableHeader]) -> None:
    first, reached = headers[0], 0
    for of in headers:
        for field in ("name", "rows", "width", "dtype", "model", "whole"):
            if getattr(of, field) != getattr(first, field):
                raise ShardError(
                    f"table {name}: its shards, in the folder and in embeddings.remote, differ: {field} is "
                    f"{getattr(first, field)!r} and {getattr(of, field)!r}"
                )
    for of in sorted(headers, key=lambda header: header.first):
        if of.first > reached:
            break
        reached = max(reached, of.first + of.held)
    if reached < first.rows:
        raise ShardError(f"table {name}: row {reached} and others are in no shard")
