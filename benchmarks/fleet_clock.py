# SPDX-License-Identifier: Apache-2.0
"""Executors that take the time of a measured cost, without computing, and count what they would have computed.

Four engines that compute would only fight over this machine's cores. So each has all that an engine has (prompts, the
policy, the cache's meta service, the plan of each request), but for its executors: these wait for as long as BAT's
model needed for so many new and cached tokens on a CPU, times SLOWER, and give scores that mean nothing. What is cached
and what would be computed are counted by the engine's own plans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jgr.serving.decoders.serve import ProfiledExecutors
from jgr.serving.decoders.work import Outcome, RankOutcome, RecommendOutcome, SegmentsWork, Work
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import AnyEngine, Engine
from jgr.serving.policies.jobs import Profile, Start

COSTS = (0.01918, 1.269e-05, 8.373e-09, 4.209e-09)
"""Seconds of a prompt: of any, of a new token, of a new one's look at another, and at a cached one. Fitted to 1899
runs of BAT's model on two cores, as benchmarks/bat_nodes.py fits them (`speed_row`)."""
SLOWER = 2.0
"""So many times as long the executors wait. At the rates of the measured costs themselves, what HTTP, Ray and the plans
of requests take is more than a slow machine's two cores have, and runs would measure these and not a router."""


class Counts(NamedTuple):
    """What replicas did: requests, their tokens, those that were cached, and seconds."""

    requests: int = 0
    tokens: int = 0
    cached: int = 0
    busy_s: float = 0.0

    def plus(self, other: Counts) -> Counts:
        return Counts._make(mine + its for mine, its in zip(self, other, strict=True))

    def minus(self, other: Counts) -> Counts:
        return Counts._make(mine - its for mine, its in zip(self, other, strict=True))


def cost_s(new: int, cached: int) -> float:
    """What a prompt takes."""
    any_s, new_s, among_s, to_cached_s = COSTS
    return SLOWER * (any_s + new_s * new + among_s * new * new + to_cached_s * new * cached)


class Clocked:
    """Executors that wait. One request runs at a time."""

    lanes = in_flight = 1

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.profiles = tuple(profiles)
        self.costs: Mapping[Profile, float] = {}
        self.counts = Counts()

    def warm_up(self, progress: Progress) -> None:
        self.costs = {profile: cost_s(profile.tokens, 0) for profile in self.profiles}
        progress(1, 1, "")

    def bind(self) -> None:
        """See jgr.serving.engine.contract.Executors."""

    def launch(self, start: Start, work: Sequence[Work]) -> list[Outcome]:
        """See jgr.serving.engine.contract.Executors."""
        outcomes: list[Outcome] = []
        for each in work:
            assert isinstance(each, SegmentsWork) and each.plan is not None
            new, cached = each.plan.computed_tokens, each.plan.cached_tokens
            took_s = cost_s(new, cached)
            time.sleep(took_s)
            self.counts = self.counts.plus(Counts(1, new + cached, cached, took_s))
            if len(each.columns):
                outcomes.append(RankOutcome(np.zeros(len(each.columns), np.float32)))
            else:
                outcomes.append(RecommendOutcome(np.zeros(1, np.int32), np.zeros(1, np.float32)))
        return outcomes

    def collect(self, start: Start, pending: list[Outcome]) -> list[Outcome]:
        """See jgr.serving.engine.contract.Executors."""
        return pending


def clocked(engine: AnyEngine) -> AnyEngine:
    """The same engine, which waits in place of computing."""
    executors: ProfiledExecutors = Clocked([p for p in engine.served.executors.profiles if p.packed])
    return Engine(replace(engine.served, executors=executors), None)
