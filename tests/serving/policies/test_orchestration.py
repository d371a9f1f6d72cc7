# SPDX-License-Identifier: Apache-2.0
"""FLAME's orchestrator: splits worked out by hand and by brute force, and plans at toy size (FLAME-11, 12, 15)."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec import structs

from jgr.serving.policies.jobs import (
    Accepted,
    Candidates,
    Committed,
    Job,
    Plan,
    Rejected,
    Start,
    UserPart,
)
from jgr.serving.policies.orchestration import USER_PART, Orchestrator, split
from jgr.serving.policies.ordering import GIVES_WAY_NS, Ordering

PATIENCE_NS = 1_000_000_000
SIZES = (1024, 512, 256, 128)
PROPORTIONAL = {size: float(size) for size in SIZES}


@pytest.mark.parametrize(
    ("n", "parts"),
    [
        (1, (128,)),
        (127, (128,)),
        (128, (128,)),
        (130, (256,)),
        (480, (512,)),
        (1024, (1024,)),
        (1500, (1024, 512)),
        (700, (512, 256)),
        (2500, (1024, 1024, 512)),
        (10_000, (*(1024,) * 9, 512, 256, 128)),
    ],
)
def test_costs_in_proportion_pad_least_and_then_take_the_fewest_parts(n: int, parts: tuple[int, ...]) -> None:
    assert split(n, SIZES, PROPORTIONAL) == parts
    assert sum(parts) >= n
    assert sum(parts) - n < 128


def test_measured_costs_decide_between_one_padded_part_and_several() -> None:
    assert split(130, (128, 256), {128: 5.0, 256: 9.0}) == (256,)
    assert split(130, (128, 256), {128: 4.0, 256: 9.0}) == (128, 128)
    assert split(3, SIZES, dict.fromkeys(SIZES, 5.0)) == (128,)  # of equal cost the smallest
    # A large part that falls out of the cache is not worth it; one with a high fixed cost is, padding and all.
    assert split(1024, SIZES, {128: 6.0, 256: 10.0, 512: 19.0, 1024: 60.0}) == (512, 512)
    assert split(600, SIZES, {128: 50.0, 256: 55.0, 512: 65.0, 1024: 80.0}) == (1024,)


@given(
    st.sets(st.integers(1, 12), min_size=1, max_size=3).flatmap(
        lambda sizes: st.tuples(
            st.fixed_dictionaries({s: st.integers(1, 20) for s in sizes}), st.integers(1, 24)
        )
    )
)
@settings(max_examples=60)
def test_a_split_is_the_cheapest_of_all(drawn: tuple[dict[int, int], int]) -> None:
    costs, n = drawn
    covers = (
        parts
        for count in range(1, n + 1)
        for parts in itertools.combinations_with_replacement(sorted(costs), count)
        if sum(parts) >= n and sum(parts) - min(parts) < n
    )
    best = (
        min((sum(costs[p] for p in parts), len(parts)) for parts in covers)
        if n <= 6 or min(costs) > 3
        else None
    )
    found = split(n, tuple(costs), costs)
    assert sum(found) >= n and list(found) == sorted(found, reverse=True)
    if best is not None:
        assert (sum(costs[p] for p in found), len(found)) == best


def orchestrator(executors: tuple[int, ...] = (4, 4, 8), **given: Any) -> Orchestrator:
    settings = {"max_queue": 9, "ordering": Ordering("edf", PATIENCE_NS), **given}
    return Orchestrator(executors, {size: float(size) for size in executors}, **settings)


def submit(o: Orchestrator, *jobs: Job) -> Orchestrator:
    for job in jobs:
        assert isinstance(o.submit(job, job.arrival_ns), Accepted)
    return o


def job(id: int, count: int = 4, at: int = 0, deadline: int | None = None, **given: bool) -> Job:
    return make(id, count, at, deadline, **given)


def make(id: int, count: int, at: int, deadline: int | None, reads: bool = False, waits: bool = False) -> Job:
    return Job(id, "rank", 0, count, at, deadline, user=UserPart("somebody") if reads else None, waits=waits)


def starts(plan: Plan) -> list[tuple[int, int, int, int]]:
    """Job, executor, first and count."""
    return [(*s.jobs, s.lane, *place(s)) for s in plan.starts]


def place(start: Start) -> tuple[int, int]:
    """First and count; 0 and 0 for the user's part."""
    (work,) = start.work
    return (work.first, work.count) if isinstance(work, Candidates) else (0, 0)


def test_a_request_is_split_over_executors_and_joined_by_place() -> None:
    o = submit(orchestrator(), job(1, 11))
    assert starts(o.plan(0)) == [(1, 2, 0, 8), (1, 0, 8, 3)]
    assert o.commit(1, "well", 1) == Committed()
    assert o.commit(0, "well", 2) == Committed(done=(1,))
    assert (o.idle(4), o.idle(8), len(o.jobs)) == (2, 1, 0)


def test_fewer_executors_of_a_size_than_streams_promise_no_more_than_they_can_do() -> None:
    s = 10**9
    o = Orchestrator((USER_PART, 8), {8: 10.0, USER_PART: 1.0}, max_queue=9, streams=2)

    def of(id: int, count: int, at: int, deadline: int | None, user: UserPart | None = None) -> Job:
        return Job(id, "rank", 0, count, at * s, None if deadline is None else deadline * s, user=user)

    assert o.submit(of(0, 8, 0, None), 0) == Accepted(1)
    assert starts(o.plan(0)) == [(0, 1, 0, 8)]
    late = o.submit(of(1, 8, 1, 15), s)
    assert isinstance(late, Rejected) and late.reason == "too_late", "one stream is free, and no executor"
    assert o.submit(of(2, 8, 1, 25), s) == Accepted(1, None, 20 * s)
    assert o.submit(of(3, 16, 1, 45), s) == Accepted(2, None, 40 * s), "its parts run one after the other"
    assert o.plan(s) == Plan(), "nobody is hopeless"
    somebody = UserPart("somebody")
    assert o.submit(of(4, 0, 1, 12, somebody), s) == Accepted(3, None, 2 * s), "the user's executor is free"


def test_requests_are_split_and_foreseen_by_the_costs_of_the_users_length() -> None:
    costs = {4: 9.0, 8: 10.0, USER_PART: 20.0}
    short = {4: 2.0, 8: 7.0, USER_PART: 1.0}
    o = Orchestrator((USER_PART, 4, 8), costs, max_queue=9, shorter={2: short}, streams=1)

    def of(within: int, id: int = 1) -> Job:
        return Job(id, "rank", 0, 7, 0, None, user=UserPart("somebody", within=within))

    assert o.parts(7, True) == (True, (8,)) and o.parts(7, True, 2) == (True, (4, 4))
    for seconds, of_short in ((4.9, (False, (8,))), (5.1, (True, (4, 4)))):
        both = Orchestrator((USER_PART, 4, 8), costs, max_queue=9, shorter={2: short}, whole={8: seconds})
        assert both.parts(7, True) == (False, (8,)) and both.parts(7, True, 2) == of_short
    one = Orchestrator((USER_PART, 8), costs, max_queue=9, shorter={2: short}, whole={8: 31.0})
    assert one.parts(7, True) == (False, (8,)) and one.parts(7, True, 2) == (True, (8,))
    assert [o._alone_ns(of(within)) for within in (0, 2, 99)] == [
        30e9,
        5e9,
        30e9,
    ]  # 99: nothing is known of it
    assert o._ready_by_ns(structs.replace(of(2), deadline_ns=10**10), 0) == 3e9
    submit(o, of(2), of(0, 2))
    found = o.plan(0)
    assert starts(found) == [(1, 0, 0, 0)]
    assert o._begun_ns() == 4e9  # its two parts
    before = o.costs.ns(USER_PART), o.costs.ns((USER_PART, 2))
    o.commit(found.starts[0].run, "well", 2 * 10**9)
    after = o.costs.ns(USER_PART), o.costs.ns((USER_PART, 2))
    assert after[1] / before[1] > after[0] / before[0] > 1  # the length's own costs learn most
    assert [start[2:] for start in starts(o.plan(2 * 10**9))] == [(0, 4)]


def test_a_request_of_one_part_has_its_user_in_it_where_that_is_cheaper() -> None:
    costs, whole = {4: 4.0, 8: 8.0, USER_PART: 5.0}, {4: 9.0, 8: 12.0}
    o = Orchestrator((USER_PART, 4, 8), costs, max_queue=9, whole=whole)
    assert o.parts(3, reads=True) == (False, (4,))  # 9 either way: one run is less than two
    assert o.parts(7, reads=True) == (False, (8,))  # 12 against 13
    assert o.parts(9, reads=True) == (True, (8, 4))
    assert o.parts(3, reads=False) == (False, (4,))
    submit(o, job(1, 7, reads=True), job(2, 9, reads=True))
    assert starts(o.plan(0)) == [(1, 2, 0, 7), (2, 0, 0, 0)]
    assert o.commit(0, "well", 1) == Committed(done=(1,))


def test_one_run_is_not_made_two_by_noise_but_where_it_is_padded_costs_decide() -> None:
    costs, whole = {4: 4.0, 8: 8.0, 16: 16.0, USER_PART: 5.0}, {4: 9.9, 8: 19.0, 16: 17.0}
    o = Orchestrator((USER_PART, 4, 8, 16), costs, max_queue=9, whole=whole)
    assert o.parts(3, reads=True) == (False, (4,)), "5 + 4 is less, but it is the same work"
    assert o.parts(9, reads=True) == (False, (16,)), "5 + 8 + 4"
    dear = Orchestrator((USER_PART, 4, 8, 16), costs, max_queue=9, whole=whole | {16: 17.1})
    assert dear.parts(9, reads=True) == (True, (8, 4)), "16 places for 9 are padding"


def test_a_part_waits_for_its_size_or_takes_a_larger_one() -> None:
    o = submit(orchestrator(), *(job(i) for i in range(5)))
    assert starts(o.plan(0)) == [(0, 0, 0, 4), (1, 1, 0, 4), (2, 2, 0, 4)]
    o.commit(1, "well", 1)
    assert starts(o.plan(1)) == [(3, 1, 0, 4)]
    o.commit(0, "well", 2)
    assert starts(o.plan(2)) == [(4, 0, 0, 4)]
    assert o.plan(3) == Plan((), ())


def test_batch_jobs_begin_nothing_for_a_while_after_another_was_refused_that_need_not_be() -> None:
    o = Orchestrator((4,), {4: 1e-3}, max_queue=9, ordering=Ordering())
    batch = structs.replace(job(1, count=8), priority="batch")
    submit(o, batch)
    (first,) = o.plan(0).starts
    assert isinstance(o.submit(job(2, deadline=1_500_000), 0), Rejected), "of a millisecond, behind one"
    submit(o, structs.replace(job(3), priority="batch"))
    o.commit(first.run, "well", 1_000_000)
    (second,) = o.plan(1_000_000).starts
    assert second.jobs == (1,), "what has begun goes on"
    o.commit(second.run, "well", 2_000_000)
    assert not o.plan(2_000_000).starts and o.next_wakeup_ns() == GIVES_WAY_NS
    assert [start.jobs for start in o.plan(GIVES_WAY_NS).starts] == [(3,)]


def test_the_earliest_deadline_goes_first_and_who_names_none_has_patience() -> None:
    late, early = 3 * PATIENCE_NS, PATIENCE_NS // 2
    o = submit(orchestrator((4,)), job(1, deadline=late), job(2), job(3), job(4, deadline=early))
    order = []
    for run in range(4):
        order += [*itertools.chain(*(s.jobs for s in o.plan(run).starts))]
        o.commit(run, "well", run)
    assert order == [4, 2, 3, 1]


def test_streams_bound_the_runs_at_a_time() -> None:
    o = submit(orchestrator(streams=2), job(1, 20))
    assert starts(o.plan(0)) == [(1, 2, 0, 8), (1, 0, 16, 4)]  # 8 + 8 + 4, and one executor of 8
    o.commit(1, "well", 1)
    assert starts(o.plan(1)) == []
    o.commit(0, "well", 1)
    assert starts(o.plan(1)) == [(1, 2, 8, 8)]


def test_parts_wait_for_the_users_part_and_for_what_they_are_told_to() -> None:
    o = submit(orchestrator((USER_PART, 4)), job(1, reads=True, waits=True))
    assert starts(o.plan(0)) == [(1, 0, 0, 0)]
    assert o.commit(0, "well", 1) == Committed()
    assert starts(o.plan(1)) == []
    o.ready(1, 1)
    o.ready(7, 1)
    assert starts(o.plan(1)) == [(1, 1, 0, 4)]
    assert o.commit(1, "well", 2) == Committed(done=(1,))


def test_no_more_jobs_are_begun_than_there_are_executors() -> None:
    o = submit(orchestrator((USER_PART, 4)), *(job(i, 8, reads=True) for i in range(4)))
    o.plan(0)
    o.commit(0, "well", 0)  # the first's user
    assert [s[0] for s in starts(o.plan(0))] == [0, 1]
    o.commit(2, "well", 0)
    assert starts(o.plan(0)) == []  # the third's user has to wait, though its executor is idle
    assert (o.idle(USER_PART), o.queued) == (1, 2)


def test_who_waits_for_features_does_not_keep_idle_executors_from_others() -> None:
    o = orchestrator((USER_PART, 4))
    for i in range(8):  # the users' parts come back, what the candidates' wait for does not
        submit(o, job(i, reads=True, waits=True))
        ((read, *_),) = starts(o.plan(0))
        assert read == i
        o.commit(i, "well", 0)
    submit(o, job(8, deadline=100, reads=True))
    assert starts(o.plan(0)) == []  # four times as many as executors are begun
    o.cancel(7, 0)
    assert [s[0] for s in starts(o.plan(1))] == [8]
    o.commit(8, "well", 2)
    assert starts(o.plan(2)) == [(8, 1, 0, 4)]
    for i in range(2):
        o.ready(i, 2)
    o.check()


def test_a_fault_fails_its_request_alone_and_returns_the_executor() -> None:
    o = submit(orchestrator((4, 4)), job(1, 12), job(2))
    assert starts(o.plan(0)) == [(1, 0, 0, 4), (1, 1, 4, 4)]
    assert o.commit(0, "failed", 1) == Committed(failed=(1,))
    assert starts(o.plan(1)) == [(2, 0, 0, 4)]  # the first's last part never runs
    assert o.commit(1, "well", 1) == Committed()
    assert o.commit(2, "well", 1) == Committed(done=(2,))
    assert o.idle(4) == 2


def test_what_is_late_or_cancelled_frees_its_executor_when_it_comes_back() -> None:
    o = submit(orchestrator((4,)), job(1, deadline=10), job(2, deadline=10), job(3))
    o.plan(0)
    assert o.next_wakeup_ns() == 10
    assert o.plan(10) == Plan((), (1, 2))
    assert o.commit(0, "well", 11) == Committed()
    assert starts(o.plan(11)) == [(3, 0, 0, 4)]
    assert o.cancel(3, 11) and not o.cancel(3, 11)
    assert o.commit(1, "well", 12) == Committed()
    assert submit(o, job(4, at=12, deadline=13)).plan(12).starts[0].jobs == (4,)
    assert o.commit(2, "well", 13) == Committed(expired=(4,))


class Compared(int):
    """Counts how often such numbers are compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def test_who_leaves_a_long_queue_is_not_looked_for_from_its_front() -> None:
    """200 requests of 25 parts: searched one by one, those of the last are compared 125 000 times."""
    o = orchestrator(max_queue=300)
    submit(o, *(job(i, 200, deadline=Compared(1000 + i)) for i in range(200)))
    Compared.count = 0
    assert o.cancel(199, 0)
    assert Compared.count < 25 * 40
    o.check()


def test_the_queue_is_bounded_and_a_drain_refuses() -> None:
    o = submit(orchestrator((4,), max_queue=2), job(1), job(2))
    assert o.submit(job(3), 0) == Rejected("queue_full")
    o.plan(0)
    assert o.submit(job(3), 0) == Accepted(2)
    o.drain(0)
    assert o.submit(job(4), 0) == Rejected("draining")
    with pytest.raises(ValueError, match="already queued"):
        o.submit(job(3), 0)
    with pytest.raises(ValueError, match="no executor"):
        o.submit(job(5, reads=True), 0)
    with pytest.raises(ValueError, match="time went back"):
        o.plan(-1)


def test_equal_calls_give_equal_plans() -> None:
    def run() -> list[Plan]:
        o = submit(orchestrator(), *(job(i, 5 + i, deadline=100 - i) for i in range(4)))
        plans = [o.plan(0)]
        for run in range(3):
            o.commit(run, "well", run)
            plans.append(o.plan(run))
        return plans

    assert run() == run()
