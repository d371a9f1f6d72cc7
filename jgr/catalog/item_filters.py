# SPDX-License-Identifier: Apache-2.0
"""Turns the items that a request may get into the nodes of the prefix tree that its beam search may enter.

The one idea: with rows sorted by semantic id, every node of any depth is a range of positions. So "is anything left
below this node" is a difference of two counts, and only nodes above items that the request names can be affected. A
request's filter is a short list of nodes for each level, however large the catalog is.

- Denied items: the nodes whose items are all denied are listed; they may not be entered.
- Allowed items: the nodes above them are listed; no other node may be entered.
- A segment is a named set of items, with a bit for every node that says whether any of them is below it. Several
  segments at once make a combination, the items that are in all of them. It has bits of its own, since an item of each
  segment may be below a node, and none that is in both. Denied items are then counted against the combination, so that
  a node is not entered if all its items are denied or outside.

Items that share a semantic id share a leaf, which may be entered while one of them is left. `ItemFilter.keeps` tells
the items apart afterwards.

Letters: n items, N_l nodes at depth l.
"""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import MAX_NAME_CHARS, Catalog, CatalogError
from jgr.catalog.prefix_tree import PrefixTree

Int32 = npt.NDArray[np.int32]
Uint32 = npt.NDArray[np.uint32]

MAX_COMBINATIONS = 64
MAX_SEGMENTS = 1024
_NONE = np.zeros(0, np.int32)


class Segment:
    """A named set of items, or the items that several sets share. Equal keys of one ItemFilters are one object."""

    def __init__(self, key: tuple[str, ...], tree: SortedTree, words: Uint32) -> None:
        """words: a bit for each position of the sorted rows, set if its item is in the segment."""
        self.key = key
        self._tree = tree
        self.words = words
        self._before = np.concatenate([[0], np.cumsum(np.bitwise_count(words), dtype=np.int32)])

    @property
    def n_items(self) -> int:
        return int(self._before[-1])

    def holds(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = (
            self.words[positions >> 5] >> (positions & 31).astype(np.uint32)
        ) & 1 > 0
        return held

    def rank(self, positions: Int32) -> Int32:
        """How many of the segment's items come before each position (0 .. n)."""
        below = (np.uint32(1) << (positions & 31).astype(np.uint32)) - np.uint32(1)
        part = np.bitwise_count(self.words[positions >> 5] & below)
        found: Int32 = self._before[positions >> 5] + part
        return found

    @cached_property
    def node_words(self) -> tuple[Uint32, ...]:
        """For each level l, a bit for each node of depth l + 1: whether an item is below it; then one spare word."""
        return tuple(pack_bits(np.diff(self.rank(starts)) > 0) for starts in self._tree.starts)


@dataclass(frozen=True, eq=False)
class ItemFilter:
    """The items that one request may get. Made by ItemFilters.choose.

    children, parents: for each level l, the listed nodes of depth l + 1, ascending, and the parent of each; empty
    tuples if nothing is listed. only: True: no other nodes may be entered; False: the listed nodes may not be entered.
    segment: items must also be in it; None: no such limit. n_items: how many items may be returned. _places: the sorted
    positions of the items that are the only ones, or are not to be returned. _position: of each row; None: nothing is
    listed.
    """

    children: tuple[Int32, ...] = ()
    parents: tuple[Int32, ...] = ()
    only: bool = False
    segment: Segment | None = None
    n_items: int = 0
    _places: Int32 = field(default_factory=lambda: _NONE)
    _position: Int32 | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the filter lets every item through."""
        return not (self.only or self.segment or self.children)

    def keeps(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """Which of the items of these rows may be returned."""
        if self._position is None:
            return np.full(len(rows), not self.only)
        positions = self._position[rows]
        kept: npt.NDArray[np.bool_] = _among(positions, self._places) == self.only
        return kept if self.segment is None else kept & self.segment.holds(positions)

    def enters(self, leaves: Int32) -> npt.NDArray[np.bool_]:
        """Which of the leaves may be entered. A short host version of the search's rule on the device."""
        listed = self.children[-1] if self.children else _NONE
        entered: npt.NDArray[np.bool_] = np.isin(leaves, listed) == self.only
        if self.segment is not None:
            words = self.segment.node_words[-1]
            entered &= (words[leaves >> 5] >> (leaves & 31).astype(np.uint32)) & 1 > 0
        return entered


NO_FILTER = ItemFilter()


class SortedTree:
    """A prefix tree over rows sorted by semantic id.

    position: [n] int32, each row's position in that order.
    starts: per level [N_{l+1} + 1] int32; node i of depth l + 1 holds positions starts[l][i] .. starts[l][i + 1] - 1.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.n = len(tree.leaf_rows)
        self._tree = tree
        self.position = np.empty(self.n, np.int32)
        self.position[tree.leaf_rows] = np.arange(self.n, dtype=np.int32)
        starts = [tree.leaf_offsets]
        for offsets in tree.offsets[:0:-1]:
            starts.append(starts[-1][offsets])
        self.starts = tuple(starts[::-1])

    def places(self, rows: Int32) -> Int32:
        """The positions of rows, which may repeat: distinct ones, ascending."""
        places = np.sort(self.position[rows])
        return places[_changes(places)]

    def above(self, places: Int32) -> Iterator[tuple[Int32, Int32, Int32]]:
        """Yield for each level the nodes above ascending positions, their parents, and how many of these positions are
        below each."""
        tree = self._tree
        paths = tree.paths[tree.leaf_of_row[tree.leaf_rows[places]]]
        parents = np.zeros(len(places), np.int32)
        for level in range(tree.depth):
            nodes = paths[:, level]
            first = np.flatnonzero(_changes(nodes))
            yield nodes[first], parents[first], np.diff(first, append=len(places))
            parents = nodes


class ItemFilters:
    """Makes filters over one catalog. segments: for each name, the rows of its items."""

    def __init__(self, tree: PrefixTree, segments: Mapping[str, Int32] | None = None) -> None:
        self._tree = SortedTree(tree)
        self._segments = {name: self._segment(name, rows) for name, rows in (segments or {}).items()}
        self._combinations: OrderedDict[tuple[str, ...], Segment] = OrderedDict()

    @property
    def segments(self) -> tuple[str, ...]:
        """The names of the segments, sorted."""
        return tuple(self._segments)

    def nearest(self, name: str) -> str | None:
        """The segment's name that begins most like this one; None: there are no segments.

        Only the two beside it in the alphabet can. To compare all letters of a thousand names takes half a second.
        """
        known = sorted(self._segments)
        beside = known[max(0, bisect(known, name) - 1) :][:2]
        return max(beside, key=lambda one: _common_chars(one, name), default=None)

    def choose(self, denied: Int32, allowed: Int32 | None, segments: Sequence[str]) -> ItemFilter:
        """The filter of a request.

        denied: rows that must not be returned. allowed: the only rows that may be returned; None: all. Both may be in
        any order, with repeats. segments: an item must be in all that are named. Raises KeyError for an unknown name.
        """
        segment, tree = self.combination(segments), self._tree
        hidden = tree.places(denied)
        if allowed is not None:
            places = tree.places(allowed)
            places = places[~_among(places, hidden)]
            if segment is not None:
                places = places[segment.holds(places)]
            children, parents = _listed((nodes, above) for nodes, above, _ in tree.above(places))
            return ItemFilter(children, parents, True, None, len(places), places, tree.position)
        places = hidden if segment is None else hidden[segment.holds(hidden)]
        n_items = (tree.n if segment is None else segment.n_items) - len(places)
        children, parents = self._emptied(places, segment) if len(places) else ((), ())
        return ItemFilter(children, parents, False, segment, n_items, hidden, tree.position)

    def combination(self, segments: Iterable[str]) -> Segment | None:
        """The items that are in all the named segments; None for no names. Raises KeyError for an unknown name."""
        key = tuple(sorted(set(segments)))
        if len(key) < 2:
            return self._segments[key[0]] if key else None
        found = self._combinations.get(key)
        if found is None:
            words = np.bitwise_and.reduce([self._segments[name].words for name in key])
            found = self._combinations[key] = Segment(key, self._tree, words)
        self._combinations.move_to_end(key)
        while len(self._combinations) > MAX_COMBINATIONS:
            self._combinations.popitem(last=False)
        return found

    def _segment(self, name: str, rows: Int32) -> Segment:
        bits = np.zeros(self._tree.n, bool)
        bits[self._tree.position[rows]] = True
        return Segment((name,), self._tree, pack_bits(bits))

    def _emptied(self, places: Int32, segment: Segment | None) -> tuple[tuple[Int32, ...], tuple[Int32, ...]]:
        """For each level, the nodes below which no item (of the segment) is left without those at the positions."""
        kept: list[tuple[Int32, Int32]] = []
        for starts, (nodes, parents, listed) in zip(self._tree.starts, self._tree.above(places), strict=True):
            first, last = starts[nodes], starts[nodes + 1]
            held = last - first if segment is None else segment.rank(last) - segment.rank(first)
            empty = listed == held
            kept.append((nodes[empty], parents[empty]))
        return _listed(kept)


def _listed(levels: Iterable[tuple[Int32, Int32]]) -> tuple[tuple[Int32, ...], tuple[Int32, ...]]:
    """The nodes of each level, and their parents."""
    children, parents = zip(*levels, strict=True)
    return children, parents


def _changes(ascending: Int32) -> npt.NDArray[np.bool_]:
    """Which values are not the one before."""
    changes = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=changes[1:])
    return changes


def _among(values: Int32, ascending: Int32) -> npt.NDArray[np.bool_]:
    """Which of the values are among distinct ascending ones."""
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    found: npt.NDArray[np.bool_] = ascending.take(np.searchsorted(ascending, values), mode="clip") == values
    return found


def pack_bits(bits: npt.NDArray[np.bool_]) -> Uint32:
    """Pack bits into words: bit i is bit i % 32 of word i // 32. One more word makes reads past the last bit safe."""
    words = np.zeros(len(bits) // 32 + 2, "<u4")
    packed = np.packbits(bits, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words.astype(np.uint32, copy=False)


def _is_name(value: object) -> bool:
    """Whether `value` can be a segment's name in a request (jgr.serving.api.Filters)."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS


def _common_chars(one: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def catalog_segments(catalog: Catalog, field: str) -> dict[str, Int32]:
    """The rows of each segment, by name. The metadata's `field` holds an item's segments: one name or a list of names.

    Raises CatalogError if the field holds something else, and for more than 1024 segments.
    """
    rows: dict[str, list[int]] = {}
    for row, metadata in enumerate(catalog.metadata):
        if field not in metadata:
            continue
        value: Any = metadata[field]
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(map(_is_name, names)):
            item = catalog.item_ids[row]
            raise CatalogError(
                f"item {item!r}: metadata.{field} must be a list of segment names (catalog.segments) of 1 to "
                f"{MAX_NAME_CHARS} characters, found {str(value)[:80]!r}"
            )
        for name in names:
            rows.setdefault(name, []).append(row)
        if len(rows) > MAX_SEGMENTS:
            raise CatalogError(f"metadata.{field} names more than {MAX_SEGMENTS} segments (catalog.segments)")
    return {name: np.array(rows[name], np.int32) for name in sorted(rows)}
