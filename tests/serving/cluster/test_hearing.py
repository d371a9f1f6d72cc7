# SPDX-License-Identifier: Apache-2.0
"""What a router makes of the reports that Ray brings: none may end Ray's poll, whatever it says."""

from __future__ import annotations

from typing import Any

import pytest

from jgr.serving.cluster.hearing import Hearing
from jgr.serving.cluster.protocol import PROTOCOL
from jgr.serving.cluster.series import Series
from jgr.serving.policies.digests import digest
from jgr.serving.policies.routing import Ask, Router

BITS = 12
SHAPE = {"event_tokens": 10.0, "item_tokens": 5.0, "other_tokens": 0.0}
ASK = Ask("1", "u:1", 100.0, (), 5.0, 0.0)


class World:
    """A router of replicas a and b, and what it hears. now_s: the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.policy = Router("front", bits=BITS)
        self.series = Series("front", clock=lambda: self.now_s)
        self.hearing = Hearing(self.policy, self.series)
        self.number = 0
        self.become("a", "b")

    def become(self, *names: str) -> None:
        self.policy.become(names)
        self.series.become(names)
        self.hearing.become(names)

    def hear(self, name: str, **stats: Any) -> None:
        self.number += 1
        self.hearing.hear(name, {"protocol": PROTOCOL, "number": self.number, **SHAPE, **stats})

    def cached(self) -> dict[str, float]:
        """Tokens of the user that each replica is known to hold."""
        return dict(zip(self.policy.nodes, self.policy.view(ASK).user.tolist(), strict=True))

    def ns(self) -> dict[str, float]:
        """What a token takes at each, as far as is known."""
        return dict(zip(self.policy.nodes, self.policy.view(ASK).ns.tolist(), strict=True))

    def others(self) -> dict[str, float]:
        """Tokens in flight at each that other routers have sent, as far as is known."""
        return dict(zip(self.policy.nodes, self.policy._others.tolist(), strict=True))


def test_a_filter_of_another_size_counts_as_empty_and_the_rest_of_the_report_as_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """fleet.digest_bits is changed while requests go on: for a while replicas have the old one."""
    world = World()
    for ns in (1e4, 2e4):
        world.now_s += 5
        world.hear("a", users=digest(["u:1"], BITS + 4), ns_per_token=ns)
    world.hear("b", users=digest(["u:1"], BITS), ns_per_token=3e4)
    assert world.cached() == {"a": 0, "b": 100}
    assert world.ns() == {"a": 2e4, "b": 3e4}
    assert world.series.ages() == {"a": 0, "b": 0}
    assert caplog.messages == [
        "a report of replica a cannot be read, and counts without what its caches hold: a digest must have 512 bytes, "
        "got 8192"
    ], "once"
    world.become("b")
    world.become("a", "b")
    world.hear("a", users=digest(["u:1"], BITS + 4))
    assert len(caplog.messages) == 2, "another replica of that name"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"ns_per_token": -1.0}, "ns_per_token: must be finite and not negative, got -1.0"),
        ({"sent": 5}, "'int' object has no attribute 'items'"),
    ],
)
def test_a_report_that_nothing_can_be_made_of_changes_nothing(
    caplog: pytest.LogCaptureFixture, bad: dict[str, Any], why: str
) -> None:
    world = World()
    world.hear("a", users=digest(["u:1"], BITS), ns_per_token=1e4)
    world.now_s += 5
    world.hear("a", **bad)
    world.hear("a", **bad)
    assert world.cached() == {"a": 100, "b": 0} and world.ns() == {"a": 1e4, "b": 0}
    assert world.series.ages() == {"a": 5, "b": 5}, "nothing was heard of either"
    assert caplog.messages == [f"a report of replica a cannot be read, and is left out: {why}"]
    world.hear("a", ns_per_token=2e4)
    assert world.ns() == {"a": 2e4, "b": 0} and world.hearing.shape["event_tokens"] == 10.0


def test_a_replica_is_silent_while_ray_brings_its_last_report_again() -> None:
    """Ray brings the reports of all, unpickled anew, where one is new."""
    world = World()
    for second in range(61):
        world.now_s = 100.0 + second
        world.hearing.hear("a", {"protocol": PROTOCOL, "number": 7, "sent": {"other": 500.0}, **SHAPE})
        world.hear("b", sent={"other": 100.0})
        world.policy.rank(ASK, round(world.now_s * 1e9))
        if second == 29:
            assert world.others() == {"a": 500, "b": 100}
    assert world.series.ages() == {"a": 60, "b": 0}
    assert world.others() == {"a": 0, "b": 100}, "what others have sent there is taken for done"


def test_a_replica_that_has_nothing_new_to_tell_is_heard_of() -> None:
    world = World()
    for _ in range(2):
        world.now_s += 20
        world.hear("a")
    assert world.series.ages() == {"a": 0, "b": 40}


def test_a_replica_of_another_protocol_is_a_stranger_as_long_as_it_is_there() -> None:
    world = World()
    world.hear("a", protocol=99, users=digest(["u:1"], BITS))
    assert world.hearing.strangers == {"a"} and world.cached() == {"a": 0, "b": 0}
    world.become("b")
    assert world.hearing.strangers == set()
