# SPDX-License-Identifier: Apache-2.0
"""Batches with a row for each device: who gets which request, one shape for all rows, nothing lost or read early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.cache.entries import Name
from jgr.cache.hotness import ExponentialWindow, ItemFrequencies
from jgr.cache.neighbours import Neighbour, Neighbours
from jgr.cache.pages import Pages, Room
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.parted import PartedScheduler
from jgr.serving.policies.prefix_choice import Policy
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.run_costs import RunCosts
from jgr.serving.policies.sources import Compute, Reuse, UnplannedPrompt

DEVICES = 3
PROFILES = [Profile("rank", 2, tokens, 8, packed=True, context=24) for tokens in (16, 40)]
COSTS = {PROFILES[0]: 0.01, PROFILES[1]: 0.1}


def in_time(jobs: Sequence[int], end_ns: int) -> int:
    """No other job becomes late."""
    return 0


def make(policy: Policy, pages: int = 40, shares: bool = True) -> PartedScheduler:
    rooms = {"user": Room(4, step=4), "item": Room(2, step=2)}
    metas = [Neighbour(number, Pages(pages, 4), rooms) for number in range(DEVICES)]
    neighbours = Neighbours(metas, shares, 0.5)
    neighbours.set_limit("item", pages // 2)
    neighbours.set_limit("user", pages - pages // 2)
    neighbours.frequencies = ItemFrequencies(6, 10**9)
    planners = [PromptScheduler(PROFILES, meta, max_tokens=30, policy=policy) for meta in metas]
    found = PartedScheduler(planners, neighbours)
    found.costs = RunCosts(COSTS)
    return found


def job(number: int, user: int, history: int, items: Sequence[int], deadline_ns: int | None = None) -> Job:
    contents = [(row, Content.of(np.full(1 + row % 3, row, np.int32))) for row in items]
    known = Content.of(np.full(history, user, np.int32))
    prompt = make_prompt(known, np.zeros(1, np.int32), contents, key=f"u{user}", room=4)
    tokens = history + sum(1 + row % 3 for row in items) + 1
    return Job(number, "rank", tokens, len(items), number, deadline_ns, UnplannedPrompt(prompt))


def plan(scheduler: PartedScheduler, *jobs: Job, begin_ns: int | None = None) -> Any:
    return scheduler.group(jobs, True, jobs[-1].arrival_ns, begin_ns, in_time)


def devices(group: Any) -> dict[int, int]:
    """The device of each job."""
    return {number: prompt.device for number, prompt in zip(group.jobs, group.prompts, strict=True)}


def test_new_users_are_spread_and_known_ones_go_where_they_are_kept() -> None:
    scheduler = make("user")
    first = plan(scheduler, *(job(n, n, 4, [0]) for n in range(3)))
    assert devices(first) == {0: 0, 1: 1, 2: 2}
    scheduler.finished(first.jobs, well=True)
    second = plan(scheduler, *(job(n + 3, 2 - n, 4, [0]) for n in range(3)))
    assert devices(second) == {3: 2, 4: 1, 5: 0}
    assert [prompt.cached_tokens for prompt in second.prompts] == [4, 4, 4]
    scheduler.finished(second.jobs, well=True)
    full = plan(scheduler, *(job(n + 6, 0, 4, [0]) for n in range(5)))
    assert full.jobs == (6, 7), "the user's device takes two requests, and the others wait for it"
    scheduler.finished(full.jobs, well=True)
    assert scheduler.forget("u0") == 1 and scheduler.forget("u0") == 0


def test_all_rows_have_the_shape_of_the_longest() -> None:
    scheduler = make("none")
    group = plan(scheduler, job(0, 0, 4, [0]), job(1, 1, 30, [0]))
    assert set(group.jobs) == {0, 1} and group.profile.tokens == 40
    assert len(set(devices(group).values())) == 2


def test_a_row_that_would_make_an_accepted_job_late_waits() -> None:
    scheduler = make("user")
    urgent, long = job(0, 0, 4, [0], deadline_ns=50_000_000), job(1, 1, 30, [0])
    group = plan(scheduler, urgent, long, begin_ns=0)
    assert (group.jobs, group.profile.tokens) == ((0,), 16), "a row of 40 tokens takes .1 s"
    scheduler.finished(group.jobs, well=True)
    scheduler.check()
    (alone,) = plan(scheduler, long, begin_ns=0).prompts
    assert alone.cached_tokens == 0, "what it was given was given back"


def test_a_row_that_is_put_off_leaves_what_its_users_had_and_counts_nobody() -> None:
    scheduler, window = make("user"), ExponentialWindow(10**12, 100)
    for meta in scheduler._neighbours.metas:
        meta.hotness = ExponentialWindow(10**12, 100)
    scheduler.finished(plan(scheduler, job(0, 0, 4, [0]), job(1, 1, 4, [0])).jobs, well=True)
    later = job(3, 1, 30, [0])
    for _ in range(3):
        group = plan(scheduler, job(2, 0, 4, [0], deadline_ns=50_000_000), later, begin_ns=0)
        assert group.jobs == (2,)
        scheduler.finished(group.jobs, well=True)
        assert scheduler.cached_user(job(9, 1, 4, [0]).unplanned, 0) == 4
    group = plan(scheduler, later, begin_ns=0)
    assert group.prompts[0].cached_tokens == 4
    scheduler.finished(group.jobs, well=True)
    scheduler.check()
    name = Name("user", "u1", "user_prefix")
    for now_ns in (1, 3):
        window.touch(name, now_ns)
    came = [meta.hotness.frequency(name, 9) for meta in scheduler._neighbours.metas if meta.hotness]
    assert came == [0.0, window.frequency(name, 9), 0.0]


def test_an_item_is_copied_from_the_device_that_has_it() -> None:
    scheduler = make("item")
    first = plan(scheduler, job(0, 0, 2, [3]))  # on device 0, which is the item's home
    assert not first.fetches
    during = plan(scheduler, job(1, 1, 2, [3]))  # on device 1, before the first batch has ended
    assert devices(during) == {1: 1} and not during.fetches
    assert isinstance(during.prompts[0].items[0].spans[0], Compute)
    scheduler.finished(first.jobs, well=True)
    after = plan(scheduler, job(2, 2, 2, [3]))
    assert devices(after) == {2: 2}
    (fetch,) = after.fetches
    source = next(x.write for x in first.prompts[0].items)
    assert (fetch.source, fetch.to, fetch.cells) == (0, 2, source)
    assert after.prompts[0].items[0].spans == (Reuse(1, fetch.into),)


def test_an_item_computed_away_from_its_home_stays_until_a_plan_carries_its_copy() -> None:
    """Another model's plan may come first, and would be given the pages that are free."""
    scheduler = make("item")
    neighbours = scheduler._neighbours
    first = plan(scheduler, job(0, 0, 2, [1]))  # on device 0; the item's home is device 1
    assert devices(first) == {0: 0} and not first.fetches
    free = neighbours.metas[0].pages.free
    scheduler.finished(first.jobs, well=True)
    assert neighbours.metas[0].pages.free == free and not neighbours.fetches
    second = plan(scheduler, job(1, 1, 2, [4]))  # of nothing that is kept
    (fetch,) = second.fetches
    source = next(x.write for x in first.prompts[0].items)
    assert (fetch.source, fetch.to, fetch.cells) == (0, 1, source)
    scheduler.finished(second.jobs, well=True)
    third = plan(scheduler, job(2, 2, 2, [1]))
    (again,) = third.fetches
    assert (again.source, again.to, again.cells) == (1, 2, fetch.into), "it is read at its home"
    scheduler.check()


def test_without_sharing_each_device_computes() -> None:
    scheduler = make("item", shares=False)
    for number in range(3):
        group = plan(scheduler, job(number, number, 2, [3]))
        assert devices(group) == {number: number}
        assert group.prompts[0].cached_tokens == 0 and not group.fetches
        scheduler.finished(group.jobs, well=True)


@settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from(["none", "user", "item", "hotness"]),
    pages=st.integers(4, 20),
    steps=st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.integers(0, 4),
                    st.integers(1, 9),
                    st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
                ),
                min_size=1,
                max_size=6,
            ),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    ),
)
def test_every_request_is_planned_once_and_every_row_fits(policy: Policy, pages: int, steps: Any) -> None:
    scheduler, number, queue = make(policy, pages), 0, list[Job]()
    flights: list[tuple[int, ...]] = []
    for new, well, ends in steps:
        for user, history, items in new:
            queue.append(job(number, user, history, items))
            number += 1
        group = plan(scheduler, *queue)
        assert group.jobs[0] == queue[0].id, "the most urgent job goes next"
        by_id, rows = {one.id: one for one in queue}, dict[int, list[Any]]()
        for at, prompt in zip(group.jobs, group.prompts, strict=True):
            rows.setdefault(prompt.device, []).append((by_id[at], prompt))
        for row in rows.values():
            assert len(row) <= group.profile.batch
            assert sum(prompt.computed_tokens for _, prompt in row) <= group.profile.tokens
            assert sum(prompt.cached_tokens for _, prompt in row) <= group.profile.context
            assert sum(one.width for one, _ in row) <= group.profile.width
        queue = [one for one in queue if one.id not in set(group.jobs)]
        flights.append(group.jobs)
        if ends:
            for lost in scheduler.finished(flights.pop(0), well):
                assert lost in flights
        scheduler.check()
    for jobs in flights:
        scheduler.finished(jobs, True)
    scheduler.check()
