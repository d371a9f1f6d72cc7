# SPDX-License-Identifier: Apache-2.0
"""Profiled points of a paged executor: seconds of a prompt by its new and its cached tokens (BAT-11)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from jgr.prompt.layouts import Kind
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies.jobs import Profile
from jgr.serving.policies.sources import Compute, PlannedPrompt, PlannedSegment, Reuse

Point = tuple[float, float, float]


def measure(
    executor: PagedExecutor, runs: int = 3, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Point]:
    """Time prompts of a user on a warmed-up executor: points of (new tokens, cached tokens, seconds of the fastest
    run).

    Every compiled number of new tokens is filled, after no cached token, half as many as are compiled and all of them,
    as far as the pool has that many.
    """
    ranking = [profile for profile in executor.profiles if profile.kind == "rank"]
    for profile in ranking or executor.profiles:
        most = min(profile.context, executor.pool.pages * executor.kv.slots // executor.kv.parts)
        for cached in sorted({0, most // 2, most}):
            works = [_work(executor, profile, cached)]
            seconds = []
            for _ in range(runs):
                start = clock()
                executor.run(profile, works)
                seconds.append(clock() - start)
            yield profile.tokens, cached, min(seconds)


def _work(executor: PagedExecutor, profile: Profile, cached: int) -> SegmentsWork:
    token = np.zeros(1, np.int32)
    items = [(0, Content.of(token))] if profile.kind == "rank" else []
    new = profile.tokens - 1 - len(items)
    cells = tuple(range(-(-cached // executor.kv.tokens) * executor.kv.parts))
    prompt = make_prompt(Content.of(np.zeros(cached + new, np.int32)), token, items)
    user = PlannedSegment(Kind.USER, (Reuse(cached, cells), Compute(new)))
    others = [PlannedSegment(segment.kind, (Compute(1),)) for segment in prompt[1:]]
    plan = PlannedPrompt.of("user_prefix", [user, *others])
    if items:
        return SegmentsWork(prompt, columns=token, plan=plan)
    return SegmentsWork(prompt, beam_width=1, plan=plan)
