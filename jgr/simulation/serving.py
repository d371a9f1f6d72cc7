# SPDX-License-Identifier: Apache-2.0
"""One server in virtual time: a policy of the live server, requests at given times, a device with its own clock.

The policy is the object that `jgr serve` drives, and it is called as the engine calls it: `submit` for each arrival,
`plan` after each event and at `next_wakeup_ns`, `commit` when a run comes back. What stands for the world is the time
that a run takes (`run_ns`) and the host's part before it (`launch_ns`), which the policy does not know.

A lane runs what is started on it in order. A run begins when it was launched and the one before it has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jgr.serving.policies.jobs import Job, Rejected, Start
from jgr.serving.policies.policy import Policy

Verdict = Literal["done", "expired", "failed", "refused"]


@dataclass
class Outcomes:
    """What came of every job. verdicts, ended_ns: by job. wasted_ns: of busy_ns, the part of work for jobs that got no
    answer; spent_ns: that of each job that has not ended without one. runs: (begin, end) of each run on its lane, in
    ns."""

    verdicts: dict[int, Verdict] = field(default_factory=dict)
    ended_ns: dict[int, int] = field(default_factory=dict)
    predicted_ns: dict[int, int] = field(default_factory=dict)
    busy_ns: int = 0
    wasted_ns: int = 0
    spent_ns: dict[int, int] = field(default_factory=dict)
    runs: list[tuple[Start, int, int]] = field(default_factory=list)


def simulate(
    policy: Policy[Any],
    jobs: Sequence[Job],
    run_ns: Callable[[Start], int],
    launch_ns: int = 0,
    then: Callable[[Start, int], None] = lambda start, now_ns: None,
) -> Outcomes:
    """Serve jobs that come at their `arrival_ns`, ascending. run_ns: what a run takes on the device. launch_ns: the
    host's time from the plan until the device may begin. then: called after each run that came back."""
    out = Outcomes()
    free_ns: dict[int, int] = {}
    ends: list[tuple[int, int, Start]] = []
    at, now_ns = 0, 0
    while True:
        wakeup_ns = policy.next_wakeup_ns()
        times = [wakeup_ns] if wakeup_ns is not None else []
        times += [ends[0][0]] if ends else []
        times += [jobs[at].arrival_ns] if at < len(jobs) else []
        if not times:
            return out
        now_ns = max(now_ns, min(times))
        while at < len(jobs) and jobs[at].arrival_ns <= now_ns:
            verdict = policy.submit(jobs[at], now_ns)
            if isinstance(verdict, Rejected):
                out.verdicts[jobs[at].id], out.ended_ns[jobs[at].id] = "refused", now_ns
            elif verdict.predicted_ns is not None:
                out.predicted_ns[jobs[at].id] = verdict.predicted_ns
            at += 1
        while ends and ends[0][0] <= now_ns:
            _, _, start = heapq.heappop(ends)
            committed = policy.commit(start.run, "well", now_ns)
            _record(out, "done", committed.done, now_ns)
            _record(out, "failed", committed.failed, now_ns)
            _record(out, "expired", committed.expired, now_ns)
            _, begin_ns, end_ns = next(run for run in reversed(out.runs) if run[0].run == start.run)
            for work in start.work:
                share_ns = (end_ns - begin_ns) // len(start.work)
                if out.verdicts.get(work.job, "done") == "done":
                    out.spent_ns[work.job] = out.spent_ns.get(work.job, 0) + share_ns
                else:
                    out.wasted_ns += share_ns
            then(start, now_ns)
        plan = policy.plan(now_ns)
        _record(out, "expired", plan.expired, now_ns)
        for start in plan.starts:
            begin_ns = max(now_ns + launch_ns, free_ns.get(start.lane, 0))
            end_ns = free_ns[start.lane] = begin_ns + run_ns(start)
            out.busy_ns += end_ns - begin_ns
            out.runs.append((start, begin_ns, end_ns))
            heapq.heappush(ends, (end_ns, start.run, start))


def _record(out: Outcomes, verdict: Verdict, jobs: Sequence[int], now_ns: int) -> None:
    for job_id in jobs:
        out.verdicts[job_id], out.ended_ns[job_id] = verdict, now_ns
        if verdict != "done":
            out.wasted_ns += out.spent_ns.pop(job_id, 0)
