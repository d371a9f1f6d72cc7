# SPDX-License-Identifier: Apache-2.0
"""A router against a model of dictionaries and sets, whatever happens to it and in whatever order.

The model knows nodes by name alone: it has no slots, no arrays and no sums that are kept. Every view, and the order of
every ranking, must be what it computes anew.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jgr.serving.policies.bookings import LOST_NS, MEMORY
from jgr.serving.policies.digests import digest
from jgr.serving.policies.routing import REPORTED_NS, SILENT_NS, SLOW, TRUST, Ask, Report, Router
from jgr.serving.policies.routing_terms import AFFINITY, BELIEF, FEW, LATE, LOAD, SHARE, Rule

BITS = 10
NODES = [f"node-{number}" for number in range(11)]
"""More than a byte of bits."""
USERS = ["", *(f"user:{number}" for number in range(6))]
ITEMS = [f"item:{number}" for number in range(12)]
TOKENS = st.integers(0, 500)


def places(name: str) -> set[int]:
    key = crc32(name.encode()) * 0x9E3779B97F4A7C15 % 2**64
    return {key >> 64 - BITS, (key >> 64 - 2 * BITS) % 2**BITS}


def held(name: str, names: set[str]) -> bool:
    """Whether a filter of these names seems to hold the name."""
    return places(name) <= {place for other in names for place in places(other)}


@dataclass
class Node:
    users: set[str] = field(default_factory=set)
    items: set[str] = field(default_factory=set)
    others: float = 0.0
    heard_ns: int = 0
    ns: float = 0.0
    recent: float = 0.0


class Model(RuleBasedStateMachine):
    kind: Rule = "joint"

    def __init__(self) -> None:
        super().__init__()
        self.router = Router("me", self.kind, BITS)
        self.nodes: dict[str, Node] = {}
        self.booked: dict[str, tuple[str, int, int]] = {}
        self.last: dict[str, tuple[str, int]] = {}
        self.now_ns, self.swept_ns, self.count = 10**15, 10**15, 0
        self.router.rank(Ask("first", "", 0, (), 0, 0), self.now_ns)  # the clock begins

    @initialize(names=st.sets(st.sampled_from(NODES), min_size=2))
    def begin(self, names: set[str]) -> None:
        self.become(names)

    @rule(names=st.sets(st.sampled_from(NODES)))
    def become(self, names: set[str]) -> None:
        self.router.become(sorted(names))
        self.nodes = {name: self.nodes.get(name, Node()) for name in names}
        self.booked = {id: booking for id, booking in self.booked.items() if booking[0] in names}
        self.last = {user: last for user, last in self.last.items() if last[0] in names}

    @rule(
        name=st.sampled_from(NODES),
        users=st.sets(st.sampled_from(USERS[1:])),
        items=st.sets(st.sampled_from(ITEMS)),
        ns=st.sampled_from([0.0, 10.0, 12.0, 300.0]),
        mine=TOKENS,
        theirs=st.lists(TOKENS, max_size=2),
    )
    def hear(
        self, name: str, users: set[str], items: set[str], ns: float, mine: int, theirs: list[int]
    ) -> None:
        sent = {"me": float(mine)} | {f"other-{at}": float(work) for at, work in enumerate(theirs)}
        self.router.heard(name, Report(digest(users, BITS), digest(items, BITS), ns, sent))
        if name in self.nodes:
            recent = self.nodes[name].recent
            self.nodes[name] = Node(users, items, sum(theirs), self.now_ns, ns, recent)

    @rule(
        user=st.sampled_from(USERS),
        items=st.lists(st.sampled_from(ITEMS), unique=True),
        sizes=st.tuples(TOKENS, TOKENS, TOKENS),
        left_ns=st.none() | st.integers(1, 10_000),
        passed_ns=st.sampled_from([0, 1, 10**9, LOST_NS // 3]),
        place=st.none() | st.integers(0, 2),
        again=st.booleans(),
    )
    def ask(
        self,
        user: str,
        items: list[str],
        sizes: tuple[int, int, int],
        left_ns: int | None,
        passed_ns: int,
        place: int | None,
        again: bool,
    ) -> None:
        self.now_ns += passed_ns
        self.count += not (again and self.booked)
        request_id = min(self.booked) if again and self.booked else str(self.count)
        ask = Ask(request_id, user, sizes[0], tuple(items), sizes[1], sizes[2], left_ns)
        ranked = self.router.rank(ask, self.now_ns)
        self.pass_time()
        self.compare(ask)
        assert sorted(ranked) == sorted(self.nodes)
        scores = self.scores(ask)
        for better, worse in pairwise(ranked):
            assert scores[better] > scores[worse] - 1e-6
        if place is not None and ranked:
            self.send(ask, ranked[place % len(ranked)])

    def send(self, ask: Ask, name: str) -> None:
        work = max(1, round(ask.tokens - self.reused(ask, name)))
        assert self.router.sent(ask, name, self.now_ns) == work
        self.booked.pop(ask.id, None)
        self.booked[ask.id] = (name, work, self.now_ns)
        for node in self.nodes.values():
            node.recent *= 1 - 1 / (MEMORY * len(self.nodes))
        self.nodes[name].recent += work
        if ask.user:
            self.last[ask.user] = name, self.now_ns

    @rule(number=st.integers(0, 30), name=st.none() | st.sampled_from(NODES))
    def end(self, number: int, name: str | None) -> None:
        self.router.ended(str(number), name)
        if str(number) in self.booked and name in (None, self.booked[str(number)][0]):
            del self.booked[str(number)]

    @rule()
    def send_to_nobody(self) -> None:
        assert self.router.sent(Ask("lost", "user:1", 1, (), 1, 1), "nobody", self.now_ns) == 0

    def pass_time(self) -> None:
        self.booked = {id: b for id, b in self.booked.items() if self.now_ns - b[2] < LOST_NS}
        if self.now_ns - self.swept_ns >= 10**9:
            self.swept_ns = self.now_ns
            for node in self.nodes.values():
                if self.now_ns - node.heard_ns >= SILENT_NS:
                    node.others = 0.0

    def reused(self, ask: Ask, name: str) -> float:
        node = self.nodes[name]
        user = ask.user_tokens if ask.user and held(ask.user, node.users) else 0
        return max(user, ask.item_tokens * sum(held(item, node.items) for item in ask.items))

    def load(self, name: str) -> float:
        mean = statistics.fmean(node.others for node in self.nodes.values())
        elsewhere = mean + TRUST * (self.nodes[name].others - mean)
        return elsewhere + sum(work for node, work, _ in self.booked.values() if node == name)

    def pace(self, name: str) -> float:
        known = [node.ns for node in self.nodes.values() if node.ns]
        if not known:
            return 1.0
        pace = self.nodes[name].ns / statistics.median(known)
        return pace if pace >= SLOW else 1.0

    def scores(self, ask: Ask) -> dict[str, float]:
        """The score of each node; of the rule `load`, less the time until it would have done everything."""
        ahead = {name: (self.load(name) + ask.tokens) * self.pace(name) for name in self.nodes}
        if self.kind == "load":
            return {name: -ahead[name] / sum(ahead.values()) for name in self.nodes}
        found = {}
        for name, node in self.nodes.items():
            mean = sum(ahead.values()) / len(ahead)
            sent = {
                other: (self.nodes[other].recent + FEW * ask.tokens) * self.pace(other)
                for other in self.nodes
            }
            end_ns = (self.load(name) + ask.tokens - self.reused(ask, name)) * node.ns
            found[name] = (
                self.reused(ask, name) / ask.tokens
                + self.affinity(ask, name)
                + LOAD * (1 - ahead[name] / mean)
                + SHARE * (1 - sent[name] / statistics.fmean(sent.values()))
                - LATE * (end_ns > (math.inf if ask.left_ns is None else ask.left_ns))
            )
        return found

    def expected(self, user: str) -> bool:
        name, sent_ns = self.last[user]
        return sent_ns + REPORTED_NS >= self.nodes[name].heard_ns

    def affinity(self, ask: Ask, name: str) -> float:
        if self.last.get(ask.user, ("",))[0] != name:
            return 0.0
        unreported = max(0.0, ask.user_tokens * self.expected(ask.user) - self.reused(ask, name))
        return AFFINITY + BELIEF * unreported / ask.tokens

    def compare(self, ask: Ask) -> None:
        if not self.nodes:
            return
        view = self.router.view(ask)
        names = self.router.nodes
        running = [sum(node == name for node, _, _ in self.booked.values()) for name in names]
        assert view.reused.tolist() == [self.reused(ask, name) for name in names]
        assert view.load.tolist() == pytest.approx([self.load(name) for name in names])
        assert view.running.tolist() == running
        np.testing.assert_allclose(view.recent, [self.nodes[name].recent for name in names])
        assert view.ns.tolist() == [self.nodes[name].ns for name in names]
        assert view.pace.tolist() == pytest.approx([self.pace(name) for name in names])
        if ask.user in self.last:
            assert view.last is not None and names[view.last] == self.last[ask.user][0]
            assert view.expected == ask.user_tokens * self.expected(ask.user)
        else:
            assert view.last is None and view.expected == 0

    @invariant()
    def audit(self) -> None:
        self.router.check()
        assert sorted(self.router.nodes) == sorted(self.nodes)


class Loaded(Model):
    kind: Rule = "load"


TestJoint = Model.TestCase
TestLoad = Loaded.TestCase
TestJoint.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestLoad.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
