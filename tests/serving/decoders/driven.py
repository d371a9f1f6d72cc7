# SPDX-License-Identifier: Apache-2.0
"""Policies and a paged executor as the engine drives them, without the engine. Its cache goes on from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages
from jgr.serving.decoders.caching import kv_room
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.decoders.work import RankOutcome, SegmentsWork
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prefix_choice import Policy
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import PlannedPrompt, UnplannedPrompt

Float64 = npt.NDArray[np.float64]


class Driven:
    """An executor over one profile, with an empty cache. items, users: pages of each."""

    def __init__(
        self,
        executor: PagedExecutor,
        profile: Profile,
        policy: Policy,
        max_tokens: int,
        items: int,
        users: int,
    ) -> None:
        self.executor = executor
        room, pool = kv_room(executor.kv), executor.pool
        self.meta = CacheMeta(Pages(pool.pages, pool.page_bytes), {"user": room, "item": room})
        self.meta.set_limit("item", items)
        self.meta.set_limit("user", users)
        self.scheduler = PromptScheduler([profile], self.meta, max_tokens=max_tokens, policy=policy)

    def score(
        self, asked: Sequence[tuple[UnplannedPrompt, SegmentsWork]]
    ) -> list[tuple[PlannedPrompt, Float64]]:
        """Plans and scores of requests that are all queued at once."""
        jobs = [
            Job(at, "rank", unplanned.computed_at_most, len(work.columns), at, None, unplanned)
            for at, (unplanned, work) in enumerate(asked)
        ]
        found: list[tuple[PlannedPrompt, Float64]] = []
        while jobs:
            assert self.scheduler.fits(jobs[0].tokens, jobs[0].width)
            group = self.scheduler.group(jobs, True, len(found))
            assert group is not None
            chosen = zip(group.jobs, group.prompts, strict=True)
            works = [replace(asked[job][1], plan=plan) for job, plan in chosen]
            outcomes = self.executor.run(group.profile, works)
            self.scheduler.check()
            self.scheduler.finished(group.jobs, True)
            for plan, outcome in zip(group.prompts, outcomes, strict=True):
                assert isinstance(outcome, RankOutcome)
                found.append((plan, outcome.scores.astype(np.float64)))
            jobs = jobs[len(group.jobs) :]
        self.meta.check()
        return found
