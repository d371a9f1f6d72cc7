# SPDX-License-Identifier: Apache-2.0
"""Which node of a fleet answers a request (RCLLM-8, HLEM-13; BAT-13's least outstanding tokens).

The score of a node is a sum of terms: what its caches save of the prompt, less how much later than at the mean node the
request would end there. Both are shares, so that no term has a unit and no threshold fits one fleet alone. A node is
judged by its own load: one that is full loses what its cache is worth, and no other does.

What a node holds and what others have sent to it is known from its reports, which are seconds old; what this router
has sent is known from its own bookings. So a router that reports reach late, or never, still spreads its requests.

Pure: time is an argument, in ns. A router is of one process; others route beside it, and are seen in reports alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jgr.serving.policies.bookings import Bookings, without
from jgr.serving.policies.digests import Digests, Keys, keys, positions
from jgr.serving.policies.routing_terms import AFFINITY, LOAD, SHARE, Rule, View, terms_of

Float64 = npt.NDArray[np.float64]
REPORTED_NS = 1_000_000_000
"""So long after it was sent a request may be in no report yet."""
BOUND = 1.25
"""A node takes at most so many times the mean number of requests under the rule `hash`, rounded up."""
SLOW = 1.5
"""A node counts as slow from so many times the median time of a token on; by less, estimates differ themselves."""
REMEMBERED_USERS = 65_536
"""So many users' last nodes a router remembers."""
UNSENT = 1024
"""A router remembers what a ranked request would compute until it is sent; so many requests at most."""
TRUST = 0.25
"""So much of a difference between nodes counts where others have sent it. It is old when it is heard, and others act on
it too: routers that all go at once to where little was find the most there, and are elsewhere after the next report."""
SILENT_NS = 30 * 1_000_000_000
"""After so long without a report, what others have sent to a node is taken for done."""
_TIE = 1e-9  # smaller than any difference that is one


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as routing needs to know it. Tokens are estimates.

    user: the name of the user's cache entries, "" for nobody; items: names of the candidates; item_tokens: of each;
    other_tokens: those that no cache holds, and what a request costs besides. left_ns: until its deadline; None: it has
    none. tried: nodes that refused or failed it, which come last whatever the rule. both: nodes reuse user and items.
    shards: those of the embedding rows that the user's history reads most.
    """

    id: str
    user: str
    user_tokens: float
    items: Sequence[str]
    item_tokens: float
    other_tokens: float
    left_ns: int | None = None
    tried: Collection[str] = ()
    both: bool = False
    shards: Sequence[str] = ()

    @property
    def tokens(self) -> float:
        """Tokens of the whole prompt, at least 1."""
        return max(1.0, self.user_tokens + self.item_tokens * len(self.items) + self.other_tokens)


@dataclass(frozen=True)
class Report:
    """What a node says of itself. ValueError for numbers that are negative or not finite.

    users, items: see `digests.digest`; b"" where it holds none. ns_per_token: what a computed token takes, 0 where that
    is not known. sent: tokens in flight since the last report, in the mean, by the router that sent them, each request
    with what that router expects to be computed (`Router.expected`). shards: a
    digest of the shards of embedding rows that are on the device. rows_ns: what a request waits for its rows where none
    is, 0 where that is not known.
    """

    users: bytes = b""
    items: bytes = b""
    ns_per_token: float = 0.0
    sent: Mapping[str, float] = field(default_factory=dict)
    shards: bytes = b""
    rows_ns: float = 0.0

    def __post_init__(self) -> None:
        numbers = ("ns_per_token", self.ns_per_token), ("rows_ns", self.rows_ns)
        for name, value in (*numbers, *self.sent.items()):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: must be finite and not negative, got {value}")


class Router:
    """Ranks the nodes for each request.

    name: this router's own, by which nodes report what it has sent; no two routers of a fleet have the same. bits: of
    the nodes' digests, as a power of two. load, affinity, share: weights of the rule `joint`; load
    also of `matched` and `rcllm`.

    The nodes stand side by side in slots 0, 1, ...; the last one takes the place of one that leaves.
    """

    def __init__(
        self,
        name: str,
        rule: Rule = "joint",
        bits: int = 16,
        load: float = LOAD,
        affinity: float = AFFINITY,
        share: float = SHARE,
    ) -> None:
        self._name, self._rule, self._terms = name, rule, terms_of(rule, load, affinity, share)
        self._names: list[str] = []  # by slot
        self._slots: dict[str, int] = {}
        self._hashes: Keys = keys(())
        self._bits = bits
        self._users, self._items, self._shards = Digests(bits), Digests(bits), Digests(bits)
        self._bookings = Bookings()
        self._others: Float64 = np.zeros(0)  # [slots] tokens in flight that other routers have sent
        self._elsewhere: Float64 = np.zeros(0)  # [slots] what of it counts
        self._heard_ns: Float64 = np.zeros(0)  # [slots] when that was reported
        self._ns: Float64 = np.zeros(0)  # [slots] of a token
        self._pace: Float64 = np.zeros(0)  # [slots] see View
        self._rows_ns: Float64 = np.zeros(0)  # [slots]
        self._most_rows_ns = 0.0
        # Each user's node, and when it was sent there, the longest ago first.
        self._last: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._unsent: OrderedDict[str, Float64] = OrderedDict()  # [slots] tokens to compute, by request
        self._turn = int(keys([name])[0]) % 2**32  # so that routers do not go in step
        self._chance = np.random.Generator(np.random.SFC64(self._turn))  # draws the order of equal nodes
        self._now_ns = self._swept_ns = 0
        self.best_score = 0.0
        """What the first of the last ranking got; 0 under a rule without a score."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, in the order of their slots."""
        return tuple(self._names)

    def become(self, names: Iterable[str]) -> None:
        """Route to these nodes from now on. What is known of those that stay is kept; of others, nothing is
        remembered."""
        now = dict.fromkeys(names)
        gone = self._slots.keys() - now
        new = [name for name in now if name not in self._slots]
        if not gone and not new:
            return
        for name in sorted(gone):
            self._remove(name)
        for name in new:
            self._add(name)
        self._hashes = keys(self._names)
        self._compare()
        self._unsent.clear()
        if gone:
            self._last = OrderedDict(item for item in self._last.items() if item[1][0] not in gone)

    def heard(self, name: str, report: Report) -> None:
        """A node has reported. Does nothing for one that is not there (any more). ValueError for a digest of another
        size."""
        slot = self._slots.get(name)
        if slot is None:
            return
        users, items = self._users.parse(report.users), self._items.parse(report.items)
        shards = self._shards.parse(report.shards)
        self._users.replace(slot, users)
        self._items.replace(slot, items)
        self._shards.replace(slot, shards)
        self._rows_ns[slot] = report.rows_ns
        self._others[slot] = sum(work for sender, work in report.sent.items() if sender != self._name)
        self._heard_ns[slot] = self._now_ns
        self._ns[slot] = report.ns_per_token
        self._compare()

    def rank(self, ask: Ask, now_ns: int) -> list[str]:
        """The nodes, the best first; empty where there is none."""
        self._forget(now_ns)
        if not self._names:
            return []
        self._turn += 1
        if self._terms:
            order = self._by_score(ask)
        elif self._rule == "hash":
            order = self._by_hash(ask)
        elif self._rule == "random":
            order = self._chance.permutation(len(self._names)).tolist()
        else:
            count = len(self._names)
            order = [(self._turn + step) % count for step in range(count)]
        ranked = list(map(self._names.__getitem__, order))
        return sorted(ranked, key=ask.tried.__contains__) if ask.tried else ranked

    def expected(self, ask: Ask, names: Iterable[str]) -> dict[str, int]:
        """The tokens that each of these nodes should compute of the request, at least 1, as they are booked; of the
        nodes that are there."""
        computed = self._unsent.get(ask.id)
        if computed is None:
            computed = self.view(ask).computed
        slots = {name: self._slots[name] for name in names if name in self._slots}
        return {name: max(1, round(float(computed[slot]))) for name, slot in slots.items()}

    def sent(self, ask: Ask, name: str, now_ns: int, work: int | None = None) -> int:
        """The request is on its way to that node: the tokens that it should compute there, 0 where the node is not
        there (any more). work: these tokens, where the node was told; None: what is expected now."""
        slot = self._slots.get(name)
        if slot is None:
            return 0
        self._forget(now_ns)
        if work is None:
            work = self.expected(ask, [name])[name]
        self._unsent.pop(ask.id, None)
        self._bookings.book(ask.id, slot, work, now_ns)
        if ask.user:
            self._last[ask.user] = name, now_ns
            self._last.move_to_end(ask.user)
            if len(self._last) > REMEMBERED_USERS:
                self._last.popitem(last=False)
        return work

    def ended(self, request_id: str, name: str | None = None) -> None:
        """An attempt has ended, at that node where one is named: well, refused, or lost."""
        if name is None:
            self._bookings.end(request_id)
        elif name in self._slots:
            self._bookings.end(request_id, self._slots[name])

    def booked(self, request_id: str) -> str | None:
        """The node where a request is that has not ended; None: it has, or was not sent."""
        slot = self._bookings.slot(request_id)
        return None if slot is None else self._names[slot]

    def in_flight(self, name: str) -> float:
        """Tokens that this router has sent to a node and that have not ended; 0 where it is not there (any more)."""
        slot = self._slots.get(name)
        return 0.0 if slot is None else float(self._bookings.work[slot])

    def busy_ns(self, name: str) -> float:
        """How long a node needs for what is in flight there, by its reports; 0 where that is not known."""
        slot = self._slots.get(name)
        if slot is None:
            return 0.0
        return float((self._bookings.work[slot] + self._elsewhere[slot]) * self._ns[slot])

    def view(self, ask: Ask) -> View:
        """What is known of the request and of `nodes`, in their order."""
        first, second = positions(keys((ask.user, *ask.items)), self._bits)  # once, for both kinds of filters
        held = self._items.count_at(first[1:], second[1:])
        items = held * ask.item_tokens
        user: Float64 = np.zeros(len(self._names))
        last, expected = None, 0.0
        if ask.user:
            user = self._users.holds_at(first, second) * ask.user_tokens
            if ask.user in self._last:
                name, sent_ns = self._last[ask.user]
                last = self._slots[name]
                if sent_ns + REPORTED_NS >= self._heard_ns[last]:
                    expected = float(ask.user_tokens)
        return View(
            user,
            user + items if ask.both else np.maximum(user, items),  # BAT-10: what comes first
            held / max(1, len(ask.items)),
            self._bookings.work + self._elsewhere,
            self._bookings.running,
            self._bookings.recent,
            self._pace,
            self._ns,
            last,
            expected,
            ask.tokens,
            math.inf if ask.left_ns is None else ask.left_ns,
            self._shards.count(keys(ask.shards)) / len(ask.shards) if ask.shards else None,
            self._most_rows_ns,
        )

    def check(self) -> None:
        """Audit; AssertionError."""
        slots = len(self._names)
        assert {name: slot for slot, name in enumerate(self._names)} == self._slots, "names and slots differ"
        arrays = (
            self._hashes,
            self._others,
            self._elsewhere,
            self._heard_ns,
            self._ns,
            self._pace,
            self._rows_ns,
            self._bookings.work,
        )
        assert [len(array) for array in arrays] == [slots] * len(arrays), (
            "there are not as many slots as nodes"
        )
        filters = self._users, self._items, self._shards
        assert [len(each) for each in filters] == [slots] * 3, "there are not as many filters as nodes"
        assert len(self._last) <= REMEMBERED_USERS and len(self._unsent) <= UNSENT, "too much is remembered"
        assert {name for name, _ in self._last.values()} <= self._slots.keys(), (
            "a node that has left is remembered"
        )
        self._bookings.check()
        for each in filters:
            each.check()

    def _add(self, name: str) -> None:
        self._slots[name] = len(self._names)
        self._names.append(name)
        for each in (self._bookings, self._users, self._items, self._shards):
            each.add()
        self._rows_ns = np.append(self._rows_ns, 0.0)
        self._others, self._ns = np.append(self._others, 0.0), np.append(self._ns, 0.0)
        self._heard_ns = np.append(self._heard_ns, 0.0)

    def _remove(self, name: str) -> None:
        slot, last = self._slots.pop(name), self._names.pop()
        if last != name:
            self._names[slot], self._slots[last] = last, slot
        for each in (self._bookings, self._users, self._items, self._shards):
            each.remove(slot)
        self._rows_ns = without(self._rows_ns, slot)
        self._others, self._ns = without(self._others, slot), without(self._ns, slot)
        self._heard_ns = without(self._heard_ns, slot)

    def _compare(self) -> None:
        """What depends on the reports of all nodes."""
        mean = self._others.mean() if len(self._others) else 0.0
        self._elsewhere = mean + TRUST * (self._others - mean)
        known = self._ns[self._ns > 0]
        self._pace = self._ns / (np.median(known) if len(known) else 1.0)
        self._pace[self._pace < SLOW] = 1.0
        self._most_rows_ns = float(self._rows_ns.max(initial=0.0))

    def _forget(self, now_ns: int) -> None:
        if not self._now_ns:
            self._heard_ns[:] = now_ns  # the clock begins: reports bring no time of their own
        self._now_ns = max(self._now_ns, now_ns)
        self._bookings.expire(now_ns)
        if now_ns - self._swept_ns >= 1_000_000_000:
            self._swept_ns = now_ns
            silent = now_ns - self._heard_ns >= SILENT_NS
            if self._others[silent].any():
                self._others[silent] = 0.0
                self._compare()

    def _by_score(self, ask: Ask) -> list[int]:
        view = self.view(ask)
        self._unsent[ask.id] = view.computed
        if len(self._unsent) > UNSENT:
            self._unsent.popitem(last=False)
        # Of equal nodes, each has the same chance.
        cost = self._chance.random(len(self._names))
        cost *= _TIE
        for term in self._terms:
            cost -= term(view)
        order: list[int] = cost.argsort().tolist()
        best = order[0]
        if ask.tried:
            best = next((slot for slot in order if self._names[slot] not in ask.tried), best)
        self.best_score = -float(cost[best])
        return order

    def _by_hash(self, ask: Ask) -> list[int]:
        """The nodes by a hash of user and node, so that few users move where a node comes or goes; those that have
        their bound come last."""
        mixed = (self._hashes ^ keys([ask.user or ask.id])) * np.uint64(0xD6E8FEB86659FD93)  # looks drawn
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        running = self._bookings.running
        full = running + 1 > np.ceil(BOUND * (running.sum() + 1) / len(running))
        order: list[int] = np.lexsort((mixed, full)).tolist()
        return order
