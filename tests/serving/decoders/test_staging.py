# SPDX-License-Identifier: Apache-2.0
"""The buffers that batches are packed into, on a device that reads what it was given as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.serving.decoders.packing import blank, pack
from jgr.serving.decoders.paged_executor import _computed_work
from jgr.serving.decoders.row_executor import RowExecutor, StagedInputs, median_seconds
from jgr.serving.decoders.work import RankWork, RecommendWork, SegmentsWork
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import NO_REPAIR, Repair, UnplannedPrompt
from tests.serving.decoders.test_paged_executor import CFG, PARAMS, TABLES, A, B, Request, Server, check

RECOMMEND, RANK = Profile("recommend", 2, 24, 6), Profile("rank", 2, 24, 4)
GONE = ArithmeticError("the device is gone")


class Late:
    """An output that is computed when it is asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._compute())


class SlowDevice:
    """Runs a program when its outputs are asked for, on what its buffer holds then. buffers: all that it was given.
    fails: whether it does so instead."""

    def __init__(self, program: Any, packed: bool) -> None:
        self._program, self._packed = program, packed
        self.buffers: list[int] = []
        self.fails = False

    def __call__(self, words: Any, *others: Any) -> Any:
        assert isinstance(words, np.ndarray), "on a CPU a program reads the host's buffer itself"
        self.buffers.append(words.ctypes.data)
        leaves, tree = jax.tree.flatten(self._program(words, *others))

        def late(at: int) -> Any:
            if self.fails:
                raise GONE
            return jax.tree.leaves(self._program(words, *others))[at]

        outputs = jax.tree.unflatten(tree, [Late(lambda at=at: late(at)) for at in range(len(leaves))])  # type: ignore[misc]
        return (outputs[0], jax.tree.unflatten(tree, leaves)[1]) if self._packed else outputs


@pytest.fixture(scope="module")
def rows() -> RowExecutor:
    executor = RowExecutor(CFG, PARAMS, TABLES, (RECOMMEND, RANK), "valid")
    executor.warm_up(lambda done, total, label: None)
    return executor


def some_works(profile: Profile) -> list[Any]:
    """Batches of one request, each another one."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, CFG.vocab_size, n).astype(np.int32) for n in (3, 24, 9, 17, 12, 6)]
    if profile.kind == "recommend":
        return [[RecommendWork(prompt, beam_width=6)] for prompt in prompts]
    return [[RankWork(prompt, np.array([at % 3, 1], np.int32))] for at, prompt in enumerate(prompts)]


@pytest.mark.parametrize("profile", [RECOMMEND, RANK], ids=["recommend", "rank"])
def test_a_batch_in_flight_keeps_its_rows_until_it_is_collected(rows: RowExecutor, profile: Profile) -> None:
    works = some_works(profile)
    alone = [rows.run(profile, batch)[0].scores for batch in works]
    assert len({scores.tobytes() for scores in alone}) == len(works), "each batch has an answer of its own"
    program, device = rows._programs[profile], SlowDevice(rows._programs[profile], packed=False)
    rows._programs[profile] = device  # type: ignore[assignment]
    try:
        flying = [rows.launch(profile, batch) for batch in works[:2]]
        for at in range(len(works)):
            found = rows.collect(flying.pop(0))[0].scores
            np.testing.assert_array_equal(found, alone[at])
            if at + 2 < len(works):
                flying.append(rows.launch(profile, works[at + 2]))
        assert len(device.buffers) == len(works) and len(set(device.buffers)) == 2, "two are in flight"

        failed, held = rows.launch(profile, works[0]), device.buffers[-1]
        device.fails = True
        with pytest.raises(ArithmeticError):
            rows.collect(failed)
        device.fails = False
        for batch, want in zip(works, alone, strict=True):
            np.testing.assert_array_equal(rows.run(profile, batch)[0].scores, want)
            assert device.buffers[-1] != held, "a device that failed may read its buffer still"
    finally:
        rows._programs[profile] = program


@pytest.mark.parametrize("kind", ["recommend", "rank"])
def test_a_packed_batch_in_flight_keeps_its_row_until_it_is_collected(kind: str) -> None:
    server = Server("user")
    requests = (
        [A, B] if kind == "rank" else [Request(name, range(12, 20 + n), []) for n, name in enumerate("ab")]
    )
    server.serve(*requests)  # the users' tokens are cached now
    plans = []
    for request in (*requests, *requests):
        plans.append((request, *server.plan(server.jobs(request), [request])))
        server.schedulers[kind].finished(plans[-1][1].jobs, True)
    programs, own = server.executor._programs, dict(server.executor._programs)
    devices = {profile: SlowDevice(program, packed=True) for profile, program in own.items()}
    programs.update(devices)  # type: ignore[arg-type]
    try:
        flying = [server.executor.launch(group.profile, works) for _, group, works in plans]
        for (request, group, _), pending in zip(plans, flying, strict=True):
            check(request, group.prompts[0].layout, server.executor.collect(pending)[0])
        given = [buffer for device in devices.values() for buffer in device.buffers]
        assert len(set(given)) == len(given) == 4
    finally:
        programs.update(own)
    for _ in range(2):
        server.serve(*requests)


@pytest.mark.parametrize(
    "repair", [NO_REPAIR, Repair(first=2), Repair(share=0.3)], ids=["exact", "first", "share"]
)
@pytest.mark.parametrize("probe", [False, True])
def test_packing_leaves_nothing_of_the_batch_before(repair: Repair, probe: bool) -> None:
    """Into arrays of any content the same is written as into empty ones."""
    rank, recommend = (Profile(kind, 3, 90, 9, True, 40) for kind in ("rank", "recommend"))  # type: ignore[arg-type]
    ranked = [_computed_work(rank, n) for n in (20, 5)]
    if repair:
        ranked = [planned_by_items(name, [0, 1, 2][:n], probe, repair) for n, name in ((3, "a"), (2, "b"))]
    for profile, works in (
        (rank, ranked),
        (rank, ranked[:1]),
        (recommend, [_computed_work(recommend, 9)] * 2),
    ):
        empty, used = (blank(profile, 1, 60, repair) for _ in range(2))
        for part in jax.tree.leaves(used):
            part[...] = 77_777
        kept = [pack(out, works, profile, cell_tokens=4, slots=800) for out in (empty, used)]
        np.testing.assert_array_equal(*(each.slots for each in kept))
        for one, other in zip(jax.tree.leaves(empty), jax.tree.leaves(used), strict=True):
            np.testing.assert_array_equal(one, other)


def planned_by_items(user: str, rows: list[int], probe: bool, repair: Repair) -> SegmentsWork:
    """A request to rank whose items stand first, none of which is cached."""
    request = Request(user, range(12, 20), rows, probe)
    meta = CacheMeta(Pages(4, 64), {"user": Room(64), "item": Room(64)})
    profiles = [Profile("rank", 3, 200, 9, True, 40)]
    scheduler = PromptScheduler(profiles, meta, max_tokens=200, policy="item")
    unplanned = UnplannedPrompt(request.prompt, "item_prefix", repair=repair)
    group = scheduler.group([Job(0, "rank", 100, len(rows), 0, None, unplanned)], True, 0)
    assert group is not None
    return replace(request.work, plan=group.prompts[0])


def test_a_buffer_is_one_runs_until_it_is_given_back_once() -> None:
    inputs = StagedInputs((np.zeros(3, np.int32), {"b": np.zeros((2, 2), np.int32)}))

    def stage(value: int) -> tuple[Any, Any]:
        staged = inputs.stage()
        staged.arrays[0][:], staged.arrays[1]["b"][:] = value, -value
        return staged, staged.run(lambda words: words)

    def read(words: Any) -> tuple[Any, Any]:
        x, y = jax.jit(inputs.layout.unpack)(words)
        return x.tolist(), y["b"].tolist()

    (one, first), (two, second) = stage(1), stage(2)
    assert read(first) == ([1] * 3, [[-1, -1]] * 2) and read(second)[0] == [2] * 3
    one.give_back()
    one.give_back()
    (three, third), (_, fourth) = stage(3), stage(4)
    assert third is first and not np.shares_memory(fourth, third) and not np.shares_memory(fourth, second)
    assert read(second)[0] == [2] * 3 and read(third)[0] == [3] * 3 and read(fourth)[0] == [4] * 3
    two.give_back()
    three.give_back()
    with pytest.raises(AssertionError, match="may be another run's"):
        one.run(read)


def test_programs_are_timed_in_rounds_and_long_ones_less_often() -> None:
    short, longer, longest = (Profile("rank", rows, 8, 4) for rows in (1, 2, 4))
    times = {short: [0.1, 0.8, 0.2], longer: [0.5, 0.6, 9.0], longest: [8.0, 9.0]}
    now, order, left = [0.0], [], {profile: iter(each) for profile, each in times.items()}

    def call(profile: Profile) -> None:
        now[0] += next(left[profile])
        order.append(profile)

    found = median_seconds({profile: partial(call, profile) for profile in times}, lambda: now[0])
    assert found == pytest.approx({short: 0.2, longer: 0.55, longest: 8.0})
    assert order == [short, longer, longest, short, longer, short]
    assert median_seconds({}) == {}
