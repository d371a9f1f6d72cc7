# SPDX-License-Identifier: Apache-2.0
"""The memory controllers on hand-made epochs, and under any signals at all (HLEM-18)."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.fields import UserError
from jgr.serving.policies.memory_adapter import LEAST, MOST, Adapter, fitted_slopes
from jgr.serving.policies.memory_control import DISTRUST, STEP, Full, Pid, Ppo, Predictor, Static
from jgr.serving.policies.memory_models import WIDTHS, BasePolicy, ControllerError, Trees
from jgr.serving.policies.memory_recovery import RELEASE, WINDOW, Recovery
from jgr.serving.policies.memory_signals import (
    ACTIONS,
    FEATURES,
    STATE,
    Limits,
    Signals,
    require_room,
    reward,
    state,
)

LIMITS = Limits()
GOOD = Signals(0.2, 0.3, 0.6, 8192.0, 0.02, 24.0, 300)


def base(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """The arrays of a base policy with random weights."""
    random = np.random.default_rng(seed)
    sizes = (STATE, *WIDTHS, len(ACTIONS))
    arrays: dict[str, Any] = {"features": np.array(FEATURES), "actions": np.array(ACTIONS)}
    for at in range(3):
        arrays[f"w{at}"] = random.standard_normal(sizes[at : at + 2]).astype(np.float32)
        arrays[f"b{at}"] = random.standard_normal(sizes[at + 1]).astype(np.float32)
    return arrays | changed


def stump(feature: int, threshold: float, below: float, above: float) -> dict[str, Any]:
    """The arrays of one tree with one question."""
    leaf = [[-1, -1]]
    return {
        "features": np.array(FEATURES),
        "actions": np.array(ACTIONS),
        "feature": np.array([[feature, *leaf[0]]], np.int32),
        "threshold": np.array([[threshold, 0, 0]], np.float32),
        "left": np.array([[1, 0, 0]], np.int32),
        "right": np.array([[2, 0, 0]], np.int32),
        "value": np.array([[0, below, above]], np.float32),
        "start": np.array([1.0], np.float32),
    }


def test_state_and_reward_of_an_epoch_computed_by_hand() -> None:
    found = state(GOOD, 0.4, LIMITS)
    np.testing.assert_allclose(found, [0.2, 0.3, 0.6, 0.4, 0.02, 0.4, 0.2], rtol=1e-6)
    late = Signals(0.2, 0.3, 0.6, 1e6, 0.1, 45.0, 300)
    assert state(late, 0.4, LIMITS)[3] == 1.0
    assert reward(GOOD, LIMITS) == pytest.approx(0.98)
    assert reward(late, LIMITS) == pytest.approx(0.9 - 0.5)
    assert reward(Signals(0, 0, 0, 0, 1.0, 900.0, 0), LIMITS) == 1.0


def test_the_base_policy_is_the_formula_and_moves_are_clipped() -> None:
    arrays = base()
    found = state(GOOD, 0.89, LIMITS)
    hidden = found.astype(np.float64)
    for at in range(2):
        hidden = np.tanh(hidden @ arrays[f"w{at}"] + arrays[f"b{at}"])
    logits = hidden @ arrays["w2"] + arrays["b2"]
    policy = BasePolicy(arrays)
    np.testing.assert_allclose(policy.logits(found), logits, rtol=1e-4)
    up = base(w2=np.zeros((WIDTHS[1], 5), np.float32), b2=np.array([0, 0, 0, 0, 9], np.float32))
    assert Ppo(LIMITS, BasePolicy(up), 0.5).decide(GOOD) == pytest.approx(0.54)
    assert Ppo(LIMITS, BasePolicy(up), 0.89).decide(GOOD) == LIMITS.most


def test_a_fresh_adapter_changes_nothing() -> None:
    calm = [Signals(0.2, 0.3, 0.6, 8000.0 + 10 * at, 0.01, 24.0 + at % 3 * 0.1, 300) for at in range(40)]
    alone, corrected = (make(LIMITS, BasePolicy(base(3)), 0.5) for make in (Ppo, Full))
    assert [alone.decide(each) for each in calm] == [corrected.decide(each) for each in calm]


def test_the_adapter_learns_where_the_latency_is_less() -> None:
    adapter, random = Adapter(1), np.random.default_rng(2)
    for _ in range(200):
        split = float(random.uniform(0.2, 0.8))
        seen = state(GOOD, split, LIMITS)
        after = Signals(0.2, 0.3, 0.6, 8192.0, 0.0, 30.0 + 60.0 * (split - 0.3) ** 2, 300)
        adapter.observe(seen, 2, split, after, LIMITS)
    assert adapter.correct(state(GOOD, 0.7, LIMITS), 2) == 0.0
    for _ in range(1200):
        adapter.learn()
    assert -MOST <= adapter.correct(state(GOOD, 0.75, LIMITS), 2) < -1e-5


def test_slopes_are_those_of_ordinary_regression_and_noise_has_none() -> None:
    random = np.random.default_rng(3)
    states, splits = random.uniform(0.1, 0.9, (400, STATE)), random.uniform(0.2, 0.8, 400)
    noise = 0.04 * random.standard_normal(400)
    at = np.arange(400)
    bent = 0.8 + 2.0 * (splits - 0.5) ** 2 + noise
    found = fitted_slopes(states, splits, bent, at)
    sure = found != 0
    assert sure.mean() > 0.8 and (np.abs(splits[~sure] - 0.5) < 0.1).mean() > 0.9
    np.testing.assert_allclose(found[sure], 4.0 * (splits[sure] - 0.5), atol=0.25)
    assert (fitted_slopes(states, splits, 0.8 + noise, at) != 0).mean() < 0.1
    still = np.full(400, 0.5)
    assert not fitted_slopes(states, still, 0.8 + noise, at).any()


def test_the_learning_rate_follows_the_latency_and_too_few_epochs_teach_nothing() -> None:
    adapter = Adapter()
    late = Signals(0.2, 0.3, 0.6, 8192.0, 1.0, 60.0, 300)
    for _ in range(LEAST - 1):
        adapter.observe(state(GOOD, 0.5, LIMITS), 2, 0.5, late, LIMITS)
    adapter.learn()
    assert adapter.correct(state(GOOD, 0.5, LIMITS), 2) == 0.0
    assert adapter.rate == pytest.approx(1e-3 * (0.9**63 + 2.0 * (1 - 0.9**63)))


def test_a_step_of_three_sigma_is_a_burst_at_once_and_ends_after_calm_epochs() -> None:
    recovery, random = Recovery(), np.random.default_rng(0)
    for p99 in 30.0 + random.standard_normal(30):
        recovery.detect(float(min(p99, 31.5)))
    assert recovery.detect(30.0 + 3.0 * recovery.spread_ms() + 0.5)
    usual = (recovery._mean, recovery.spread_ms())
    assert recovery.detect(90.0) and (recovery._mean, recovery.spread_ms()) == usual
    assert [recovery.detect(30.0) for _ in range(RELEASE)] == [True] * (RELEASE - 1) + [False]


def test_false_alarms_on_normal_noise_are_below_five_percent() -> None:
    recovery, random = Recovery(), np.random.default_rng(5)
    alarms = [recovery.detect(float(30.0 * (1 + 0.05 * each))) for each in random.standard_normal(2000)]
    begins = sum(now and not before for before, now in pairwise(alarms))
    assert 0 < begins / 2000 < 0.05


def test_a_burst_gives_users_room_only_where_hot_users_make_it() -> None:
    for hot, goes in ((0.6, -0.04), (0.3, 0.0)):
        controller = Full(LIMITS, BasePolicy(base(3)), 0.5)
        for _ in range(WINDOW):
            controller.decide(GOOD)
        before = controller.split
        after = controller.decide(Signals(hot, 0.3, 0.6, 8192.0, 0.5, 90.0, 300))
        assert controller.bursting
        assert after - before == pytest.approx(goes)


def test_without_its_parts_the_whole_controller_is_the_learnt_policy() -> None:
    random = np.random.default_rng(4)
    told = [Signals(0.6, 0.3, 0.6, 8192.0, 0.1, float(p99), 300) for p99 in random.uniform(20.0, 90.0, 300)]

    def course(corrects: bool, recovers: bool) -> list[float]:
        controller = Full(LIMITS, BasePolicy(base(3)), 0.5, corrects=corrects, recovers=recovers)
        controller._adapter.correct = lambda state, action: 0.01  # type: ignore[method-assign]
        controller._distrusted = lambda signals: False  # type: ignore[method-assign]
        return [controller.decide(signals) for signals in told]

    alone = Ppo(LIMITS, BasePolicy(base(3)), 0.5)
    assert course(False, False) == [alone.decide(signals) for signals in told]
    both, corrected, ruled = course(True, True), course(True, False), course(False, True)
    assert corrected == pytest.approx([min(0.9, 0.5 + 0.01 * at) for at in range(1, 301)])
    assert ruled[-1] < 0.5 and ruled != both != corrected


def test_without_signals_the_border_goes_to_the_safe_split_and_an_idle_epoch_moves_nothing() -> None:
    controller = Ppo(LIMITS, BasePolicy(base()), 0.62)
    assert controller.decide(None) == pytest.approx(0.58)
    assert controller.decide(Signals(math.nan, 0.3, 0.6, 8192.0, 0.0, 24.0, 300)) == pytest.approx(0.54)
    assert controller.decide(None) == pytest.approx(0.5)
    assert controller.decide(None) == pytest.approx(0.5)
    assert controller.decide(Signals(0, 0, 0, 0, 0, 0, 0)) == pytest.approx(0.5)


def test_three_worse_epochs_in_a_row_end_the_trust_in_what_was_learnt() -> None:
    up = base(w2=np.zeros((WIDTHS[1], 5), np.float32), b2=np.array([0, 0, 0, 0, 9], np.float32))
    controller = Full(LIMITS, BasePolicy(up), 0.5)
    splits = [controller.decide(Signals(0.2, 0.3, 0.6, 8192.0, 0.1, p99, 300)) for p99 in (32, 36, 40, 44)]
    np.testing.assert_allclose(splits, [0.54, 0.58, 0.54, 0.5])


def test_the_trust_comes_back_after_so_many_epochs() -> None:
    controller = Full(LIMITS, BasePolicy(base()), 0.5)
    later = [Signals(0.2, 0.3, 0.6, 8192.0, 0.1, p99, 300) for p99 in (32, 36, 40, 44, *[44] * 20)]
    distrusted = [controller._distrusted(signals) for signals in later]
    first = distrusted.index(True)
    assert distrusted == [False] * first + [True] * DISTRUST + [False] * (24 - first - DISTRUST)


def test_a_correction_comes_on_top_of_the_largest_action_and_the_docs_say_so() -> None:
    up = base(w2=np.zeros((WIDTHS[1], 5), np.float32), b2=np.array([0, 0, 0, 0, 9], np.float32))
    controller = Full(LIMITS, BasePolicy(up), 0.5)
    controller._adapter.correct = lambda state, action: MOST  # type: ignore[method-assign]
    assert controller.decide(GOOD) == pytest.approx(0.5 + STEP + MOST) == pytest.approx(0.56)
    docs = " ".join((Path(__file__).parents[3] / "docs/embeddings.md").read_text().split())
    assert "at most 4 % of the pages at once, `full` by at most 6 %" in docs


def test_pid_moves_towards_the_dearer_misses() -> None:
    rows_miss = Signals(0.2, 0.9, 0.1, 8192.0, 0.0, 24.0, 300)
    users_miss = Signals(0.2, 0.1, 0.9, 8192.0, 0.0, 24.0, 300)
    assert Pid(LIMITS, 0.5).decide(rows_miss) == pytest.approx(0.5 + STEP)
    assert Pid(LIMITS, 0.5).decide(users_miss) == pytest.approx(0.5 - STEP)
    equal = Signals(0.2, 0.5, 0.5, 8192.0, 0.0, 24.0, 300)
    assert Pid(LIMITS, 0.5).decide(equal) == 0.5
    # With prices 1 : 4 the error is .25 * .5 - .5 = -.375, and the move .11 times that, above a step.
    assert Pid(LIMITS, 0.5, 1.0, 4.0).decide(equal) == pytest.approx(0.5 - STEP)


def test_the_predictor_goes_to_the_nearest_of_the_best_splits() -> None:
    assert Predictor(LIMITS, Trees(stump(STATE, 0.3, 0.5, 0.9)), 0.5).decide(GOOD) == pytest.approx(0.3)
    assert Predictor(LIMITS, Trees(stump(STATE, 0.7, 0.9, 0.5)), 0.5).decide(GOOD) == pytest.approx(0.72)
    rows = np.zeros((2, STATE + 1), np.float32)
    rows[1, 0] = 1.0
    np.testing.assert_allclose(Trees(stump(0, 0.5, 2.0, 3.0)).predict(rows), [3.0, 4.0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"features": np.array(FEATURES[:6])}, "state of 6 numbers"),
        ({"w0": np.zeros((6, 64), np.float32)}, "w0 is float32"),
        ({"w1": np.full((64, 128), np.nan, np.float32)}, "w1 holds numbers"),
        ({"b2": np.zeros(5)}, "b2 is float64"),
        ({"actions": np.array([-0.1, -0.02, 0, 0.02, 0.1])}, "moves"),
    ],
)
def test_arrays_of_another_controller_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ControllerError, match=said):
        BasePolicy(base(**changed))
    missing = base()
    del missing["b1"]
    with pytest.raises(ControllerError, match="no array b1"):
        BasePolicy(missing)


def test_a_tree_that_would_not_end_is_refused() -> None:
    circle = stump(0, 0.5, 1.0, 2.0)
    circle["left"] = np.array([[0, 0, 0]], np.int32)
    with pytest.raises(ControllerError, match="behind its parent"):
        Trees(circle)
    with pytest.raises(ControllerError, match="does not have"):
        Trees(stump(STATE + 1, 0.5, 1.0, 2.0))


def test_limits_that_leave_no_room_are_an_error_with_the_figures() -> None:
    require_room(LIMITS, 1000, user_bytes=99, batch_bytes=100)
    with pytest.raises(UserError, match=r"memory.most \(0.9\).* 1000.* 101"):
        require_room(LIMITS, 1000, user_bytes=101, batch_bytes=10)
    with pytest.raises(UserError, match=r"memory.least \(0.1\).* 100 bytes of 1000.* 101"):
        require_room(LIMITS, 1000, user_bytes=1, batch_bytes=101)
    with pytest.raises(UserError, match="least <= safe"):
        Limits(least=0.6)


shares = st.floats(0, 1) | st.just(math.nan) | st.floats(1, 2)
epoch = st.none() | st.builds(
    Signals,
    shares,
    shares,
    shares,
    st.floats(0, 1e5) | st.just(math.inf),
    shares,
    st.floats(0, 1e4),
    st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(epoch, max_size=30), st.sampled_from(["static", "pid", "predictor", "ppo", "full"]))
def test_whatever_is_told_the_border_stays_within_its_ends_and_moves_by_steps(
    told: list[Signals | None], name: str
) -> None:
    limits = Limits(0.2, 0.7, 0.4)
    made = {
        "static": lambda: Static(limits),
        "pid": lambda: Pid(limits),
        "predictor": lambda: Predictor(limits, Trees(stump(0, 0.5, 1.0, 2.0))),
        "ppo": lambda: Ppo(limits, BasePolicy(base(1))),
        "full": lambda: Full(limits, BasePolicy(base(1))),
    }
    controller: Any = made[name]()
    before = controller.split
    for signals in told:
        after = controller.decide(signals)
        controller.learn()
        assert limits.least <= after <= limits.most
        far = STEP + MOST if name == "full" else STEP
        assert name == "predictor" or abs(after - before) <= far + 1e-9
        if signals is not None and signals.whole and signals.requests == 0:
            assert after == before
        before = after
