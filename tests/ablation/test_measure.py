# SPDX-License-Identifier: Apache-2.0
"""How variants are run, compared and timed, over pretended engines: order, verdicts, quiet and busy machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jgr.ablation import counts
from jgr.ablation.bat import BAT
from jgr.ablation.measure import Found, Waves, difference, measure
from jgr.ablation.report import lines, to_json
from jgr.ablation.system import ALL, NONE, System, Variant
from jgr.ablation.traffic import Request, waves
from jgr.ablation.xgr import XGR
from jgr.evaluation.machine import CpuTimes
from jgr.serving.api import Answer, Item, Timing, Usage

A, B = Variant(ALL, ()), Variant(NONE, ())
QUIET, BUSY = 0.0, 1.5


def answer(scores: dict[str, float], layout: Any = "user_prefix") -> Answer:
    ordered = sorted(scores.items(), key=lambda pair: -pair[1])
    return Answer(
        id="x",
        model="m",
        catalog_version="c",
        items=[Item(item_id=name, score=score, rank=at) for at, (name, score) in enumerate(ordered, 1)],
        usage=Usage(prompt_tokens=1, layout=layout, history_items=1, unknown_items=0, unknown_item_ids=[]),
        timing_ms=Timing(queue=0.0, prepare=0.0, device=0.0, total=0.0),
    )


class World:
    """Engines that take so many seconds for a wave, on a clock of their own, beside others that keep cores busy."""

    def __init__(
        self,
        seconds: dict[str, float],
        others: Callable[[int], float] = lambda turn: QUIET,
        known: bool = True,
    ) -> None:
        self.seconds, self.others, self.known = seconds, others, known
        self.now = self.busy = self.own = 0.0
        self.turns = 0
        self.log: list[str] = []
        self.closed: list[str] = []
        self.answers: dict[str, Callable[[Request | Any], Answer]] = {}
        self.fail_at: tuple[str, int] | None = None

    def make(self, variant: Variant) -> FakeEngine:
        return FakeEngine(self, variant.name)

    def clock(self) -> float:
        return self.now

    def sample(self) -> CpuTimes:
        if not self.known:
            raise FileNotFoundError("/proc/stat")
        return CpuTimes(self.busy, self.own, self.now)

    def work(self, name: str) -> None:
        self.log.append(name)
        seconds = self.seconds[name]
        self.now, self.own = self.now + seconds, self.own + seconds
        self.busy += seconds * (1 + self.others(self.log.count(name)))
        if self.fail_at == (name, self.log.count(name)):
            raise KeyboardInterrupt


class FakeEngine:
    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def rank(self, history: Any, layout: Any = None, **fields: Any) -> Any:
        if layout is not None:  # one request, asked again in another order of the prompt
            return self._world.answers.get(
                f"{self._name} {layout}", lambda _: answer({"a": 2.0, "b": 1.0}, layout)
            )(history)
        self._world.work(self._name)
        make = self._world.answers.get(self._name, lambda _: answer({"a": 2.0, "b": 1.0}))
        return [make(one) for one in history]

    recommend = rank

    def metrics(self) -> str:
        return '# TYPE jgr_prompt_tokens counter\njgr_prompt_tokens_total{source="computed"} 7.0\n'

    def close(self) -> None:
        self._world.closed.append(self._name)


def run(world: World, rounds: int = 4, requests: int = 8, system: System = BAT) -> Found:
    asked = [Request(f"u{n}", ["a"], ["a", "b"]) for n in range(requests)]
    parts: Sequence[Waves] = waves(asked, rounds, 1)
    return measure(system, [A, B], world.make, parts, sample=world.sample, clock=world.clock)


def test_variants_take_turns_in_changing_order_over_the_same_requests() -> None:
    world = World({ALL: 1.0, NONE: 2.0})
    found = run(world, rounds=3, requests=6)
    assert world.log == [*[ALL] * 2, *[NONE] * 4, *[ALL] * 4, *[NONE] * 2]
    assert [len(one.answers) for one in found.runs] == [6, 6]
    assert sorted(world.closed) == sorted([ALL, NONE])


def test_times_are_means_of_all_rounds_but_the_first_with_their_ratio() -> None:
    found = run(World({ALL: 0.5, NONE: 2.0}))
    assert found.times is not None
    assert (found.requests, found.timed, found.untimed) == (8, 6, "")
    assert found.times[ALL].mean_ms == pytest.approx(500.0)
    assert found.times[NONE].over_all == pytest.approx(4.0)
    assert found.times[NONE].interval_ms == pytest.approx((2000.0, 2000.0))
    assert "2,000 ms (2,000 to 2,000)" in "\n".join(lines(found))


def test_a_busy_machine_is_told_and_nothing_is_timed() -> None:
    found = run(World({ALL: 1.0, NONE: 1.0}, lambda turn: BUSY))
    assert found.times is None
    assert found.untimed == "not timed: busy (other processes kept 1.5 cores busy)"
    assert found.runs[0].counts["computed"] == 7
    assert found.untimed in lines(found)
    told = to_json(found, {})
    assert told["untimed"] == found.untimed
    assert [one["times"] for one in told["variants"]] == [None, None]
    assert [one["counts"]["computed"] for one in told["variants"]] == [7, 7]


def test_a_round_that_was_disturbed_in_one_turn_counts_for_no_variant() -> None:
    # Four requests a round: the fifth call of a variant is its first of the second round.
    found = run(World({ALL: 1.0, NONE: 1.0}, lambda turn: BUSY if turn == 5 else QUIET), requests=16)
    assert (found.timed, found.untimed) == (8, "")


def test_too_few_waves_have_no_interval() -> None:
    found = run(World({ALL: 1.0, NONE: 1.0}, lambda turn: BUSY if turn == 3 else QUIET))
    assert (found.times, found.timed) == (None, 0)
    assert found.untimed == "not timed: 4 quiet waves of requests (--concurrency), an interval takes 6"


def test_a_system_that_tells_nothing_is_no_quiet_one() -> None:
    found = run(World({ALL: 1.0, NONE: 1.0}, known=False))
    assert (found.times, found.untimed) == (
        None,
        "not timed: this system does not tell what other processes do",
    )
    found = run(World({ALL: 1.0, NONE: 1.0}), rounds=1)
    assert found.untimed == "not timed: a single round, which fills the caches"


def test_an_interrupt_closes_every_engine() -> None:
    world = World({ALL: 1.0, NONE: 1.0})
    world.fail_at = (NONE, 2)
    with pytest.raises(KeyboardInterrupt):
        run(world)
    assert sorted(world.closed) == sorted([ALL, NONE])


def test_progress_goes_up_to_its_end() -> None:
    world, told = World({ALL: 1.0, NONE: 1.0}), []
    asked = [Request(f"u{n}", ["a"], ["a", "b"]) for n in range(8)]
    measure(
        BAT, [A, B], world.make, waves(asked, 2, 3), lambda done, total, status: told.append((done, total)),
        world.sample, world.clock,
    )  # fmt: skip
    assert told[0] == (0, 9)  # two engines, three waves each, the comparison
    assert told[-1] == (9, 9)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_other_scores_are_wrong_unless_they_may_differ() -> None:
    world = World({ALL: 1.0, NONE: 1.0})
    world.answers[ALL] = lambda _: answer({"a": 1.0, "b": 1.5})
    found = run(world)
    assert found.differences[ALL].largest == pytest.approx(1.0)
    assert (found.differences[ALL].items, found.differences[ALL].is_right) == (8, False)
    assert found.differences[NONE].is_right
    assert any("WRONG: differ by 1" in line for line in lines(found))
    allowed = Variant(ALL, (), differs="it is another search")
    asked = [Request("u", ["a"], ["a", "b"])]
    found = measure(BAT, [allowed, B], world.make, waves(asked, 1, 1), sample=world.sample, clock=world.clock)
    assert found.differences[ALL].is_right
    assert f"{ALL} may differ: it is another search" in lines(found)


def test_another_order_of_the_prompt_is_compared_with_an_answer_in_that_order() -> None:
    world = World({ALL: 1.0, NONE: 1.0})
    world.answers[ALL] = lambda _: answer({"a": 5.0, "b": 6.0}, "item_prefix")
    world.answers[f"{NONE} item_prefix"] = lambda _: answer({"a": 5.0, "b": 6.00001}, "item_prefix")
    found = run(world)
    assert found.differences[ALL].largest == pytest.approx(1e-5, rel=1e-3)
    assert found.differences[ALL].is_right
    assert found.differences[NONE].reordered == 8  # beside the order with all on


def test_differences_of_candidates_and_of_places() -> None:
    one, other = answer({"a": 2.0, "b": 1.0}), answer({"a": 1.0, "b": 2.0})
    assert difference(BAT, one, other) == 1.0
    assert difference(XGR, one, other) == 0.0  # the same score at each place
    assert difference(BAT, one, answer({"a": 2.0, "c": 1.0})) == float("inf")
    assert difference(XGR, one, answer({"a": 2.0})) == float("inf")


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_not_the_same(score: float) -> None:
    one, other = answer({"a": 2.0, "b": 1.0}), answer({"a": 2.0, "b": score})
    for system in (BAT, XGR):
        assert difference(system, one, other) == difference(system, other, other) == float("inf")
    world = World({ALL: 1.0, NONE: 1.0})
    world.answers[ALL] = world.answers[NONE] = lambda _: answer({"a": score, "b": score})
    assert not run(world).differences[ALL].is_right


def test_counts_are_sums_over_the_labels_that_are_asked_for() -> None:
    series = """
# TYPE jgr_parts counter
jgr_parts_total{size="0"} 3.0
jgr_parts_total{size="64"} 5.0
jgr_parts_total{size="128"} 7.0
# TYPE jgr_batch_size histogram
jgr_batch_size_bucket{kind="rank",le="+Inf"} 4.0
jgr_batch_size_count{kind="rank"} 4.0
jgr_batch_size_sum{kind="rank"} 9.0
# TYPE jgr_cache_pages gauge
jgr_cache_pages{holder="free"} 100.0
jgr_cache_pages{holder="user"} 2.0
jgr_cache_pages{holder="item"} 6.0
# TYPE jgr_cache_events counter
jgr_cache_events_total{event="user_evicted"} 1.0
jgr_cache_events_total{event="user_stale"} 50.0
jgr_cache_events_total{event="item_evicted"} 10.0
"""
    names = ("parts", "user parts", "runs", "pages", "evicted", "to host")
    assert counts.read(series, names) == {
        "parts": 12, "user parts": 3, "runs": 4, "pages": 8, "evicted": 11, "to host": 0,
    }  # fmt: skip
