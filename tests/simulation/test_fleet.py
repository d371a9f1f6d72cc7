# SPDX-License-Identifier: Apache-2.0
"""The live routers over a fleet in virtual time: times by hand, what must hold in every run, and the order of rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from jgr.serving.policies import routing
from jgr.serving.policies.routing import Ask, Router
from jgr.serving.policies.routing_terms import RULES, Rule
from jgr.simulation.fleet import MS, SECOND, Arrival, Loss, Outcomes, World, capacity, simulate, traffic

WORLD = World(
    nodes=4,
    users=1500,
    items=3000,
    candidates=20,
    item_tokens=16,
    user_room=150_000,
    item_room=16_000,
)
CAPACITY = 130.0
"""Requests a second that WORLD does in rotation; see `test_the_capacity_of_rotation`."""
NEVER = 1 << 62


def asks(*tokens: int, user: str = "", gap_ns: int = 0, left_ns: int = SECOND) -> list[Arrival]:
    return [
        Arrival(at * gap_ns, Ask(f"{at}", user, 0 if not user else 100, (), 0, count, left_ns), 0.0)
        for at, count in enumerate(tokens)
    ]


@cache
def run(rule: Rule, load: float, routers: int = 1, period_s: float = 2.0, left_ms: int = 500) -> Outcomes:
    return fresh(rule, load, routers, period_s, left_ms)


def fresh(
    rule: Rule,
    load: float,
    routers: int = 1,
    period_s: float = 2.0,
    left_ms: int = 500,
    seconds: int = 16,
    seed: int = 0,
    losses: Sequence[Loss] = (),
) -> Outcomes:
    """The last two thirds of a run."""
    world = replace(WORLD, left_ns=left_ms * MS)
    made = [Router(str(number), rule) for number in range(routers)]
    out = simulate(
        world,
        made,
        traffic(world, load * CAPACITY, seconds, seed),
        round(period_s * SECOND),
        warm_ns=seconds * SECOND // 3,
        seed=seed,
        losses=losses,
    )
    for router in made:
        router.check()
        assert not router.view(Ask("", "", 0, (), 0, 0)).running.any(), "every attempt has ended"
    return out


def hand(arrivals: Sequence[Arrival], **changes: int) -> Outcomes:
    """One node that needs 1 ms and 1 us a token, 1 us away."""
    world = replace(
        WORLD, nodes=1, fixed_ns=MS, token_ns=1000, way_ns=1000, user_room=1000, left_ns=SECOND, **changes
    )
    return simulate(world, [Router("0")], arrivals, NEVER)


def test_times_by_hand() -> None:
    out = hand(asks(1000, 500))
    assert out.latency_ns == [2 * MS + 2000, 3.5 * MS + 2000], "one after the other"
    assert (out.computed, out.prompt, out.busy_ns) == (1500, 1500, 3.5 * MS)
    # Until the answer is back, the router believes 1000 tokens to be in flight, or 500.
    assert out.work == {"node-0": 1000 * (2 * MS + 2000) + 500 * (3.5 * MS + 2000)}


def test_a_users_tokens_are_computed_once_where_they_are_kept() -> None:
    out = hand(asks(10, 10, 10, user="u", gap_ns=10 * MS))
    assert (out.computed, out.prompt) == (100 + 30, 330)
    assert out.hit_rate == pytest.approx(200 / 330)
    assert hand(asks(10, 10, user="u", gap_ns=10 * MS), item_room=0).computed == 120


def test_what_cannot_be_in_time_is_refused_and_another_node_is_asked() -> None:
    world = replace(WORLD, nodes=2, fixed_ns=MS, token_ns=1000, way_ns=0, left_ns=3 * MS)
    out = simulate(world, [Router("0", "round_robin")], asks(1000, 1000, 1500, 1900, 1900), NEVER)
    # Two of 2 ms each; nobody can do another one within 3 ms.
    assert (out.answered, out.refused, out.expired, out.attempts) == (2, 3, 0, 8)
    assert simulate(world, [Router("0")], asks(*[500] * 4), NEVER).answered == 4, "two behind two"


@pytest.mark.parametrize("rule", RULES)
def test_every_request_ends_once_and_a_run_can_be_repeated(rule: Rule) -> None:
    out = fresh(rule, 1.5, 2, seconds=2)
    assert out.answered + out.refused + out.expired == out.arrived > 200
    assert len(out.latency_ns) == out.answered > 0.3 * out.arrived
    assert max(out.latency_ns) <= 500 * MS and min(out.latency_ns) >= WORLD.fixed_ns + 2 * WORLD.way_ns
    assert out.arrived <= out.attempts <= 2 * out.arrived
    assert 0 < out.computed < out.prompt
    assert fresh(rule, 1.5, 2, seconds=2) == out
    assert fresh(rule, 1.5, 2, seconds=2, seed=1) != out


def test_the_capacity_of_rotation() -> None:
    assert capacity(WORLD, 20) == pytest.approx(CAPACITY, rel=0.05)


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("period_s", [0.2, 7.0])
def test_the_joint_score_keeps_hits_tail_and_balance(period_s: float, routers: int) -> None:
    joint, load = run("joint", 0.85, routers, period_s), run("load", 0.85, routers, period_s)
    patient = run("hit", 0.85, routers, period_s, left_ms=10**9)
    assert joint.goodput == 1
    assert joint.tokens <= 1.1 * patient.tokens
    assert joint.tokens < 0.85 * load.tokens
    assert joint.quantile_ms(0.99) <= 1.1 * load.quantile_ms(0.99)
    assert joint.imbalance <= 1.3


def test_the_other_rules_are_each_worse_at_something() -> None:
    at = {rule: run(rule, 0.85) for rule in RULES}
    for rule in ("load", "least", "round_robin", "random", "hash"):
        assert at[rule].tokens > 1.03 * at["joint"].tokens
    assert at["hash"].tokens < 0.95 * at["round_robin"].tokens, "users come back to where they were"
    assert at["hit"].goodput < 0.98, "everybody goes where everybody was"
    assert at["hit"].imbalance > 1.5
    p99 = {rule: out.quantile_ms(0.99) for rule, out in at.items()}
    assert p99["load"] < p99["round_robin"] < p99["random"]
    assert p99["joint"] < p99["hash"]


def test_without_reports_the_load_is_known_all_the_same() -> None:
    out = run("joint", 0.85, period_s=NEVER / SECOND)
    assert out.goodput == 1 and out.imbalance <= 1.3
    assert run("joint", 0.85).tokens < out.tokens < 0.85 * run("load", 0.85).tokens, (
        "users go where they were"
    )


@pytest.mark.parametrize("rule", ["joint", "hash"])
def test_nothing_is_lost_with_a_node_and_the_next_one_is_used(rule: Rule) -> None:
    """The routers learn it after 300 ms; a new node comes after two seconds."""
    loss = Loss("node-1", 6 * SECOND, 6 * SECOND + 300 * MS, 8 * SECOND)
    out = fresh(rule, 0.6, 2, losses=[loss])
    assert out.answered + out.refused + out.expired == out.arrived == run(rule, 0.6, 2).arrived
    assert out.goodput > 0.995 and out.attempts > out.arrived
    assert set(out.work) == {*WORLD.names, "node-1'"}
    assert out.work["node-1'"] > 0.5 * out.work["node-0"] > 0


def test_a_node_that_dies_by_hand() -> None:
    world = replace(WORLD, nodes=2, fixed_ns=MS, token_ns=1000, way_ns=1000, left_ns=SECOND)
    loss = Loss("node-0", MS, 5 * MS, 50 * MS)
    for rule in ("round_robin", "joint"):
        out = simulate(world, [Router("0", rule)], asks(1000, 1000, 500), NEVER, losses=[loss])
        # Two are at one node and one at the other; all end at node-1, one after the other.
        assert (out.answered, out.work["node-0'"]) == (3, 0)
        assert max(out.latency_ns) == 5.5 * MS + 2000
        assert 4 <= out.attempts <= 5


def test_routers_that_hear_the_same_old_reports_do_not_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items are most of the prompts and are kept everywhere, so load is all that tells nodes apart."""
    world = World(
        nodes=6, user_tokens=400.0, candidates=100, item_tokens=15, user_room=160_000, item_room=45_000
    )
    arrivals = traffic(world, 0.85 * 277, 16, seed=1)

    def p99_ms() -> float:
        routers = [Router("0"), Router("1")]
        return simulate(world, routers, arrivals, 4 * SECOND, 6 * SECOND, seed=1).quantile_ms(0.99)

    damped = p99_ms()
    monkeypatch.setattr(routing, "TRUST", 1.0)
    assert damped < 0.7 * p99_ms()
