# SPDX-License-Identifier: Apache-2.0
"""Which node of a fleet answers a request (RCLLM-8, HLEM-13; BAT-13's least outstanding tokens).

The score of a node is a sum of terms: what its caches save of the prompt, less how much more it has to do than the
mean, in units of this very request, so that no term has a unit and no threshold fits one fleet alone. A node is judged
by its own load: one that is full loses what its cache is worth, and no other does.

What a node holds and what others have sent to it is known from its reports, which are seconds old; what this router
has sent is known from its own bookings. So a router that reports reach late, or never, still spreads its requests.

Pure: time is an argument, in ns. A router is of one process; others route beside it, and are seen in reports alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from jgr.serving.policies.bookings import Bookings
from jgr.serving.policies.digests import Bool, Digests, Keys, keys

Float64 = npt.NDArray[np.float64]
Rule = Literal["joint", "hit", "load", "least", "round_robin", "random", "hash"]
"""joint: reuse, load and affinity; hit: reuse alone; load: tokens in flight alone; least: requests in flight alone;
hash: the user's node by a rendezvous hash, unless it has too much to do."""
RULES: tuple[Rule, ...] = get_args(Rule)

REMEMBERED_USERS = 65_536
"""So many users' last nodes a router remembers."""
BOUND = 1.25
"""A node takes at most so many times the mean number of requests under the rule `hash`."""
LATE = 1e6
"""What a node's score lacks that would be late: more than any sum of terms."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as routing needs to know it. Tokens are estimates.

    user: the name of the user's cache entries, "" for nobody; items: names of the candidates; item_tokens: of each;
    other_tokens: those that no cache holds. left_ns: until its deadline; None: it has none.
    """

    id: str
    user: str
    user_tokens: float
    items: Sequence[str]
    item_tokens: float
    other_tokens: float
    left_ns: int | None = None

    @property
    def tokens(self) -> float:
        return max(1.0, self.user_tokens + self.item_tokens * len(self.items) + self.other_tokens)


@dataclass(frozen=True)
class Report:
    """What a node says of itself. users, items: see `digests.digest`; "" where it holds none. ns_per_token: what a
    computed token takes, 0 where that is not known. sent: tokens in flight since the last report, in the mean, by the
    router that sent them."""

    users: bytes = b""
    items: bytes = b""
    ns_per_token: float = 0.0
    sent: Mapping[str, float] = field(default_factory=dict)


class View(NamedTuple):
    """What the terms see: arrays over the n nodes, all float64, in tokens but for `running` and `last`.

    user, items: what the user's and the candidates' entries would save. load: tokens in flight. last: 1 at the node
    that had the user last, 0 elsewhere. tokens: the whole prompt.
    """

    user: Float64
    items: Float64
    load: Float64
    running: Float64
    last: Float64
    tokens: float

    @property
    def reused(self) -> Float64:
        """A prompt begins with its user or with its items, so it reuses the larger of the two (BAT-10)."""
        return np.maximum(self.user, self.items)


class Term(Protocol):
    """A part of the score of each node, [n] float64; more is better."""

    def __call__(self, view: View) -> Float64: ...


@dataclass(frozen=True)
class UserEntries:
    """The share of the prompt that the user's own entry saves."""

    weight: float = 1.0

    def __call__(self, view: View) -> Float64:
        return self.weight / view.tokens * view.user


@dataclass(frozen=True)
class ItemEntries:
    """The share of the prompt that the candidates' entries save beyond what the user's would."""

    weight: float = 1.0

    def __call__(self, view: View) -> Float64:
        return self.weight / view.tokens * np.maximum(0.0, view.items - view.user)


@dataclass(frozen=True)
class Load:
    """How many requests like this one a node has in flight more than the mean node, over that mean, or over one where
    the mean is less."""

    weight: float = 1.0

    def __call__(self, view: View) -> Float64:
        load = view.load / view.tokens
        mean = float(load.mean())
        return (mean - load) * (self.weight / max(1.0, mean))


@dataclass(frozen=True)
class Running:
    """The same of requests in flight, whatever they cost."""

    weight: float = 1.0

    def __call__(self, view: View) -> Float64:
        mean = float(view.running.mean())
        return (mean - view.running) * (self.weight / max(1.0, mean))


@dataclass(frozen=True)
class Affinity:
    """The node that had the user last: it may hold what no report says yet."""

    bonus: float = 0.05

    def __call__(self, view: View) -> Float64:
        return self.bonus * view.last


def terms_of(rule: Rule, load: float = 1.0, affinity: float = 0.05) -> tuple[Term, ...]:
    """The terms of a rule; empty where it has no score."""
    reuse = (UserEntries(), ItemEntries(), Affinity(affinity))
    by_rule: Mapping[Rule, tuple[Term, ...]] = {
        "joint": (*reuse, Load(load)),
        "hit": reuse,
        "load": (Load(),),
        "least": (Running(),),
    }
    return by_rule.get(rule, ())


class Router:
    """Ranks the nodes for each request. name: this router's own, by which nodes report what it has sent; no two routers
    of a fleet have the same. bits: of the nodes' digests, as a power of two. seed: of the rule `random`."""

    def __init__(
        self, name: str, rule: Rule = "joint", bits: int = 16, load: float = 1.0, affinity: float = 0.05, seed: int = 0
    ) -> None:
        self._name, self._rule, self._terms = name, rule, terms_of(rule, load, affinity)
        self._users, self._items = Digests(bits), Digests(bits)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._bookings = Bookings()
        self._others: Float64 = np.zeros(0)  # [slots] tokens in flight that other routers have sent
        self._ns: Float64 = np.zeros(0)  # [slots] ns a token
        self._last: OrderedDict[str, str] = OrderedDict()  # the node of each user, the longest ago first
        self._names: list[str] = []
        self._here = np.zeros(0, np.intp)  # the slots of those nodes
        self._hashes: Keys = np.zeros(0, np.uint64)
        self._turn = seed

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._names)

    def become(self, names: Iterable[str]) -> None:
        """These are the nodes now. What is known of those that stay is kept; what was sent to others is forgotten."""
        names = list(dict.fromkeys(names))
        for name in self._slots.keys() - set(names):
            self._leave(self._slots.pop(name))
        for name in names:
            if name not in self._slots:
                self._slots[name] = self._free.pop() if self._free else len(self._slots) + len(self._free)
        slots = max(self._slots.values(), default=-1) + 1
        self._bookings.grow(slots)
        more = (0, max(0, slots - len(self._others)))
        self._others, self._ns = np.pad(self._others, more), np.pad(self._ns, more)
        self._names = names
        self._here = np.array([self._slots[name] for name in names], np.intp)
        self._hashes = keys(names)

    def _leave(self, slot: int) -> None:
        self._bookings.forget(slot)
        self._users.clear(slot)
        self._items.clear(slot)
        self._others[slot] = self._ns[slot] = 0.0
        self._free.append(slot)

    def heard(self, name: str, report: Report) -> None:
        """A node has reported. Does nothing for one that is not there (any more). ValueError for one of another
        form."""
        slot = self._slots.get(name)
        if slot is None:
            return
        for table, filter in ((self._users, report.users), (self._items, report.items)):
            if filter:
                table.replace(slot, filter)
            else:
                table.clear(slot)
        self._ns[slot] = report.ns_per_token
        self._others[slot] = sum(work for sender, work in report.sent.items() if sender != self._name)

    def rank(self, ask: Ask, now_ns: int) -> list[str]:
        """The nodes, the best first; empty where there is none."""
        if not self._names:
            return []
        self._bookings.expire(now_ns)
        self._turn += 1
        if self._rule == "hash":
            order = self._by_hash(ask)
        elif self._terms:
            order = self._by_score(ask)
        else:
            order = self._by_turn()
        return [self._names[at] for at in order]

    def sent(self, ask: Ask, name: str, now_ns: int) -> None:
        """The request is on its way to that node."""
        slot = self._slots.get(name)
        if slot is None:
            return
        view = self._view(ask)
        at = self._names.index(name)
        self._bookings.book(ask.id, slot, max(1.0, ask.tokens - float(view.reused[at])), now_ns)
        if ask.user:
            self._last[ask.user] = name
            self._last.move_to_end(ask.user)
            if len(self._last) > REMEMBERED_USERS:
                self._last.popitem(last=False)

    def ended(self, request_id: str, name: str | None = None) -> None:
        """An attempt has ended, at that node where one is named: well, refused, or lost."""
        slot = None if name is None else self._slots.get(name, -1)
        self._bookings.end(request_id, slot)

    def _view(self, ask: Ask) -> View:
        slots = len(self._others)
        user = np.zeros(slots)
        last = np.zeros(len(self._names))
        if ask.user:
            user = ask.user_tokens * self._users.held(keys([ask.user]), slots)[0]
            before = self._last.get(ask.user)
            if before in self._slots:
                last[self._names.index(before)] = 1.0
        here = self._here
        load = self._bookings.work + self._others
        return View(user[here], self._item_tokens(ask, slots)[here], load[here], self._bookings.running[here], last, ask.tokens)

    def _item_tokens(self, ask: Ask, slots: int) -> Float64:
        if not ask.items:
            return np.zeros(slots)
        held: Bool = self._items.held(keys(ask.items), slots)
        return ask.item_tokens * np.count_nonzero(held, axis=0)

    def _by_score(self, ask: Ask) -> list[int]:
        view = self._view(ask)
        score = np.zeros(len(self._names))
        for term in self._terms:
            score += term(view)
        if ask.left_ns is not None and self._rule == "joint":
            end_ns = (view.load + view.tokens - view.reused) * self._ns[self._here]
            score -= LATE * (end_ns > ask.left_ns)
        # Equal nodes take turns.
        count = len(self._names)
        turns = (np.arange(count) - self._turn) % count
        order: list[int] = np.lexsort((turns, -score)).tolist()
        return order

    def _by_hash(self, ask: Ask) -> list[int]:
        """The nodes by a hash of user and node, so that few users move where a node comes or goes; those that have their
        bound come last."""
        of = keys([ask.user or ask.id])
        mixed = (of ^ self._hashes) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
        running = self._bookings.running[self._here]
        full = running + 1 > np.ceil(BOUND * (running.sum() + 1) / len(running))
        order: list[int] = np.lexsort((mixed * np.uint64(0x9E3779B97F4A7C15), full)).tolist()
        return order

    def _by_turn(self) -> list[int]:
        count = len(self._names)
        first = self._turn if self._rule == "round_robin" else _mix(self._turn)
        return [(first + step) % count for step in range(count)]


def _mix(number: int) -> int:
    """A number that looks drawn (splitmix64)."""
    number = (number * 0x9E3779B97F4A7C15) & (2**64 - 1)
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return number ^ (number >> 31)
