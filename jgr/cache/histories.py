# SPDX-License-Identifier: Apache-2.0
"""Cells of the pool as what is kept of users' histories, an entry as long as its user (HLEM-2, MODEL-12, MODEL-14).

The one idea: what is kept of a user is one record for each token of the history, and records are written one by one.
So a user takes cells for the tokens that there are, and one who grew is written to the same cells, behind what stands
there already: nobody who reads the first tokens meanwhile sees anything change. Programs have a few shapes, for windows
of some numbers of tokens, the last of which is the longest history's. What is behind a user's last token is 0, whatever
stands in the cells that were read for it.

The last token that was there before is written again with the new ones. An HSTU computes it anew with the event that
follows (`jgr.models.hstu`), and so does whoever reads it as the last one, so that nobody reads what changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import ALIGNMENT
from jgr.cache.entries import Stored
from jgr.cache.pages import GOOD_FIT, Room, pieces
from jgr.cache.pool import DevicePool, UserView
from jgr.models import words
from jgr.models.params import PyTree
from jgr.models.quantize import Quantization
from jgr.models.rounded import Rounded

MOST_CELLS = 256
"""Groups of cells that the longest history takes at most: the event loop counts cells one by one."""


class _Field(NamedTuple):
    """One leaf's part of a record. shape, dtype: of the leaf, with the tokens along `axis`. first: its first word in a
    record; words: their number. rounded: how its numbers are held in 8 bits; None: as they are."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int
    first: int
    words: int
    rounded: Rounded | None = None

    @property
    def others(self) -> tuple[int, ...]:
        """The leaf's axes without that of the tokens."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    def within(self, window: int) -> tuple[int, ...]:
        """The leaf's shape in a window."""
        return (*self.shape[: self.axis], window, *self.shape[self.axis + 1 :])

    def as_words(self, numbers: jax.Array) -> jax.Array:
        """The runs [t, words] of tokens [t, *others]."""
        if self.rounded is None:
            return words.as_words(numbers.reshape(len(numbers), -1))
        return self.rounded.write(numbers.reshape(len(numbers), -1, self.rounded.size))

    def numbers(self, runs: jax.Array) -> jax.Array:
        """The tokens [t, *others] of runs [t, words]."""
        if self.rounded is None:
            return words.seen_as(runs, self.dtype).reshape(len(runs), *self.others)
        return self.rounded.read(runs, self.dtype).reshape(len(runs), *self.others)


class _Programs(NamedTuple):
    """The programs of a window. writes: by the most tokens that they write, ascending."""

    read: jax.stages.Compiled
    writes: dict[int, jax.stages.Compiled]

    @property
    def all(self) -> list[jax.stages.Compiled]:
        return [self.read, *self.writes.values()]


class HistoryView(UserView):
    """The cells of users' histories.

    kept: shapes and dtypes of what is kept of one user. along: for each leaf, or for all below one place of the tree,
    the axis of the tokens, of which every leaf has as many; "number" for one that is their number, which is not
    written, since an entry knows it. cell_tokens: see `room_of`. growth: the most new tokens of a user who grew; 0:
    users do not grow. windows: numbers of tokens that are read and written by programs of their own, besides the
    longest history's. like: a view of such histories, whose compiled programs are used. catch_up: see `UserView`.
    quantize: how vectors along the last axis of a token's floating numbers are held in 8 bits, see
    `jgr.models.rounded`; empty: as they are.
    """

    def __init__(
        self,
        pool: DevicePool,
        kept: PyTree,
        along: PyTree,
        cell_tokens: int,
        growth: int = 0,
        windows: Sequence[int] = (),
        like: UserView | None = None,
        catch_up: Callable[[], None] = lambda: None,
        quantize: Quantization = "",
    ) -> None:
        super().__init__(pool, catch_up)
        leaves, self._tree = jax.tree.flatten(kept)
        axes = jax.tree.leaves(jax.tree.broadcast(along, kept))
        self._tokens = tokens_of(kept, along)
        self._windows = (*sorted({count for count in windows if count < self._tokens}), self._tokens)
        fields, first = list[_Field | None](), 0
        for leaf, axis in zip(leaves, axes, strict=True):
            if axis == "number":
                fields.append(None)
                continue
            size, rest = divmod(math.prod(leaf.shape) * leaf.dtype.itemsize, self._tokens * words.WORD)
            if leaf.shape[axis] != self._tokens or rest:
                raise ValueError(
                    f"{leaf}: no whole words for each of {self._tokens} tokens along axis {axis}"
                )
            field = _Field(leaf.shape, np.dtype(leaf.dtype), axis % len(leaf.shape), first, size)
            if quantize and field.others and jnp.issubdtype(leaf.dtype, jnp.floating):
                rounded = Rounded(quantize, math.prod(field.others[:-1]), field.others[-1])
                field = field._replace(rounded=rounded, words=rounded.words)
            fields.append(field)
            first += field.words
        self._leaves, self._words = tuple(fields), first  # None: the number of tokens
        self._fields = [field for field in fields if field is not None]
        self.room = room_of(first * words.WORD, pool.page_bytes, self._tokens, cell_tokens)
        self._cells = words.Cells.of(self.room.bytes, pool.page_bytes)
        self._growth = growth
        self._programs: dict[int, _Programs] = {}  # by their window
        if isinstance(like, HistoryView) and like._made_of == self._made_of:
            self._programs = like._programs

    @property
    def _made_of(self) -> tuple[object, ...]:
        return self.pool, self._leaves, self._tree, self.room, self._growth, self._windows

    @property
    def longest(self) -> int:
        return self._tokens

    def compile(self) -> list[jax.stages.Compiled]:
        """The programs of all windows, the longest first: the one that reads, and those that write so many tokens at
        most, ascending."""
        if not self._programs:
            self._programs |= {window: self._compile(window) for window in self._windows}
        return [program for window in self._windows[::-1] for program in self._programs[window].all]

    def _compile(self, window: int) -> _Programs:
        cells = jax.ShapeDtypeStruct((self.room.of(window),), np.int32)
        kept = [jax.ShapeDtypeStruct(field.within(window), field.dtype) for field in self._fields]
        pool, number = self.pool.example, jax.ShapeDtypeStruct((), np.int32)
        read = jax.jit(partial(self._read, window)).lower(pool, cells, number).compile()
        writes = {}
        for count in sorted({min(self._growth + 1, window), window} if self._growth else {window}):
            write = jax.jit(partial(self._write, count), donate_argnums=0)
            writes[count] = write.lower(pool, kept, cells, number, number).compile()
        return _Programs(read, writes)

    def store(self, kept: PyTree, place: Stored) -> bool:
        """Write the tokens [place.first, place.tokens) and the one before them; otherwise as UserView has it.

        kept: with as many places as a window.
        """
        self.compile()
        leaves = [(leaf, of) for leaf, of in zip(jax.tree.leaves(kept), self._leaves, strict=True) if of]
        window, first = leaves[0][0].shape[leaves[0][1].axis], max(place.first - 1, 0)
        writes = self._programs[window].writes
        write = next(writes[most] for most in writes if place.tokens - first <= most)
        given = self._numbers(place, window), np.int32(first), np.int32(place.tokens)
        return self._put(lambda array: write(array, [leaf for leaf, _ in leaves], *given), place.epoch)

    def load(self, place: Stored, tokens: int | None = None) -> PyTree | None:
        """What is kept of the first `place.tokens` tokens, in the smallest window of `tokens` places or more; otherwise
        as UserView has it."""
        self.compile()
        window = self._tokens if tokens is None else next(x for x in self._windows if x >= tokens)
        read, given = self._programs[window].read, (self._numbers(place, window), np.int32(place.tokens))
        found = self._get(lambda array: read(array, *given), place.epoch)
        return None if found is None else jax.tree.unflatten(self._tree, found)

    def _numbers(self, place: Stored, window: int) -> npt.NDArray[np.int32]:
        """The numbers of an entry's cells for a window, and 0 for those that it has not: what is read of them is not
        valid. An entry may have more, of tokens that are not asked for."""
        cells = np.zeros(self.room.of(window), np.int32)
        own = place.cells[: len(cells)]
        cells[: len(own)] = own
        return cells

    def _read(self, window: int, array: jax.Array, cells: jax.Array, tokens: jax.Array) -> list[jax.Array]:
        room = self.room
        groups = words.read(array, *self._cells.place(cells), self._cells.words)
        groups = groups.reshape(-1, room.cells * self._cells.words)[:, : room.step * self._words]
        records = groups.reshape(-1, self._words)[:window]
        valid = jnp.arange(window) < tokens
        found = []
        for field in self._leaves:
            if field is None:
                found.append(tokens.reshape(1))
                continue
            numbers = field.numbers(records[:, field.first : field.first + field.words])
            known = valid.reshape(-1, *[1] * len(field.others))
            numbers = jnp.where(known, numbers, jnp.zeros((), field.dtype))
            found.append(jnp.moveaxis(numbers, 0, field.axis))
        return found

    def _write(
        self,
        count: int,
        array: jax.Array,
        leaves: list[jax.Array],
        cells: jax.Array,
        first: jax.Array,
        end: jax.Array,
    ) -> jax.Array:
        """Write the tokens [first, end), at most `count`."""
        room, parts = self.room, []
        tokens = first + jnp.arange(count, dtype=jnp.int32)
        for leaf, field in zip(leaves, self._fields, strict=True):
            some = jnp.take(jnp.moveaxis(leaf, field.axis, 0), tokens, axis=0, mode="clip")
            parts.append(field.as_words(some))
        records = jnp.concatenate(parts, axis=1)
        # A record is a run of words in a cell, or where no page holds it, the whole words of `room.cells` cells.
        run = self._words if room.cells == 1 else self._cells.words
        records = jnp.pad(records, ((0, 0), (0, room.cells * run - self._words)))
        at = tokens[:, None] // room.step * room.cells + jnp.arange(room.cells, dtype=jnp.int32)
        page, word = self._cells.place(cells[jnp.minimum(at, len(cells) - 1)])
        word = word + tokens[:, None] % room.step * self._words
        beyond = self.pool.pages + jnp.arange(count * room.cells, dtype=jnp.int32).reshape(count, -1)
        page = jnp.where(tokens[:, None] < end, page, beyond)  # such pages are not written
        return words.write(array, page, word, records.reshape(count, room.cells, run))


def tokens_of(kept: PyTree, along: PyTree) -> int:
    """How many tokens have places in what is kept; along: see `HistoryView`."""
    leaves, axes = jax.tree.leaves(kept), jax.tree.leaves(jax.tree.broadcast(along, kept))
    tokens: int = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis != "number")
    return tokens


def room_of(record_bytes: int, page_bytes: int, longest: int, cell_tokens: int) -> Room:
    """The room of histories, of which each token has a record of so many bytes, by cells of some tokens.

    cell_tokens: of a cell. There are more in one where the longest history would have more than MOST_CELLS cells, and
    fewer where cells of so many fill a page badly. Where no page holds a record, a token has several cells.
    """
    if record_bytes > page_bytes:
        cells, each = pieces(-(-record_bytes // ALIGNMENT), ALIGNMENT, page_bytes)
        return Room(each * ALIGNMENT, cells, 1)
    most = min(max(cell_tokens, -(-longest // MOST_CELLS)), longest, page_bytes // record_bytes)
    fits = {tokens: page_bytes // (tokens * record_bytes) * tokens for tokens in range(most, 0, -1)}
    good = [tokens for tokens, held in fits.items() if held * record_bytes >= GOOD_FIT * page_bytes]
    step = good[0] if good else max(fits, key=lambda tokens: fits[tokens])
    return Room(step * record_bytes, 1, step)
