# SPDX-License-Identifier: Apache-2.0
"""The cache meta service (BAT-8): which entries exist, who uses them, and which go when room is needed.

It holds no tensor, and decides nothing about layouts. Kinds of entries are open: each has a name, the room that its
entries take and a limit, and its pages come from a list that other services, of other models, share. A request's life:

    find(name, content)     the entry whose valid tokens can be reused, or None; an entry of other tokens is dropped
    hold(entry)             pinned: neither its cells nor its tokens change until `release`
    extend(name, content)   pinned, with cells for all of the content; the caller writes what is not valid yet and says
                            `written` or `failed`. None: no room, or somebody writes this entry already
    planned(entry, lane)    in place of `written`: the content will be there for every later program of this lane, but
                            for others only after `settled`; `spoiled` where it was not written after all

Which entry goes first: the one whose last use is longest ago, or for users, with a Hotness, the least frequent one. A
pinned entry never goes. An entry that was dropped while pinned is freed with its last pin, and what is written to it
then is of no use to anybody.

A host tier, where there is one, takes what the device gives up, and gives up what goes first of its own; with a
Hotness it does not take a user who comes less than all who are there. `moves` says what is to be copied, in order,
before the programs that are planned after it, in either direction. Below it there may be items that the host holds for
all nodes (`Below`): what is found there is brought to the device, and stays where it is.

The device may lose all pages at once. Its epoch counts how often that happened: `renew` tells the service of the
present one, and a plan names the epoch that it was made in, so that nobody runs it later (`jgr.cache.pool`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, repeat

from jgr.cache.entries import Below, Entry, Move, Name, Valued, serves
from jgr.cache.hotness import Hotness, ItemFrequencies
from jgr.cache.pages import Pages, Room


@dataclass(eq=False, slots=True)
class _Aside:
    """An entry's valid tokens on the host."""

    tokens: int
    digest: bytes
    cells: tuple[int, ...]


class CacheMeta:
    """Entries over the pages of a device, and of a host where there are some.

    rooms: the room of entries, by kind. hotness: decides which users go first; None: the least recently used ones.
    owner: a name that keeps its classes of pages apart from those of other services over the same pages. frequencies:
    counts how often items are asked for; None: nobody wants to know. moving: whether limits move while entries are
    there, for which it is remembered who shares a page.
    """

    def __init__(
        self,
        pages: Pages,
        rooms: Mapping[str, Room],
        hotness: Hotness | None = None,
        host: Pages | None = None,
        owner: str = "",
        frequencies: ItemFrequencies | None = None,
        moving: bool = False,
    ) -> None:
        self.pages, self.hotness, self.host, self._rooms = pages, hotness, host, dict(rooms)
        self.frequencies = frequencies
        self.below: Below | None = None
        self.epoch = 0
        self._classes = {kind: f"{owner}/{kind}" if owner else kind for kind in rooms}
        for kind, room in rooms.items():
            for each in (pages,) if host is None else (pages, host):
                each.add(self._classes[kind], room.bytes)
        self._entries: dict[str, OrderedDict[Name, Entry]] = {kind: OrderedDict() for kind in rooms}
        self._aside: OrderedDict[Name, _Aside] = OrderedDict()
        self._unnamed: set[Entry] = set()
        self._moves: list[Move] = []
        shares = [kind for kind, of in self._classes.items() if moving and pages.cells(of) > 1]
        # The entries with a cell of a page, by kind; the values say nothing.
        self._sharing: dict[str, dict[int, dict[Entry, None]]] = {kind: {} for kind in shares}
        self.counts: Counter[str] = Counter()
        """Events by name: {kind}_evicted, {kind}_stale, {kind}_refused and {kind}_collateral for each kind (the last of
        those that were evicted for no more than sharing a page with another); to_host and to_device."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def renew(self, epoch: int) -> None:
        """Where the pool is of another epoch than these entries: forget them, for their cells were emptied."""
        if epoch != self.epoch:
            self.clear()
            self.epoch = epoch

    def close(self) -> None:
        """Forget everything and give all pages back. ValueError where an entry is pinned."""
        self.clear()
        for name in self._classes.values():
            for each in (self.pages,) if self.host is None else (self.pages, self.host):
                each.remove(name)

    def find(self, name: Name, content: Valued, lane: object = None) -> Entry | None:
        """The entry whose valid tokens are the first of the content's, on the device; its use is remembered.

        An entry of other tokens is dropped, and one on the host is brought back where there is room. lane: whose
        programs will read it; None: those of any lane.
        """
        entries = self._entries[name.kind]
        entry = entries.get(name)
        if entry is None:
            entry = self._bring_back(name, content)
        elif entry.tokens and entry.digest != content.digest and not serves(entry, content):
            self.drop(name)
            self.counts[f"{name.kind}_stale"] += 1
            return None
        if entry is None or not entry.tokens or entry.ahead not in (None, lane):
            return None
        entries.move_to_end(name)
        return entry

    def by_name(self, name: Name) -> Entry | None:
        """The entry of that name on the device, if any of it is valid, of any content."""
        entry = self._entries[name.kind].get(name)
        return entry if entry is not None and entry.tokens else None

    def kept_tokens(self, name: Name) -> int:
        """The number of valid tokens of the entry of that name, of any content, on the device or the host."""
        entry = self._entries[name.kind].get(name) or self._aside.get(name)
        return 0 if entry is None else entry.tokens

    def hold(self, entry: Entry) -> None:
        entry.pins += 1

    def release(self, entry: Entry) -> None:
        """End a `hold`, or an `extend` after `written` or `failed`: the entry is pinned once less."""
        entry.pins -= 1
        if entry.pins == 0 and not entry.named:
            self._unnamed.remove(entry)
            self._free(entry)

    def extend(self, name: Name, content: Valued, lane: object = None) -> Entry | None:
        """A pinned entry with cells for all of the content; the caller writes from `entry.tokens` on. lane: as in
        `find`."""
        entry = self.find(name, content, lane)
        if entry is None:
            if name in self._entries[name.kind]:
                return None  # it is being written for the first time
            entry = Entry(name, 0, b"", ())
        elif entry.growing is not None or entry.tokens >= len(content):
            return None
        entry.pins += 1  # it must not go to make room for itself
        if not self._widen(entry, len(content)):
            entry.pins -= 1
            self.counts[f"{name.kind}_refused"] += 1
            return None
        entry.growing = content
        if not entry.tokens:
            self._add(entry)
        return entry

    def written(self, entry: Entry) -> None:
        """The content is in the entry's cells, for every program that is dispatched from now on."""
        assert entry.growing is not None
        entry.tokens, entry.digest, entry.growing = len(entry.growing), entry.growing.digest, None

    def planned(self, entry: Entry, lane: object) -> None:
        """The content will be in the entry's cells, for every program that this lane dispatches after the writer."""
        self.written(entry)
        entry.ahead = lane
        entry.writers += 1

    def settled(self, entry: Entry) -> None:
        """The writer of a planned entry ended well."""
        entry.writers -= 1
        if not entry.writers:
            entry.ahead = None

    def spoiled(self, entry: Entry) -> None:
        """The writer of a planned entry did not write it: nobody finds it any more."""
        self.settled(entry)
        if entry.named:
            self.drop(entry.name)

    def failed(self, entry: Entry) -> None:
        """The content was not written. What was valid before still is; cells beyond it are given back."""
        entry.growing = None
        if not entry.tokens:
            if entry.named:
                self.drop(entry.name)
            return
        kept = self.cells(entry.name.kind, entry.tokens)
        beyond = entry.cells[kept:]
        self._share(entry, -1)
        entry.cells = entry.cells[:kept]
        self._share(entry)
        self.pages.give_back(self._classes[entry.name.kind], beyond)

    def drop(self, name: Name) -> bool:
        """Forget an entry, wherever it is; False where there is none. Its cells are free once nobody has it pinned."""
        if name in self._aside:
            self._leave_host(name)
            return True
        entry = self._entries[name.kind].get(name)
        if entry is None:
            return False
        self._remove(entry)
        if (order := self._order(name.kind)) is not None:
            order.let_go(name)
        return True

    def forget(self, user: Name) -> bool:
        """Drop a user's entry, and forget how often the user came. False where there was no entry."""
        dropped = self.drop(user)
        if self.hotness is not None:
            self.hotness.forget(user)
        return dropped

    def clear(self) -> None:
        """Forget everything, as when the pool's content is lost."""
        for name in [*(name for entries in self._entries.values() for name in entries), *self._aside]:
            self.drop(name)
        self._moves.clear()

    def set_limit(self, kind: str, pages: int) -> None:
        """Move the boundary: entries that are beyond the new limit go, but for pinned ones. No page is moved.

        A page is free once nobody has a cell of it. So that not most of the entries go before a first page is empty,
        those that share a page with one that goes go with it, where limits move (HLEM-10 b).
        """
        self.pages.set_limit(self._classes[kind], pages)
        while self.used(kind) > pages and (victim := self._victim(kind)) is not None:
            shared = self._sharers(victim)
            self._evict(victim)
            for others in shared:
                if self.used(kind) > pages and not any(other.pins for other in others):
                    for other in others:
                        if other.named:  # else it went with another page
                            self._evict(other)
                            self.counts[f"{kind}_collateral"] += 1

    def valid_tokens(self, name: Name, content: Valued, lane: object = None) -> int:
        """The number of valid tokens of the entry that `find` would return, 0 for none. Changes nothing."""
        on_device = self._entries[name.kind].get(name)
        if on_device is not None and on_device.ahead not in (None, lane):
            return 0
        entry = on_device or self._aside.get(name)
        if entry is None:
            return 0 if self.below is None else self.below.valid_tokens(name, content)
        return entry.tokens if serves(entry, content) else 0

    def cells(self, kind: str, tokens: int) -> int:
        """The number of cells of an entry of so many tokens."""
        return self._rooms[kind].of(tokens)

    def has_room(self, kind: str, tokens: int, entries: int = 1) -> bool:
        """Whether new entries of so many tokens each would make nothing be lost: there is room on the device, or on the
        host for what leaves the device for them, which may be the first of them."""
        of, each = self._classes[kind], self.cells(kind, tokens)
        more = entries * each - self.pages.room(of)
        if more <= 0 or self.host is None:
            return more <= 0
        free = self.host.room(of)
        victims = ((len(entry.cells), self.cells(kind, entry.tokens)) for entry in self._victims(kind))
        for held, used in chain(victims, repeat((each, each), entries - 1)):
            more, free = more - held, free - used
            if more <= 0 or free < 0:
                return free >= 0
        return False

    def can_keep(self, kind: str, tokens: int) -> bool:
        """Whether an entry of so many tokens fits at all, if every other one goes."""
        name = self._classes[kind]
        return self.cells(kind, tokens) <= self.pages.limit(name) * self.pages.cells(name)

    def used(self, kind: str) -> int:
        """Pages of the device that a kind's entries hold."""
        return self.pages.used(self._classes[kind])

    def coldest_frequency(self, now_ns: int) -> float:
        """The least frequency of a user on the device or the host (BAT-10); 0 where there is none, or frequencies are
        not kept."""
        if (hotness := self.hotness) is None:
            return 0.0
        names = chain(islice(hotness.coldest("device"), 1), islice(hotness.coldest("host"), 1))
        return min((hotness.frequency(name, now_ns) for name in names), default=0.0)

    def take_moves(self) -> list[Move]:
        """The copies to be made, in this order, before the programs that are planned from now on.

        Each is given once.
        """
        moves, self._moves = self._moves, []
        return moves

    @property
    def pinned(self) -> int:
        """The number of entries that somebody reads or writes."""
        return sum(entry.pins > 0 for kind in self.kinds for entry in self._all(kind))

    def number(self, kind: str) -> int:
        """The number of entries of a kind on the device."""
        return len(self._entries[kind])

    def names(self, kind: str) -> Iterator[Name]:
        """The names of the entries that hold anything, the last used first: those on the device, then on the host."""
        yield from (name for name, entry in reversed(self._entries[kind].items()) if entry.tokens)
        yield from (name for name in reversed(self._aside) if name.kind == kind)

    def fragmentation(self, kind: str) -> float:
        """Share of the kind's pages that nothing valid fills: ends of cells and of pages, and cells that are free."""
        room = self.used(kind) * self.pages.page_bytes
        filled = sum(self._rooms[kind].filled(entry.tokens) for entry in self._all(kind))
        return 1 - filled / room if room else 0.0

    def check(self) -> None:
        """Audit: every used cell is of just one entry. AssertionError names what is broken."""
        self.pages.check()
        for kind, name in self._classes.items():
            cells = [cell for entry in self._all(kind) for cell in entry.cells]
            assert len(set(cells)) == len(cells), f"a cell is of two {kind} entries"
            assert len(cells) == self.pages.cells_used(name), f"cells of {kind} entries are lost"
            for entry in self._all(kind):
                assert entry.named or entry.pins, "an entry without a name or a pin is kept"
                assert (entry.growing is None and not entry.writers) or entry.pins, (
                    "an entry is written by nobody"
                )
                assert (entry.ahead is None) == (entry.writers == 0), "nobody settles an entry"
                assert self.cells(kind, entry.tokens) <= len(entry.cells) or not entry.tokens, (
                    "an entry has more tokens than room"
                )
            if kind in self._sharing:
                found: dict[int, dict[Entry, None]] = {}
                for entry in self._all(kind):
                    for page in self._pages_of(entry):
                        found.setdefault(page, {})[entry] = None
                assert found == self._sharing[kind], f"{kind} entries share other pages"
        if self.hotness is not None:
            self.hotness.check()
        if self.host is not None:
            self.host.check()
            used = sum(self.host.cells_used(name) for name in self._classes.values())
            assert used == sum(len(aside.cells) for aside in self._aside.values()), (
                "cells of the host are lost"
            )

    def _all(self, kind: str) -> Iterator[Entry]:
        yield from self._entries[kind].values()
        yield from (entry for entry in self._unnamed if entry.name.kind == kind)

    def _order(self, kind: str) -> Hotness | None:
        """Says which entries of a kind go first; None: those that were used longest ago."""
        return self.hotness if kind == "user" else None

    def _add(self, entry: Entry) -> None:
        self._entries[entry.name.kind][entry.name] = entry
        if (order := self._order(entry.name.kind)) is not None:
            order.hold(entry.name)

    def _remove(self, entry: Entry) -> None:
        """Take an entry off the device, or leave that to its last pin."""
        del self._entries[entry.name.kind][entry.name]
        entry.named = False
        if entry.pins:
            self._unnamed.add(entry)
        else:
            self._free(entry)

    def _widen(self, entry: Entry, tokens: int) -> bool:
        """Give an entry cells for so many tokens, at the cost of others. False: there is no room."""
        kind = entry.name.kind
        more = self.cells(kind, tokens) - len(entry.cells)
        if more <= 0:
            return True
        if not self.can_keep(kind, tokens):
            return False  # before others go for nothing
        while (cells := self.pages.take(self._classes[kind], more)) is None:
            victim = self._victim(kind)
            if victim is None:
                return False
            self._evict(victim)
        entry.cells += cells
        self._share(entry)
        return True

    def _victims(self, kind: str) -> Iterator[Entry]:
        """What may leave the device, in order."""
        entries, order = self._entries[kind], self._order(kind)
        names = entries if order is None else order.coldest()
        return (entries[name] for name in names if not entries[name].pins)

    def _victim(self, kind: str) -> Entry | None:
        return next(self._victims(kind), None)

    def _evict(self, entry: Entry) -> None:
        name, order = entry.name, self._order(entry.name.kind)
        self.counts[f"{name.kind}_evicted"] += 1
        self._remove(entry)
        if self.host is not None and not (self.below is not None and self.below.holds(name, entry.digest)):
            used = entry.cells[: self.cells(name.kind, entry.tokens)]
            if order is not None:
                order.hold(name, "host")
            if (cells := self._take_host(name, len(used))) is not None:
                self._aside[name] = _Aside(entry.tokens, entry.digest, cells)
                self._moves.append(Move("to_host", self._classes[name.kind], used, cells))
                self.counts["to_host"] += 1
                return
        if order is not None:
            order.let_go(name)

    def _take_host(self, name: Name, count: int) -> tuple[int, ...] | None:
        """So many cells of the host for an entry, at the cost of what goes before it. None: that is too little."""
        assert self.host is not None
        of, order = self._classes[name.kind], self._order(name.kind)
        free, leaving = self.host.room(of), list[Name]()
        for other in self._aside if order is None else order.coldest("host"):
            if free >= count or (order is not None and other == name):
                break
            if other.kind == name.kind and other in self._aside:  # not one that is being brought back
                free += len(self._aside[other].cells)
                leaving.append(other)
        if free < count:
            return None
        for other in leaving:
            self._leave_host(other)
        return self.host.take(of, count)

    def _bring_back(self, name: Name, content: Valued) -> Entry | None:
        aside = self._aside.get(name)
        if aside is None:
            return None if self.below is None else self._copy_up(self.below, name, content)
        entry = Entry(name, aside.tokens, aside.digest, ())
        if not serves(entry, content):
            self._leave_host(name)
            self.counts[f"{name.kind}_stale"] += 1
            return None
        del self._aside[name]  # before others take its place there
        if not self._widen(entry, entry.tokens):
            self._aside[name] = aside
            return None
        of = self._classes[name.kind]
        self._moves.append(Move("to_device", of, entry.cells, aside.cells))
        assert self.host is not None
        self.host.give_back(of, aside.cells)
        self._add(entry)
        self.counts["to_device"] += 1
        return entry

    def _copy_up(self, below: Below, name: Name, content: Valued) -> Entry | None:
        found = below.find(name, content)
        if found is None:
            return None
        tokens, cells = found
        entry = Entry(name, tokens, content.prefix(tokens), ())
        if not self._widen(entry, tokens):
            return None
        self._moves.append(Move("to_device", self._classes[name.kind], entry.cells, cells))
        self._add(entry)
        self.counts["to_device"] += 1
        return entry

    def _leave_host(self, name: Name) -> None:
        assert self.host is not None
        self.host.give_back(self._classes[name.kind], self._aside.pop(name).cells)
        if (order := self._order(name.kind)) is not None:
            order.let_go(name)

    def _share(self, entry: Entry, by: int = 1) -> None:
        """Remember in which pages an entry has cells; forget it where `by` is -1."""
        sharing = self._sharing.get(entry.name.kind)
        if sharing is None:
            return
        for page in self._pages_of(entry):
            here = sharing.setdefault(page, {})
            if by > 0:
                here[entry] = None
                continue
            del here[entry]
            if not here:
                del sharing[page]

    def _pages_of(self, entry: Entry) -> list[int]:
        per_page = self.pages.cells(self._classes[entry.name.kind])
        return list(dict.fromkeys(cell // per_page for cell in entry.cells))

    def _sharers(self, entry: Entry) -> list[list[Entry]]:
        """For each of an entry's pages the others that have cells there, the fewest first."""
        sharing = self._sharing.get(entry.name.kind)
        if sharing is None:
            return []
        found = ([other for other in sharing[page] if other is not entry] for page in self._pages_of(entry))
        return sorted(found, key=len)

    def _free(self, entry: Entry) -> None:
        self._share(entry, -1)
        self.pages.give_back(self._classes[entry.name.kind], entry.cells)
