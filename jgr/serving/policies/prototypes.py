# SPDX-License-Identifier: Apache-2.0
"""Where a library's keys and values stand in the pool (RCLLM-1): cells that its engine holds as long as it serves.

A plan asks for the entry; where the pool was lost, or had no room, it is given cells anew, and who writes is told
(`take`) before any program of that plan is dispatched. Pure bookkeeping, on the event loop.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

from jgr.cache.entries import Entry, Name
from jgr.cache.meta import CacheMeta
from jgr.serving.policies.sources import Approximate, Run

KIND = "library"
_numbers = itertools.count()


class _Whole:
    """A library as the content of an entry."""

    def __init__(self, prototypes: int) -> None:
        self._prototypes = prototypes
        self.digest = hashlib.blake2b(b"%d" % prototypes, digest_size=16).digest()

    def __len__(self) -> int:
        return self._prototypes

    def prefix(self, count: int) -> bytes:
        return self.digest


class Placed(NamedTuple):
    """Cells that are to be filled with the library, of this epoch of the pool."""

    cells: tuple[int, ...]
    epoch: int


class PrototypePlace:
    """prototypes: their number. meta: has a kind of entries for libraries. cell_tokens, parts: of its cells."""

    def __init__(self, meta: CacheMeta, prototypes: int, cell_tokens: int, parts: int) -> None:
        self._meta, self._whole = meta, _Whole(prototypes)
        self._cell_tokens, self._parts = cell_tokens, parts
        self._name = Name(KIND, next(_numbers), "causal")
        self._entry: Entry | None = None
        self._new: list[Placed] = []

    def cells(self) -> tuple[int, ...] | None:
        """The library's cells, which hold it for whatever is dispatched after `take`; None: there is no room now."""
        if self._entry is not None and not self._entry.named:  # the pool was lost
            self._meta.release(self._entry)
            self._entry = None
        if self._entry is None:
            self._entry = self._meta.extend(self._name, self._whole)
            if self._entry is not None:
                self._meta.written(self._entry)
                self._new.append(Placed(self._entry.cells, self._meta.epoch))
        return None if self._entry is None else self._entry.cells

    def take(self) -> list[Placed]:
        """What is to be filled before the programs that are planned from now on. Each is given once."""
        new, self._new = self._new, []
        return new

    def span(self, run: Run, cells: tuple[int, ...], position: int) -> Approximate:
        """Where the tokens of a run come from whose first one stands at this position of its prompt."""
        first, within = divmod(run.prototype, self._cell_tokens)
        end = -(-(run.prototype + run.tokens) // self._cell_tokens)
        of_run = cells[first * self._parts : end * self._parts]
        return Approximate(run.tokens, of_run, position - run.place, within)

    def close(self) -> None:
        """Give the cells back. Further calls do nothing."""
        entry, self._entry = self._entry, None
        if entry is not None:
            if entry.named:
                self._meta.drop(entry.name)
            self._meta.release(entry)
