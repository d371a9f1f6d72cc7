# SPDX-License-Identifier: Apache-2.0
"""Metrics of feedback where the labels do not define all of them, against values worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jgr.cli.evaluate import or_null
from jgr.data.impressions import feedback_of, requests
from jgr.evaluation import feedback
from jgr.evaluation.served import EvaluationError
from jgr.models.scorers import Needs
from tests.training.feedback_world import CLICK, world

INTERACTIONS: Any = SimpleNamespace(actions=("click", "like"))
# Two users' impressions: a click and none, two clicks; nobody likes anything.
FOUND: Any = SimpleNamespace(
    users=np.array([3, 9]), owners=np.array([0, 0, 1, 1]), actions=np.array([1, 0, 1, 1])
)
SCORES = {
    "model": np.array([[0.9, 0.1], [0.1, 0.2], [0.5, 0.3], [0.3, 0.4]]),
    "other": np.array([[0.2, 0.1], [0.4, 0.1], [0.6, 0.1], [0.3, 0.1]]),
}


def measured() -> feedback.Measured:
    return feedback.measure(SCORES, INTERACTIONS, FOUND, ("click", "like"), "model", resamples=200)


def test_resamples_without_both_labels_are_left_out_of_the_interval() -> None:
    """The first user twice: 1 against 0. Both users: 1 against 1/3. The second twice: no AUC."""
    found = measured()
    assert [found.rows["click"][name]["auc"] for name in ("model", "other")] == [1.0, pytest.approx(1 / 3)]
    assert found.differences["click"]["other"] == pytest.approx((2 / 3, 2 / 3, 1.0))


def test_a_task_of_one_label_has_a_loss_and_no_auc_and_the_others_stay() -> None:
    found = measured()
    row = found.rows["like"]["other"]
    assert row["log_loss"] == pytest.approx(-math.log(0.9))
    assert all(math.isnan(x) for x in (row["auc"], row["gauc"], *found.differences["like"]["other"]))
    assert any("nan" in line for line in feedback.lines(found, "model"))


def test_json_has_null_where_nothing_is_defined() -> None:
    text = json.dumps(or_null(asdict(measured())), allow_nan=False)
    assert json.loads(text)["differences"]["like"] == {"other": [None, None, None]}
    assert json.loads(text)["rows"]["like"]["model"]["auc"] is None


@pytest.mark.parametrize("learnt_too", [True, False])
def test_a_scenario_that_is_not_known_is_one_of_its_own(learnt_too: bool) -> None:
    """The log knows no scenario of what is measured, nor of a part of what is learnt from."""
    data = world().interactions
    actions, scenarios, _ = feedback_of(data.sequences)
    if learnt_too:
        scenarios[::3] = -1
    learnt, found = requests(data, data.train), requests(data, data.test)
    scenarios[found.shown] = -1
    clicked, unknown = actions[learnt.shown] & CLICK, scenarios[learnt.shown] == -1
    assert unknown.any() == learnt_too
    rate = (clicked[unknown].sum() + feedback.PRIOR * clicked.mean()) / (unknown.sum() + feedback.PRIOR)
    shares = feedback.Shares(data, learnt, bit=0)
    of_scenario = shares.inputs(found, own=False)[:, 2]
    assert of_scenario == pytest.approx(math.log(rate / (1 - rate)))
    assert np.isfinite(shares.inputs(learnt, own=True)).all()


@pytest.mark.parametrize(("label", "how"), [(0, "never"), (CLICK, "always")])
def test_a_task_of_one_label_in_training_is_named(label: int, how: str) -> None:
    data = world().interactions
    actions = feedback_of(data.sequences)[0]
    actions[:] = actions & ~CLICK | label
    with pytest.raises(EvaluationError, match=f"click {how} happens in training"):
        feedback.baselines(data, requests(data, data.test), ("click",))


def test_a_request_does_not_name_a_scenario_that_is_not_known() -> None:
    dataset = world()
    found = requests(dataset.interactions, dataset.interactions.test)
    feedback_of(found.histories)[1][found.places(0)] = -1
    unknown, known, *_ = feedback.bodies(dataset.catalog, found, Needs(8, scenarios=2, slots=(2,)), 8)
    assert unknown.keys() == {"history", "candidates", "priority"}
    scenario = int(found.scenarios[1])
    assert (known["scenario"], known["context"]) == (scenario, {"slot0": scenario})
