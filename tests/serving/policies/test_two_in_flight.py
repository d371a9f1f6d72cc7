# SPDX-License-Identifier: Apache-2.0
"""Two batches in flight over one cache: whatever fails, is lost, erased or cancelled between launch and collect, no
answer is made of anything but the request's own tokens.

The device is a dictionary from cells to the tokens that were written there, and two engines share it, each with a lane
of its own for both kinds of request, whose launches come in the order of its plans. A batch reads its cells at launch,
and writes after that.
What it read is compared with the prompt when its outcome is believed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jgr.cache.entries import Name
from jgr.cache.hotness import ExponentialWindow
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.prompt.layouts import LAYOUTS, Kind
from jgr.prompt.segments import Content, Prompt, arrange, make_prompt
from jgr.serving.policies import lanes
from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Job, Outcome, Profile, Request, Start
from jgr.serving.policies.jobs import Kind as Sort
from jgr.serving.policies.ordering import Ordering
from jgr.serving.policies.prefix_choice import Policy
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import Compute, PlannedSegment, UnplannedPrompt

PROFILES: dict[Sort, list[Profile]] = {
    "rank": [Profile("rank", 3, tokens, 12, packed=True, context=24) for tokens in (16, 40)],
    "recommend": [Profile("recommend", 3, tokens, 4, packed=True, context=24) for tokens in (16, 40)],
}
CELL = {"user": 4, "item": 2}
LENGTHS = [1, 2, 3, 4, 2, 1]
GARBAGE = -1


@dataclass
class Flying:
    """A run after its launch. right: whether all that it read was the prompt's."""

    start: Start
    right: bool = True
    failed: bool = False
    lost: bool = False


@dataclass
class Lane:
    """One engine: its policy, the runs that wait for their launch, and those that were launched, both in order."""

    batcher: Batcher
    waiting: deque[Start] = field(default_factory=deque)
    flying: deque[Flying] = field(default_factory=deque)


class TwoInFlight(RuleBasedStateMachine):
    policy: Policy = "user"

    @initialize()
    def begin(self) -> None:
        hotness = ExponentialWindow(50, 20) if self.policy == "hotness" else None
        self.pages = Pages(6, 4)
        self.meta = CacheMeta(self.pages, {k: Room(size, step=size) for k, size in CELL.items()}, hotness)
        self.meta.set_limit("item", 3)
        self.meta.set_limit("user", 3)
        self.lanes = [self.lane(), self.lane()]
        self.cells: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[int, Prompt] = {}
        self.epoch = self.now = self.number = self.wrong = self.answered = 0

    def lane(self) -> Lane:
        shared = lanes.Lane()
        schedulers = {
            kind: PromptScheduler(
                profiles, self.meta, max_tokens=30, policy=self.policy, hysteresis=0.0, lane=shared
            )
            for kind, profiles in PROFILES.items()
        }
        return Lane(
            Batcher(
                [],
                max_tokens=30,
                max_wait_ns=0,
                max_queue=8,
                in_flight=2,
                groupings=dict(schedulers),
                ordering=Ordering("fifo"),
            )
        )

    @rule(
        which=st.integers(0, 1),
        user=st.sampled_from("ab"),
        history=st.sampled_from([[1] * 4, [1] * 8, [1] * 8, [0] * 8, [1] * 8 + [0] * 5]),
        items=st.lists(st.integers(0, 3), max_size=2, unique=True),
    )
    def submit(self, which: int, user: str, history: list[int], items: list[int]) -> None:
        """items: candidates to rank; without any, items are to be recommended."""
        self.number += 1
        contents = [(row, Content.of(np.full(LENGTHS[row], 10 + row, np.int32))) for row in items]
        known = Content.of(np.array(history, np.int32))
        prompt = make_prompt(known, np.zeros(1, np.int32), contents, key=user, room=4)
        tokens = len(history) + sum(LENGTHS[row] for row in items) + 1
        kind: Sort = "rank" if items else "recommend"
        job = Job(self.number, kind, tokens, len(items) or 4, self.now, None, UnplannedPrompt(prompt))
        self.lanes[which].batcher.submit(job, self.now)
        self.prompts[self.number] = prompt

    @rule(which=st.integers(0, 1))
    def plan(self, which: int) -> None:
        self.now += 1
        lane = self.lanes[which]
        lane.batcher.renew(self.epoch, self.now)
        lane.waiting.extend(lane.batcher.plan(self.now).starts)

    @precondition(lambda self: any(lane.waiting for lane in self.lanes))
    @rule(which=st.integers(0, 1), breaks=st.sampled_from([False, False, False, True]))
    def launch(self, which: int, breaks: bool) -> None:
        """breaks: it cannot be packed, so nothing is dispatched."""
        lane = self.lanes[which] if self.lanes[which].waiting else self.lanes[1 - which]
        run = Flying(lane.waiting.popleft(), failed=breaks)
        lane.flying.append(run)
        if run.start.epoch != self.epoch:
            run.lost = True
        elif not breaks:
            self.dispatch(run)

    def dispatch(self, run: Flying) -> None:
        writes: list[tuple[PlannedSegment, np.ndarray[Any, Any]]] = []
        for request in run.start.work:
            assert isinstance(request, Request) and request.plan is not None
            placed = arrange(self.prompts[request.job], LAYOUTS[request.plan.layout])
            for segment, planned in zip(placed, request.plan.segments, strict=True):
                tokens = (
                    np.frombuffer(segment.content.raw, np.int32) if planned.kind != Kind.INSTRUCTION else None
                )
                if tokens is None:
                    continue
                run.right &= self.reads(planned, tokens)
                if planned.write is not None:
                    writes.append((planned, tokens))
        for planned, tokens in writes:
            kind = "user" if planned.kind == Kind.USER else "item"
            first = planned.cached
            for at in range(first, len(tokens)):
                cell = (kind, planned.write[at // CELL[kind]])  # type: ignore[index]
                self.cells.setdefault(cell, [GARBAGE] * CELL[kind])[at % CELL[kind]] = (
                    int(tokens[at]) if run.right else GARBAGE  # what follows garbage is garbage
                )

    def reads(self, planned: PlannedSegment, tokens: np.ndarray[Any, Any]) -> bool:
        kind, at, right = "user" if planned.kind == Kind.USER else "item", 0, True
        for span in planned.spans:
            if not isinstance(span, Compute):
                for token in range(span.tokens):
                    cell = self.cells.get((kind, span.cells[token // CELL[kind]]), [GARBAGE] * CELL[kind])
                    right &= cell[token % CELL[kind]] == tokens[at + token]
            at += span.tokens
        return bool(right)

    @precondition(lambda self: any(lane.flying for lane in self.lanes))
    @rule(which=st.integers(0, 1), breaks=st.sampled_from([False, False, False, True]))
    def collect(self, which: int, breaks: bool) -> None:
        """breaks: its program failed on the device, which loses the pool."""
        lane = self.lanes[which] if self.lanes[which].flying else self.lanes[1 - which]
        self.now += 1
        run = lane.flying.popleft()
        outcome: Outcome = "failed" if run.failed else "lost" if run.lost else "well"
        if outcome == "well" and breaks:
            outcome = "failed" if run.start.epoch == self.epoch else "lost"
            if outcome == "failed":
                self.epoch += 1
                self.cells.clear()
        committed = lane.batcher.commit(run.start.run, outcome, self.now)
        self.answered += len(committed.done)
        self.wrong += len(committed.done) * (not run.right)

    @rule(which=st.integers(0, 1), back=st.integers(0, 6))
    def cancel(self, which: int, back: int) -> None:
        self.lanes[which].batcher.cancel(self.number - back, self.now)

    @rule(user=st.sampled_from("abc"))
    def erase(self, user: str) -> None:
        self.meta.forget(Name("user", user, "user_prefix"))

    @rule()
    def lose(self) -> None:
        """Another model's program lost the pool."""
        self.epoch += 1
        self.cells.clear()

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "lanes"):
            assert not self.wrong, "an answer was made of tokens that are not the request's"
            for lane in self.lanes:
                lane.batcher.check()

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        for _ in range(40):  # everything ends, and gives its pages back
            for which in (0, 1):
                self.plan(which)
                while self.lanes[which].waiting:
                    self.launch(which, False)
                while self.lanes[which].flying:
                    self.collect(which, False)
        assert not self.wrong and not any(lane.batcher.live for lane in self.lanes)
        assert self.meta.pinned == 0
        self.meta.clear()
        assert self.pages.free == self.pages.count


def case(of: Policy) -> Any:
    machine = type(f"TwoInFlight_{of}", (TwoInFlight,), {"policy": of})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return machine.TestCase


TestUser = case("user")
TestItem = case("item")
TestHotness = case("hotness")


@pytest.mark.parametrize("items", [([0], [0]), ([0], []), ([], [0])])
def test_who_read_what_a_failed_batch_should_have_written_is_planned_again(
    items: tuple[list[int], list[int]],
) -> None:
    """Of the same kind or of another."""
    world = TwoInFlight()
    world.begin()
    for each in items:
        world.submit(0, "a", [1] * 8, each)
        world.plan(0)
    _, second = world.lanes[0].waiting
    assert second.work[0].plan.user.cached == 8, "it is to read what the first one writes"  # type: ignore[union-attr]
    world.launch(0, True)
    world.launch(0, False)
    world.collect(0, False)
    assert world.lanes[0].batcher.counts["failed"] == 1
    world.collect(0, False)
    assert world.answered == 0 and world.lanes[0].batcher.state(2) == "queued"
    world.plan(0)
    (again,) = world.lanes[0].waiting
    assert again.work[0].plan.user.cached == 0, "nothing was written"  # type: ignore[union-attr]
    world.launch(0, False)
    world.collect(0, False)
    assert (world.answered, world.wrong) == (1, 0)
    world.teardown()


def test_another_engine_does_not_read_what_is_not_written_yet() -> None:
    world = TwoInFlight()
    world.begin()
    world.submit(0, "a", [1] * 8, [0])
    world.plan(0)
    world.submit(1, "a", [1] * 8, [0])
    world.plan(1)
    (other,) = world.lanes[1].waiting
    assert other.work[0].plan.user.cached == 0  # type: ignore[union-attr]
    world.launch(1, False)
    world.launch(0, False)
    world.collect(0, False)
    world.submit(1, "a", [1] * 8, [0])
    world.plan(1)
    assert world.lanes[1].waiting[0].work[0].plan.user.cached == 8  # type: ignore[union-attr]
    world.teardown()
    assert (world.answered, world.wrong) == (3, 0)
