# SPDX-License-Identifier: Apache-2.0
"""Blocks under whatever happens to a server: requests of every method mixed in batches, several batches in flight,
requests that are gone before their batch runs, entries that are dropped, and pools that are lost (RCLLM-16).

Every answer that the policies would believe is compared with the same prompt by a dense decoder in numpy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jgr.cache.entries import Name
from jgr.cache.pool import PoolLost
from jgr.serving.decoders.work import Pending, RankOutcome
from jgr.serving.policies.batching import Group
from jgr.serving.policies.jobs import Job
from jgr.serving.policies.sources import ALL_ITEM_TOKENS, Repair, UnplannedPrompt
from tests.serving.decoders.test_blocks import RCLLM, Float64, Method, Request, Server

REPAIRS = {
    "naive": Repair(of_all=True),
    "epic": Repair(2, of_all=True),
    "rcllm": RCLLM.repair,
    "half": Repair(0, 0.5, of_all=True),
    "whole": ALL_ITEM_TOKENS,
}
REQUESTS = [
    Request(user, range(12, 12 + length), rows)
    for user, length, rows in (
        ("a", 6, [3, 1, 2]),
        ("a", 11, [8, 4]),
        ("b", 9, [2, 3, 5, 0]),
        ("b", 9, [7, 6]),
        ("c", 4, [1, 3, 8]),
        ("d", 13, [4, 8, 7, 3, 1]),
    )
]


@cache
def wanted(number: int, method: str) -> Float64:
    return REQUESTS[number].dense(Method(REPAIRS[method], "attention"))


class Unreadable:
    """An array whose computation failed."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ArithmeticError("the device is gone")


@dataclass
class Flying:
    """A batch that was planned: which requests are in it. pending: None before it is dispatched."""

    group: Group
    asked: list[tuple[int, str]]
    epoch: int
    pending: Pending | None = None
    believed: bool = True


class Blocks(RuleBasedStateMachine):
    @initialize(items=st.integers(0, 8), users=st.integers(0, 5))
    def begin(self, items: int, users: int) -> None:
        self.server = Server(RCLLM, items, users)
        self.pool = self.server.executor.pool
        self.server.scheduler.renew(self.pool.epoch)
        self.flying: deque[Flying] = deque()
        self.number = self.answers = 0

    @rule(
        asked=st.lists(
            st.tuples(st.integers(0, len(REQUESTS) - 1), st.sampled_from(sorted(REPAIRS))),
            min_size=1,
            max_size=3,
        ),
        fresh=st.sampled_from([False, False, False, True]),
    )
    def plan(self, asked: Sequence[tuple[int, str]], fresh: bool) -> None:
        jobs = {}
        for number, method in asked:
            request, self.number = REQUESTS[number], self.number + 1
            unplanned = UnplannedPrompt(request.prompt, None, fresh, REPAIRS[method])
            job = Job(
                self.number,
                "rank",
                unplanned.computed_at_most,
                len(request.rows),
                self.number,
                None,
                unplanned,
            )
            jobs[self.number] = job, (number, method)
        group = self.server.scheduler.group([job for job, _ in jobs.values()], True, self.number)
        assert group is not None
        self.flying.append(Flying(group, [jobs[job][1] for job in group.jobs], self.server.meta.epoch))

    @precondition(lambda self: any(batch.pending is None for batch in self.flying))
    @rule(leaves=st.sampled_from([False, False, True]))
    def launch(self, leaves: bool) -> None:
        """leaves: the first batch that waits is not run after all, as where its requests' clients have gone."""
        batch = next(batch for batch in self.flying if batch.pending is None)
        if leaves:
            self.flying.remove(batch)
            self.end(batch, False)
            return
        works = [
            replace(REQUESTS[number].work, plan=plan, epoch=batch.epoch)
            for (number, _), plan in zip(batch.asked, batch.group.prompts, strict=True)
        ]
        try:
            batch.pending = self.server.executor.launch(batch.group.profile, works)
        except PoolLost:
            assert batch.epoch != self.pool.epoch, "only what was planned before the loss is refused"
            self.flying.remove(batch)
            self.end(batch, False)

    @precondition(lambda self: bool(self.flying) and self.flying[0].pending is not None)
    @rule(breaks=st.sampled_from([False] * 7 + [True]))
    def collect(self, breaks: bool) -> None:
        batch = self.flying.popleft()
        assert batch.pending is not None
        if breaks:
            batch.pending = replace(batch.pending, outputs=Unreadable())
        try:
            outcomes = self.server.executor.collect(batch.pending)
        except (ArithmeticError, PoolLost):
            assert breaks
            self.end(batch, False)
            self.server.scheduler.renew(self.pool.epoch)
            return
        if batch.believed:
            for outcome, asked in zip(outcomes, batch.asked, strict=True):
                assert isinstance(outcome, RankOutcome)
                np.testing.assert_allclose(outcome.scores, wanted(*asked), atol=5e-5)
                self.answers += 1
        self.end(batch, batch.believed)

    def end(self, batch: Flying, well: bool) -> None:
        lost = self.server.scheduler.finished(batch.group.jobs, well and batch.epoch == self.pool.epoch)
        for other in self.flying:
            other.believed &= other.group.jobs not in lost

    @rule(row=st.integers(0, 8))
    def drop(self, row: int) -> None:
        self.server.meta.drop(Name("item", row, "item_prefix"))

    @rule(user=st.sampled_from("abcd"))
    def erase(self, user: str) -> None:
        self.server.scheduler.forget(user)

    @rule(kind=st.sampled_from(["item", "user"]), pages=st.integers(0, 8))
    def divide(self, kind: str, pages: int) -> None:
        self.server.meta.set_limit(kind, pages)

    @precondition(lambda self: not any(batch.pending for batch in self.flying))
    @rule()
    def lose(self) -> None:
        """Another model's program failed."""
        self.pool.lose(self.pool.epoch, ArithmeticError("the device is gone"))
        self.server.scheduler.renew(self.pool.epoch)

    @invariant()
    def sound(self) -> None:
        self.server.scheduler.check()

    def teardown(self) -> None:
        while self.flying:
            while any(batch.pending is None for batch in self.flying):
                self.launch(False)
            if self.flying:
                self.collect(False)
        assert self.server.meta.pinned == 0, "whatever happened, nothing stays pinned"


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
