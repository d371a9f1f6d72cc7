# SPDX-License-Identifier: Apache-2.0
"""The terms of a node's score (RCLLM-8, HLEM-13): each says what one thing is worth, as a share of the prompt or of
the mean node's load, so that none has a unit. A rule says which of them count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Rule = Literal["joint", "hit", "load", "least", "round_robin", "random", "hash", "matched", "rcllm", "hlem"]
"""joint: reuse, load, affinity and lateness; hit: reuse and affinity alone; load: tokens in flight alone; least:
requests in flight alone; hash: the user's node by a rendezvous hash, unless it has too many requests; matched, rcllm:
candidates held and load, in the two forms of `Matched`; hlem: users, embedding rows and load by what they cost
(`Residency`)."""
RULES: tuple[Rule, ...] = get_args(Rule)

LOAD = 0.7
"""The weight of load: so much of a prompt saved is worth ending later by as much of the mean node's time."""
SHARE = 0.2
FEW = 2
"""As if each node had been sent so many requests like this one before, since the first ones say little of its share."""
AFFINITY = 0.05
BELIEF = 0.7
"""How likely a user who was sent to a node is kept there until a report tells."""
LATE = 1e6
"""What a node's score lacks that would be late: more than any sum of other terms."""
SLO_NS = 1_000_000_000
"""Under the rules `rcllm` and `hlem` a node is full with the work of so long."""
FEWER = 1e-6
"""What the node with the most tokens in flight lacks under the rule `rcllm`: more than chance adds, and less than any
share of candidates or load that counts."""
FULL = 0.85
"""Under the rule `hlem` the node with the least load is taken where the best one has more than so much."""
USER_OVER_ROWS = 12.5
"""What a user who is not kept costs over rows that are not on the device, where no report tells: HLEM's on A100."""


class View(NamedTuple):
    """What the terms see of a request and the n nodes; arrays are [n] float64.

    user: tokens of the user that a node holds; reused: tokens that it would not compute; matched: the share of the
    candidates that it holds, 0 where there are none. load: tokens in flight; running: requests in flight; recent:
    tokens sent of late, in flight or not. pace: times the median time of a token, 1 where it is near it; ns: of a
    token, 0 where that is not known. last: where the user was last; expected: tokens of the user that should be kept
    there, 0 where a report must have told. tokens: of the whole prompt. left_ns: until the deadline, or inf. rows: the
    share of the shards of embedding rows of the user's profile that a node holds; None: there is no profile. rows_ns:
    what it costs that none of them is held, 0 where that is not known.
    """

    user: Float64
    reused: Float64
    matched: Float64
    load: Float64
    running: Float64
    recent: Float64
    pace: Float64
    ns: Float64
    last: int | None
    expected: float
    tokens: float
    left_ns: float
    rows: Float64 | None = None
    rows_ns: float = 0.0

    @property
    def computed(self) -> Float64:
        """Tokens that each node would compute."""
        return self.tokens - self.reused


def _below_mean(work: Float64, pace: Float64, weight: float) -> Float64:
    """How much less time than the mean node each node needs for its work, a share of that mean times the weight."""
    score = work * pace
    score *= -weight * len(work) / float(work.dot(pace))
    score += weight
    return score


class Term(Protocol):
    """A part of the score of each node, [n] float64, an array of its own; more is better."""

    def __call__(self, view: View) -> Float64: ...


@dataclass(frozen=True)
class Reuse:
    """The share of the prompt that a node would not compute."""

    weight: float = 1.0

    def __call__(self, view: View) -> Float64:
        return view.reused * (self.weight / view.tokens)


@dataclass(frozen=True)
class Load:
    """How much earlier than at the mean node the request would end, if none held any of it: a share of that time."""

    weight: float = LOAD

    def __call__(self, view: View) -> Float64:
        return _below_mean(view.load + view.tokens, view.pace, self.weight)


@dataclass(frozen=True)
class Matched:
    """alpha times the share of the candidates that a node holds, less beta times its load (RCLLM-8).

    slo_ns: the load is what is in flight there as a share of what it can do in so long, at most 1, and its absence
    counts, as the paper has it. None: by how much it is above the mean node's, a share of that, which needs no unit and
    does not end where all nodes are full. Under slo_ns what is the same otherwise goes to fewer tokens in flight, also
    where all nodes are full or no node has told what a token takes.
    """

    alpha: float = 1.0
    beta: float = LOAD
    slo_ns: float | None = None

    def __call__(self, view: View) -> Float64:
        if self.slo_ns is None:
            return self.alpha * view.matched + Load(self.beta)(view)
        idle: Float64 = 1 - np.minimum(1.0, view.load * view.ns / self.slo_ns)
        fewer = FEWER * view.load / max(1.0, float(view.load.max()))
        return self.alpha * view.matched + self.beta * idle - fewer


@dataclass(frozen=True)
class Residency:
    """Whether a node keeps the user, how much of the user's embedding rows it holds, and its load, each by what it
    costs (HLEM-13): the weights are the costs of a user who is not kept, of rows that are not held, and of a node that
    is full, as shares of their sum. A node that was sent the user last gets `affinity` more. Where the best node has
    more than `full` of the load that it can have, the least loaded one is best.
    """

    affinity: float = AFFINITY
    full: float = FULL
    slo_ns: float = SLO_NS

    def __call__(self, view: View) -> Float64:
        load = np.minimum(1.0, view.load * view.ns / self.slo_ns)
        users, rows, full = self.weights(view)
        held = np.zeros(len(load)) if view.rows is None else view.rows
        score: Float64 = users * (view.user > 0) + rows * held + full * (1 - load)
        if view.last is not None:
            score[view.last] += self.affinity
        return score if load[score.argmax()] <= self.full else 1 - load

    def weights(self, view: View) -> tuple[float, float, float]:
        """The weights of a kept user, of rows that are held, and of a node without work."""
        known = view.ns[view.ns > 0]
        if not len(known):
            return USER_OVER_ROWS / (USER_OVER_ROWS + 2), 1 / (USER_OVER_ROWS + 2), 1 / (USER_OVER_ROWS + 2)
        user_ns = view.tokens * float(np.median(known))
        costs = user_ns, view.rows_ns or user_ns / USER_OVER_ROWS, self.slo_ns
        every = sum(costs)
        return costs[0] / every, costs[1] / every, costs[2] / every


@dataclass(frozen=True)
class Share:
    """How much less work than the mean node a node was sent of late, ended or not, by the time that it takes there: a
    share of that mean."""

    weight: float = SHARE

    def __call__(self, view: View) -> Float64:
        return _below_mean(view.recent + FEW * view.tokens, view.pace, self.weight)


@dataclass(frozen=True)
class Running:
    """How many requests fewer than the mean node a node has, this one counted: a share of that mean."""

    weight: float = 1.0

    def __call__(self, view: View) -> Float64:
        running = view.running + 1
        return self.weight - running * (self.weight * len(running) / float(np.add.reduce(running)))


@dataclass(frozen=True)
class Affinity:
    """The node that had the user last gets a bonus, and so much of the share of the prompt that it should save by now,
    though no report says so yet."""

    bonus: float = AFFINITY
    belief: float = BELIEF

    def __call__(self, view: View) -> Float64:
        score = np.zeros(len(view.user))
        if view.last is not None:
            unreported = max(0.0, view.expected - float(view.reused[view.last]))
            score[view.last] = self.bonus + self.belief * unreported / view.tokens
        return score


@dataclass(frozen=True)
class Late:
    """A node that would miss the deadline comes after all that would not."""

    penalty: float = LATE

    def __call__(self, view: View) -> Float64:
        end_ns = (view.load + view.computed) * view.ns
        return (end_ns > view.left_ns).astype(np.float64) * -self.penalty


def terms_of(
    rule: Rule, load: float = LOAD, affinity: float = AFFINITY, share: float = SHARE
) -> tuple[Term, ...]:
    """The terms of a rule; empty where it has no score."""
    reuse = (Reuse(), Affinity(affinity))
    by_rule: Mapping[Rule, tuple[Term, ...]] = {
        "joint": (*reuse, Load(load), Share(share), Late()),
        "hit": reuse,
        "load": (Load(),),
        "matched": (Matched(beta=load), Late()),
        "rcllm": (Matched(beta=load, slo_ns=SLO_NS), Late()),
        "least": (Running(),),
        "hlem": (Residency(affinity), Late()),
    }
    return by_rule.get(rule, ())
