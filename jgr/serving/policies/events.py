# SPDX-License-Identifier: Apache-2.0
"""What a policy was told, as plain data: one event for each call that can change what it plans.

An event, applied at its time to a policy in the same state, has the same result. So a list of (time, event) replays a
day of a server, in tests and in simulation (DESIGN idea 6).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from jgr.serving.policies.jobs import Job, Outcome
from jgr.serving.policies.live import Span
from jgr.serving.policies.policy import Policy


class Submitted(Struct, frozen=True, tag="submit"):
    job: Job

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.submit(self.job, now_ns)


class Foretold(Struct, frozen=True, tag="refuses"):
    job: Job

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.refuses(self.job, now_ns)


class Cancelled(Struct, frozen=True, tag="cancel"):
    job: int

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.cancel(self.job, now_ns)


class Readied(Struct, frozen=True, tag="ready"):
    job: int

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.ready(self.job, now_ns)


class Planned(Struct, frozen=True, tag="plan"):
    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.plan(now_ns)


class Committed(Struct, frozen=True, tag="commit"):
    run: int
    outcome: Outcome
    span: Span | None = None

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.commit(self.run, self.outcome, now_ns, self.span)


class Renewed(Struct, frozen=True, tag="renew"):
    epoch: int

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.renew(self.epoch, now_ns)


class Forgot(Struct, frozen=True, tag="forget"):
    user: str

    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.forget(self.user, now_ns)


class Shadowed(Struct, frozen=True, tag="shadow"):
    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.shadow(now_ns)


class Drained(Struct, frozen=True, tag="drain"):
    def apply(self, policy: Policy[Any], now_ns: int) -> Any:
        return policy.drain(now_ns)


Event = (
    Submitted | Foretold | Cancelled | Readied | Planned | Committed | Renewed | Forgot | Shadowed | Drained
)
