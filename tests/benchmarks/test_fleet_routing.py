# SPDX-License-Identifier: Apache-2.0
"""The live benchmark of a fleet's router, small: its requests, its clock, and what its claims are about."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks import fleet_clock, fleet_routing
from benchmarks.titles import title
from jgr.data.preparation.prepare import Options, prepare
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies.jobs import Profile, Start
from jgr.serving.policies.sources import PlannedPrompt
from jgr.traffic.replay import Replay


def rows(share: float, **factors: tuple[float, float]) -> list[dict[str, Any]]:
    """Runs of two ages of reports; of each rule, the factors of its tokens and of its latencies."""
    return [
        {
            "traffic": "t",
            "rule": rule,
            "load": share,
            "report_s": age_s,
            "fronts": fronts,
            "repeat": 0,
            "answered": 100,
            "tokens_an_answer": 1000 * tokens,
            "latency_ms": [np.arange(100) * late] * 5,
            "imbalance": 1 + share * fronts,
        }
        for age_s in (0.2, 2.0)
        for fronts in (1, 2)
        for rule, (tokens, late) in factors.items()
    ]


def test_claims_are_about_the_worst_load_over_all_ages_and_fronts() -> None:
    found = fleet_routing.claims(
        [
            *rows(0.5, joint=(1.0, 2.0), hit=(1.0, 9.0), load=(5.0, 1.0)),
            *rows(1.0, joint=(3.0, 1.0), hit=(2.0, 9.0), load=(5.0, 1.0)),
        ]
    )
    assert [claim.value for claim in found] == [1.5, 2.0, 2.5]
    assert all(claim.id.startswith("fleet-routing-") and claim.title.endswith("; t, live") for claim in found)
    assert not any(claim.holds for claim in found)
    assert len({title(claim.to_json()) for claim in found}) == 3


def test_what_runs_again_counts_for_the_imbalance_alone() -> None:
    once = rows(0.5, joint=(1.0, 2.0), hit=(1.0, 9.0), load=(5.0, 1.0))
    again = [
        row | {"repeat": 1, "imbalance": 4.0, "tokens_an_answer": 1.0}
        for row in once
        if row["rule"] == "joint" and (row["fronts"], row["report_s"]) == (2, 2.0)
    ]
    *before, _ = fleet_routing.claims(once)
    *after, skewed = fleet_routing.claims([*once, *again])
    assert after == before
    assert (skewed.value, skewed.interval) == (3.0, (2.0, 4.0)), "the mean at the worst age of reports"


def test_the_tail_has_an_interval_of_seconds_that_both_rules_were_sent() -> None:
    calm, busy = np.arange(100.0), np.arange(100.0) + 100
    base = [{"latency_ms": [calm, busy] * 20}]
    same, (low, high) = fleet_routing.tail(base, base)
    assert (same, low, high) == (1.0, 1.0, 1.0), "who meets the same busy seconds differs by nothing"
    twice = [{"latency_ms": [2 * each for each in [calm, busy] * 20]}]
    assert fleet_routing.tail(twice, base) == (2.0, (2.0, 2.0))
    once = [{"latency_ms": [calm, busy] * 19 + [calm, busy * 3]}]
    worse, (low, high) = fleet_routing.tail(once, base)
    assert low == 1.0 < worse < high


def test_a_run_has_the_latencies_of_each_of_its_seconds_and_its_own_work_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fleet:
        host, port = "127.0.0.1", 1
        flights = iter(({"a": 9.0}, {"a": 6.0, "b": 2.0}))
        """Before the run, and in it."""

        def begin(self, rule: str, report_s: float) -> None: ...

        def counts(self) -> fleet_clock.Counts:
            return fleet_clock.Counts()

        def flown(self) -> dict[str, float]:
            return next(self.flights)

    sent: list[tuple[float, float, int]] = []

    def run(driver: fleet_routing.Driver, rate: float, seconds: float, seed: int) -> Any:
        sent.append((rate, seconds, seed))
        due_s = np.array([0.1, 2.0, 2.9, 3.5])
        verdicts = [SimpleNamespace(status="200"), SimpleNamespace(status="503")]

        class Found(SimpleNamespace):
            def __len__(self) -> int:
                return 4

        return Found(due_s=due_s, began_s=due_s, end_s=due_s + 0.25, verdicts=verdicts, ended=[0, 0, 0, 1])

    monkeypatch.setattr(fleet_routing.Driver, "_send", run)
    driver = fleet_routing.Driver(Fleet(), fleet_routing.Traffic("t", []), 2)  # type: ignore[arg-type]
    (row,) = driver.sequence("joint", 2.0, {0.5: 10.0}, 5.0, 4.0)
    assert sent == [(7.0, 5.0, 0), (10.0, 4.0, 50)]
    assert [each.round(6).tolist() for each in row["latency_ms"]] == [[250.0], [], [250.0, 250.0], []]
    assert row["imbalance"] == fleet_routing.rounded(6 / (8 / 4))
    assert fleet_routing.imbalance({}) == 1.0


def test_each_rule_runs_at_each_age_that_it_hears_of() -> None:
    one, two = (fleet_routing.sequences(fronts, quick=False) for fronts in (1, 2))
    assert set(one) >= set(two) and len(set(two)) == 9
    assert [age_s for rule, age_s in two if rule == "joint"] == [0.2, 2.0, 7.0] * 3
    assert {rule for rule, _ in one} == {*fleet_routing.RULES, *fleet_routing.DEAF}
    assert len(fleet_routing.sequences(1, quick=True)) == 3


def test_requests_are_the_events_of_some_users_in_their_order(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    lines = [
        f"{user}::{1 + (user * 7 + n) % 40}::5::{1000 + n * 10 + user}"
        for n in range(9)
        for user in range(1, 5)
    ]
    lines += [f"1::{41 + n}::5::{5000 + n}" for n in range(9)] + [
        f"3::{41 + n}::5::{6000 + n}" for n in range(5)
    ]
    (raw / "ratings.dat").write_text("\n".join(lines) + "\n")
    (raw / "movies.dat").write_text("\n".join(f"{n}::Title {n} (2000)::Drama" for n in range(1, 60)) + "\n")
    prepare(Options("movielens-1m", raw, tmp_path / "out", min_user=1, min_item=1, allow_counts=True))
    replay = Replay(tmp_path / "out", item_tokens=10, candidates=5, user_tokens=60, profile_tokens=20)
    found = [msgspec.json.decode(request.body) for request in fleet_routing.requests(replay, users=2)]
    assert {body["user_id"] for body in found} == {"u0", "u3"}
    assert [body["user_id"] for body in found] == [
        f"u{access.user}" for access in replay.accesses() if access.user in (0, 3)
    ]
    histories = {
        body["user_id"]: {tuple(b["history"]) for b in found if b["user_id"] == body["user_id"]}
        for body in found
    }
    assert all(len(each) == 1 for each in histories.values()), "a user's prompt stays the same"
    assert all(len(body["candidates"]) == 5 for body in found)


def test_an_executor_waits_for_what_its_tokens_cost_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(fleet_clock.time, "sleep", waited.append)
    profile = Profile("rank", 1, 64, 2, packed=True, context=64)
    executor = fleet_clock.Clocked([profile])
    executor.warm_up(lambda done, total, label: None)
    assert executor.costs == {profile: fleet_clock.cost_s(64, 0)}
    token = Content.of(np.zeros(1, np.int32))
    prompt = make_prompt(token, np.zeros(1, np.int32), [(0, token), (1, token)])
    plan = PlannedPrompt("user_prefix", (), computed_tokens=30, cached_tokens=12)
    work = SegmentsWork(prompt, columns=np.zeros(2, np.int32), plan=plan)
    (outcome,) = executor.launch(Start(0, 0, profile, ()), [work])
    assert len(outcome.scores) == 2
    assert waited == [fleet_clock.cost_s(30, 12)]
    assert executor.counts == (1, 42, 12, waited[0])
