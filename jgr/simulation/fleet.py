# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: the live routers, nodes with caches and a queue, reports that come late.

The routers are the objects that a live fleet uses (SIM-7), and they are told what they would be told: `heard` some time
after a node has reported, `ended` when the answer or the refusal is back. What stands for the world is a node: it runs
one request after another, for a fixed time and a time for each token that it computes, and keeps the users and the
items that it computed; the least recently used ones go first. It refuses what it could not answer in time, and the
router then asks another one, as it does where a node is lost; what a node accepted and cannot answer in time after all
expires. Each request is sent by one of the routers, by chance.

All times are ns of virtual time. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jgr.cache.entries import Name
from jgr.cache.hotness import ExponentialWindow
from jgr.serving.policies.bookings import Work
from jgr.serving.policies.digests import digest
from jgr.serving.policies.prefix_choice import Situation, choose
from jgr.serving.policies.routing import Ask, Report, Router
from jgr.traffic.candidates import CandidateDraw, zipf

MS, SECOND = 1_000_000, 1_000_000_000
ATTEMPTS = 2
"""So many nodes are asked before a request is refused."""
WINDOW_NS = 300 * SECOND
"""The window of how often a user comes."""


@dataclass(frozen=True)
class World:
    """Nodes and their traffic. Popularity follows Zipf laws, lengths of users are lognormal.

    user_room, item_room: tokens that a node keeps of users and of items. fixed_ns, token_ns: what a request takes, and
    each computed token. left_ns: every request's time until its deadline. way_ns: between router and node. late_ns:
    between a node's report and its arrival.
    """

    nodes: int = 8
    users: int = 6000
    user_exponent: float = 0.8
    user_tokens: float = 1500.0
    items: int = 10_000
    item_exponent: float = 0.9
    candidates: int = 50
    item_tokens: int = 16
    other_tokens: int = 32
    user_room: int = 600_000
    item_room: int = 32_000
    fixed_ns: int = 4 * MS
    token_ns: int = 20_000
    left_ns: int = 500 * MS
    way_ns: int = MS // 2
    late_ns: int = 50 * MS

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"node-{number}" for number in range(self.nodes)]


class Arrival(NamedTuple):
    """A request as it comes. way: which router has it, by chance, in [0, 1)."""

    at_ns: int
    ask: Ask
    way: float


@dataclass
class Outcomes:
    """What came of the requests that came after the warm-up. Every answer is in time; latencies are in ns.

    computed, prompt: tokens of the answers. work: by node, in token ns: the integral of the work that the routers
    believed to be in flight there.
    """

    arrived: int = 0
    answered: int = 0
    refused: int = 0
    expired: int = 0
    attempts: int = 0
    computed: int = 0
    prompt: int = 0
    busy_ns: int = 0
    latency_ns: list[int] = field(default_factory=list)
    work: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """The share of the answers' tokens that was not computed."""
        return 1 - self.computed / max(1, self.prompt)

    @property
    def tokens(self) -> float:
        """Computed tokens an answer."""
        return self.computed / max(1, self.answered)

    @property
    def goodput(self) -> float:
        """The share of the requests that was answered in time."""
        return self.answered / max(1, self.arrived)

    @property
    def imbalance(self) -> float:
        """The largest over the mean of the nodes' time-averaged predicted work in flight."""
        work = self.work.values()
        return max(work) / max(1.0, sum(work) / len(work))

    def quantile_ms(self, q: float) -> float:
        """A quantile of the answers' latency."""
        return float(np.quantile(self.latency_ns, q)) / MS if self.latency_ns else 0.0


def traffic(world: World, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process of `rate` requests a second."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * seconds)
    at_ns = np.sort(rng.random(count)) * seconds * SECOND
    lengths = np.random.default_rng(seed + 1).lognormal(-0.18, 0.6, world.users) * world.user_tokens
    users = rng.choice(world.users, count, p=zipf(world.users, world.user_exponent))
    rows = CandidateDraw(zipf(world.items, world.item_exponent), world.candidates).draw(count, rng)
    ways = rng.random(count)
    items = [f"item:{row}" for row in range(world.items)]
    return [
        Arrival(
            int(at_ns[n]),
            Ask(
                f"{seed}-{n}",
                f"user:{users[n]}",
                1 + int(lengths[users[n]]),
                tuple(map(items.__getitem__, rows[n].tolist())),
                world.item_tokens,
                world.other_tokens,
                world.left_ns,
            ),
            float(ways[n]),
        )
        for n in range(count)
    ]


class Kept:
    """Entries of so many tokens in all; the least recently used ones go first."""

    def __init__(self, room: int) -> None:
        self._room, self._used = room, 0
        self.tokens: OrderedDict[str, int] = OrderedDict()

    def keep(self, name: str, tokens: int) -> None:
        self._used += tokens - self.tokens.get(name, 0)
        self.tokens[name] = tokens
        self.tokens.move_to_end(name)
        while self._used > self._room:
            self._used -= self.tokens.popitem(last=False)[1]


class _Sent(NamedTuple):
    """An attempt. work: tokens that its router expects the node to compute."""

    ask: Ask
    router: int
    node: str
    arrival_ns: int
    sent_ns: int
    due_ns: int
    work: int


class _Node:
    def __init__(self, world: World) -> None:
        self._world = world
        self.users, self.items = Kept(world.user_room), Kept(world.item_room)
        self._hotness = ExponentialWindow(WINDOW_NS, world.users)
        self._queue: deque[tuple[_Sent, int]] = deque()  # with the time that each should take
        self._queued_ns = 0  # the sum of these times
        self.running: _Sent | None = None
        self._end_ns = 0  # of what runs
        self._ns, self._tokens = 0.0, 0.0  # of past requests
        self._work = Work()

    def accepts(self, sent: _Sent, now_ns: int) -> bool:
        """Whether it should be done in time; it is in the queue then."""
        need_ns = self._need_ns(self._plan(sent.ask, now_ns)[0])
        if max(self._end_ns, now_ns) + self._queued_ns + need_ns > sent.due_ns:
            return False
        self._queue.append((sent, need_ns))
        self._queued_ns += need_ns
        self._hotness.touch(Name("user", sent.ask.user, "user"), now_ns)
        self._work.begin(str(sent.router), sent.work, now_ns)
        return True

    def begin(self, now_ns: int) -> tuple[list[_Sent], int, int]:
        """Run the next request: (those before it that cannot be in time any more, the tokens that it computes, when it
        ends). Nothing runs where nothing is left."""
        expired: list[_Sent] = []
        while self._queue:
            sent, need_ns = self._queue.popleft()
            self._queued_ns -= need_ns
            computed, layout = self._plan(sent.ask, now_ns)
            took_ns = self._need_ns(computed)
            if now_ns + took_ns > sent.due_ns:
                self._work.end(str(sent.router), sent.work, now_ns)
                expired.append(sent)
                continue
            if layout == "user_prefix":
                self.users.keep(sent.ask.user, int(sent.ask.user_tokens))
            else:
                for item in sent.ask.items:
                    self.items.keep(item, int(sent.ask.item_tokens))
            self._ns, self._tokens = self._ns + took_ns, self._tokens + computed
            self.running, self._end_ns = sent, now_ns + took_ns
            return expired, computed, self._end_ns
        return expired, 0, now_ns

    def end(self, now_ns: int) -> _Sent:
        """What runs has ended."""
        sent, self.running = self.running, None
        assert sent is not None
        self._work.end(str(sent.router), sent.work, now_ns)
        return sent

    def lost(self) -> list[_Sent]:
        """What it had accepted and not answered."""
        return [sent for sent in (self.running, *(sent for sent, _ in self._queue)) if sent is not None]

    def report(self, bits: int, now_ns: int) -> Report:
        users, items = digest(self.users.tokens, bits), digest(self.items.tokens, bits)
        return Report(users, items, self._ns / max(1.0, self._tokens), self._work.mean(now_ns))

    def _plan(self, ask: Ask, now_ns: int) -> tuple[int, str]:
        """The tokens that are computed, and which of user and items stands first."""
        kept = self.items.tokens
        user, items = int(ask.user_tokens), int(ask.item_tokens) * len(ask.items)
        cached_user = user if ask.user in self.users.tokens else 0
        cached_items = int(ask.item_tokens) * sum(item in kept for item in ask.items)
        often = self._hotness.frequency(Name("user", ask.user, "user"), now_ns)
        layout = choose("hotness", Situation(user, items, cached_user, cached_items, frequency=often))
        reused = cached_user if layout == "user_prefix" else cached_items
        return int(ask.tokens) - reused, layout

    def _need_ns(self, computed: int) -> int:
        return self._world.fixed_ns + self._world.token_ns * computed


class Loss(NamedTuple):
    """A node is lost with all that it has. told_ns: when the routers know. back_ns: when another one, which keeps
    nothing yet, stands in its place."""

    node: str
    at_ns: int
    told_ns: int
    back_ns: int


class Fleet:
    """One run; see `simulate`."""

    def __init__(
        self, world: World, routers: Sequence[Router], period_ns: int, warm_ns: int, seed: int, bits: int
    ) -> None:
        self.world, self.routers, self.warm_ns, self._bits = world, routers, warm_ns, bits
        self._period_ns = period_ns
        self.out = Outcomes()
        self._nodes: dict[str, _Node] = {}
        self._events: list[tuple[int, int, Any, tuple[Any, ...]]] = []
        self._count = itertools.count()
        phases = np.random.default_rng(seed).random(world.nodes)
        for name, phase in zip(world.names, phases, strict=True):
            self._join(round(float(phase) * period_ns), name)
        self._tell(0)

    def run(self, arrivals: Sequence[Arrival], losses: Sequence[Loss]) -> Outcomes:
        for arrival in arrivals:
            self._at(arrival.at_ns, self._arrive, arrival)
        for loss in losses:
            self._at(loss.at_ns, self._lose, loss)
        end_ns = arrivals[-1].at_ns if arrivals else 0
        while self._events:
            now_ns, _, act, given = heapq.heappop(self._events)
            if act != self._report or now_ns <= end_ns:
                act(now_ns, *given)
        return self.out

    def _at(self, at_ns: int, act: Any, *given: Any) -> None:
        heapq.heappush(self._events, (at_ns, next(self._count), act, given))

    def _arrive(self, now_ns: int, arrival: Arrival) -> None:
        self.out.arrived += arrival.at_ns >= self.warm_ns
        self._send(now_ns, arrival.ask, int(arrival.way * len(self.routers)), now_ns)

    def _send(self, now_ns: int, ask: Ask, number: int, arrival_ns: int) -> None:
        router = self.routers[number]
        due_ns = arrival_ns + self.world.left_ns - self.world.way_ns
        name = router.rank(replace(ask, left_ns=due_ns - self.world.way_ns - now_ns), now_ns)[0]
        work = router.sent(ask, name, now_ns)
        sent = _Sent(ask, number, name, arrival_ns, now_ns, due_ns, work)
        self.out.attempts += arrival_ns >= self.warm_ns
        self._at(now_ns + self.world.way_ns, self._reach, sent)

    def _reach(self, now_ns: int, sent: _Sent) -> None:
        node = self._nodes.get(sent.node)
        if node is None or not node.accepts(sent, now_ns):
            self._at(now_ns + self.world.way_ns, self._refused, sent)
        elif node.running is None:
            self._begin(now_ns, sent.node)

    def _begin(self, now_ns: int, name: str) -> None:
        node = self._nodes[name]
        expired, computed, end_ns = node.begin(now_ns)
        for sent in expired:
            self._at(now_ns + self.world.way_ns, self._expired, sent)
        if node.running is not None:
            self.out.busy_ns += end_ns - now_ns
            self._at(end_ns, self._end, name, computed)

    def _end(self, now_ns: int, name: str, computed: int) -> None:
        if name in self._nodes:
            self._at(now_ns + self.world.way_ns, self._answered, self._nodes[name].end(now_ns), computed)
            self._begin(now_ns, name)

    def _answered(self, now_ns: int, sent: _Sent, computed: int) -> None:
        self._over(now_ns, sent)
        if sent.arrival_ns >= self.warm_ns:
            self.out.answered += 1
            self.out.latency_ns.append(now_ns - sent.arrival_ns)
            self.out.computed += computed
            self.out.prompt += int(sent.ask.tokens)

    def _expired(self, now_ns: int, sent: _Sent) -> None:
        self._over(now_ns, sent)
        self.out.expired += sent.arrival_ns >= self.warm_ns

    def _refused(self, now_ns: int, sent: _Sent) -> None:
        self._over(now_ns, sent)
        tried = (*sent.ask.tried, sent.node)
        if len(tried) < min(ATTEMPTS, self.world.nodes):
            self._send(now_ns, replace(sent.ask, tried=tried), sent.router, sent.arrival_ns)
        else:
            self.out.refused += sent.arrival_ns >= self.warm_ns

    def _over(self, now_ns: int, sent: _Sent) -> None:
        """The attempt has ended, as far as its router knows."""
        self.routers[sent.router].ended(sent.ask.id, sent.node)
        self.out.work[sent.node] += sent.work * max(0, now_ns - max(sent.sent_ns, self.warm_ns))

    def _join(self, report_ns: int, name: str) -> None:
        self._nodes[name] = _Node(self.world)
        self.out.work.setdefault(name, 0)
        self._at(report_ns, self._report, name)

    def _lose(self, now_ns: int, loss: Loss) -> None:
        node = self._nodes.pop(loss.node)
        for sent in node.lost():
            self._at(now_ns + self.world.way_ns, self._refused, sent)
        self._at(loss.told_ns, self._tell)
        self._at(loss.back_ns, self._back, f"{loss.node}'")

    def _back(self, now_ns: int, name: str) -> None:
        self._join(now_ns, name)
        self._tell(now_ns)

    def _tell(self, now_ns: int) -> None:
        for router in self.routers:
            router.become(self._nodes)

    def _report(self, now_ns: int, name: str) -> None:
        if name in self._nodes:
            report = self._nodes[name].report(self._bits, now_ns)
            self._at(now_ns + self.world.late_ns, self._heard, name, report)
            self._at(now_ns + self._period_ns, self._report, name)

    def _heard(self, now_ns: int, name: str, report: Report) -> None:
        for router in self.routers:
            router.heard(name, report)


def simulate(
    world: World,
    routers: Sequence[Router],
    arrivals: Sequence[Arrival],
    period_ns: int,
    warm_ns: int = 0,
    seed: int = 0,
    bits: int = 16,
    losses: Sequence[Loss] = (),
) -> Outcomes:
    """Serve the arrivals, in order of time. routers: new ones, named "0", "1", ...; their digests have 2^bits bits.
    period_ns: between two reports of a node, whose phases are drawn. warm_ns: requests before that time do not count.
    losses: of nodes that are there then.
    """
    return Fleet(world, routers, period_ns, warm_ns, seed, bits).run(arrivals, losses)


def capacity(world: World, seconds: float, seed: int = 0) -> float:
    """Requests a second that the nodes can do where they are sent round: from their mean time for one, caches warm."""
    calm = replace(world, left_ns=1 << 62)
    mean_ns = world.fixed_ns + world.token_ns * (world.user_tokens + world.candidates * world.item_tokens) / 2
    arrivals = traffic(calm, 0.5 * world.nodes * SECOND / mean_ns, seconds, seed)
    warm = arrivals[: len(arrivals) // 2]
    runs = [simulate(calm, [Router("0", "round_robin")], part, 1 << 62) for part in (warm, arrivals)]
    return world.nodes * SECOND * (len(arrivals) - len(warm)) / (runs[1].busy_ns - runs[0].busy_ns)
