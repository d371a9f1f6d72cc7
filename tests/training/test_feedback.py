# SPDX-License-Identifier: Apache-2.0
"""Training on impressions: windows against the events, the loss against numpy, a learnt rule through the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jgr.cli.evaluate import Options, evaluate
from jgr.config import ConfigError, UserError, override
from jgr.data.datasets import Dataset
from jgr.data.impressions import feedback_of, requests
from jgr.data.interactions import DataError, leave_one_out
from jgr.evaluation import validation
from jgr.evaluation.binary_metrics import auc, log_loss
from jgr.models import scorers
from jgr.models.climber import ClimberConfig, Feature
from jgr.models.params import CheckpointError
from jgr.training import feedback
from tests.training.feedback_world import CLICK, EVENTS, LIKE, USERS, config, world

TOGETHER = validation.WINDOWS
SCORES = jax.jit(feedback.scores, static_argnames="cfg")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of the whole recipe, which the tests only read."""
    dataset, settings = world(), config(tmp_path_factory.mktemp("feedback") / "model")
    validate = validation.feedback_auc(settings, dataset, {})
    return feedback.train_feedback(settings, dataset, {}, validate=validate)


def test_a_window_is_a_history_and_the_impressions_that_share_it(tmp_path: Path) -> None:
    data, settings = world().interactions, config(tmp_path)
    learnt = requests(data, data.train, 3)
    events = learnt.histories
    actions, scenarios, times = feedback_of(events)
    found = feedback.windows(learnt, np.arange(len(learnt)), 8, 3)
    assert found.shape == (len(learnt), 11, 4) and found.dtype == np.int32
    for i, window in enumerate(found):
        start, stop, shown = events.starts[i], events.stops[i], learnt.places(i)
        kept = np.arange(max(start, stop - 8), stop)
        for at, places in ((0, kept), (8, shown)):
            part = window[at : at + len(places)]
            assert part[:, 0].tolist() == events.rows[places].tolist()
            assert part[:, 2].tolist() == actions[places].tolist()
            assert (part[:, 3] == scenarios[places]).all()
        week = times[kept[0]] // 604_800 * 604_800
        assert window[: len(kept), 1].tolist() == (times[kept] - week).tolist()
        assert (window[8:, 1] == times[shown[0]] - week).all()
        assert (window[len(kept) : 8, 0] == -1).all() and (window[8 + len(shown) :, 0] == -1).all()
        assert stop == shown[0] and (shown % EVENTS < 14).all()  # of the training part

    batches = feedback.ImpressionWindows(learnt, settings.train, 3)
    assert batches.steps_per_epoch() == -(-len(learnt) // 64)
    seen = np.concatenate([batches.batch(step) for step in range(batches.steps_per_epoch())])
    assert {window.tobytes() for window in seen} == {window.tobytes() for window in found}
    later = world().interactions
    feedback_of(later.sequences)[2][:] += 5_000 * 604_800  # over 90 years: no 32 bits hold them
    assert (feedback.windows(requests(later, later.train, 3), np.arange(len(learnt)), 8, 3) == found).all()
    other = world().interactions
    feedback_of(other.sequences)[0][0] ^= 1
    changed = feedback.ImpressionWindows(requests(other, other.train, 3), settings.train, 3)
    assert changed.digest() != batches.digest()


@pytest.mark.slow
def test_the_loss_is_the_weighted_cross_entropy_of_all_tasks(trained: Path) -> None:
    dataset = world()
    cfg, params = scorers.load(trained)
    learnt = requests(dataset.interactions, dataset.interactions.train, 3)
    given = feedback.windows(learnt, np.arange(TOGETHER), 8, 3)
    scores, actions = SCORES(params, cfg, given, {})
    p, real = np.asarray(scores, np.float64), given[:, 8:, 0] >= 0
    assert (np.asarray(actions)[real] == given[:, 8:, 2][real]).all()
    nats = 0.0
    for task, (bit, weight) in enumerate(((CLICK, 1.0), (LIKE, 0.5))):
        done = given[:, 8:, 2] & bit > 0
        nats -= weight * np.log(np.where(done, p[..., task], 1 - p[..., task]))[real].sum()
    loss = jax.jit(feedback.feedback_loss(cfg, (0, 1), (1.0, 0.5), {}))
    found, targets = loss(params, given, jax.random.key(0))
    assert float(targets) == real.sum() and float(found) == pytest.approx(nats, rel=1e-4)


@pytest.mark.slow
def test_a_rule_is_learnt_and_served(trained: Path) -> None:
    dataset, settings = world(), config(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    areas = {line["step"]: line["auc"] for line in lines if "auc" in line}
    assert list(areas) == [60, 120] and max(areas.values()) > 0.9
    assert {
        "config.json",
        "digests.json",
        "params",
        "catalog.jsonl",
        "serving.json",
        "metrics.jsonl",
        "curves.png",
    } == {path.name for path in trained.iterdir()}
    cfg, params = scorers.load(trained)
    assert cfg == feedback.make_config(settings, dataset, {})
    assert validation.feedback_auc(settings, dataset, {})(cfg, params) == pytest.approx(max(areas.values()))

    text, report = evaluate(settings, dataset, Options(feedback=True, resamples=20))
    rows = report["rows"]["click"]
    assert rows["stu"]["auc"] > rows["logistic"]["auc"] > rows["popularity"]["auc"] > 0.45
    assert report["impressions"] == 3 * USERS and report["users"] == USERS
    assert any(line.startswith("click") for line in text)
    # The engine gives what the functions give.
    found = requests(dataset.interactions, dataset.interactions.test)
    parts = []
    for at in range(0, len(found), TOGETHER):
        chosen = np.arange(at, at + TOGETHER) % len(found)
        part, actions = SCORES(params, cfg, feedback.windows(found, chosen, 8, 3), {})
        parts.append(np.asarray(part)[np.asarray(actions) >= 0])
    offline = np.concatenate(parts)[: len(found.shown)]
    for at, (task, bit) in enumerate((("click", CLICK), ("like", LIKE))):
        labels = (found.actions & bit > 0).astype(int)
        assert report["rows"][task]["stu"]["log_loss"] == pytest.approx(
            log_loss(offline[:, at], labels), rel=1e-4
        )
        assert report["rows"][task]["stu"]["auc"] == pytest.approx(auc(offline[:, at], labels), abs=1e-3)


def test_climber_is_what_the_configuration_says(tmp_path: Path) -> None:
    dataset = world()
    settings = override(
        config(tmp_path, "climber"),
        "feedback.behaviours=click+like,click",
        "feedback.rows=7",
        "feedback.experts=2",
    )
    features = {"tags": np.ones((12, 2), np.int32), "price": np.ones((12, 1), np.float32)}
    cfg = feedback.make_config(settings, dataset, features)
    assert isinstance(cfg, ClimberConfig)
    assert cfg.behaviours == (CLICK | LIKE, CLICK) and (cfg.blocks, cfg.max_items, cfg.experts) == (2, 8, 2)
    assert cfg.features == (Feature("tags", 2, 7), Feature("price", 1, 0))
    assert (cfg.scenarios, cfg.actions, cfg.tasks) == (2, 3, ("click", "like"))
    with pytest.raises(ConfigError, match="max_items 9"):
        feedback.make_config(override(settings, "train.max_items=9"), dataset, features)
    with pytest.raises(UserError, match="the dataset has no action 'buy'"):
        feedback.make_config(override(settings, "feedback.behaviours=buy,click"), dataset, features)


def test_histories_of_more_than_68_years_are_refused(tmp_path: Path) -> None:
    settings, long = config(tmp_path), r"train\.model=stu: a history spans \d+ seconds, over 68 years"
    starts = np.arange(USERS) * EVENTS

    def aged(events: int, years: int) -> Dataset:
        """The world whose users did their first events that many years earlier."""
        dataset = world()
        times = feedback_of(dataset.interactions.sequences)[2]
        for at in range(events):
            times[starts + at] -= years * 365 * 86_400
        return dataset

    with pytest.raises(ConfigError, match=long):
        feedback.train_feedback(settings, aged(4, 69), {}, stop)
    with pytest.raises(Stopped):
        feedback.train_feedback(settings, aged(4, 67), {}, stop)
    # The requests of the validation read the last 8 events before the 14th: none of the first 4.
    validation.feedback_auc(settings, aged(4, 69), {})
    with pytest.raises(ConfigError, match=long):
        validation.feedback_auc(settings, aged(10, 69), {})


@pytest.mark.parametrize(("label", "how"), [(0, "never"), (LIKE, "always")])
def test_a_task_of_one_validated_label_is_named_before_the_training(
    tmp_path: Path, label: int, how: str
) -> None:
    dataset = world()
    actions = feedback_of(dataset.interactions.sequences)[0].reshape(USERS, EVENTS)
    actions[:, 14:17] = actions[:, 14:17] & ~LIKE | label
    validated = f"feedback.tasks: like {how} happens in the {3 * USERS} validated impressions"
    with pytest.raises(ConfigError, match=validated):
        validation.feedback_auc(config(tmp_path), dataset, {})


class Stopped(Exception):
    """What ends a training before its first step."""


def stop(done: int, total: int, status: str) -> None:
    raise Stopped


def test_a_run_with_other_features_is_refused(tmp_path: Path) -> None:
    dataset, settings = world(), config(tmp_path / "model", "climber")
    tags, price = np.ones((12, 2), np.int32), np.ones((12, 1), np.float32)

    def train(**features: np.ndarray) -> None:
        feedback.train_feedback(settings, dataset, features, stop)

    for _ in range(2):  # with the same ones it goes on
        with pytest.raises(Stopped):
            train(tags=tags, price=price)
    for other, name in (
        ({"tags": np.ones((12, 3), np.int32), "price": price}, "tags"),
        ({"tags": tags, "price": price * 2}, "price"),
        ({"tags": tags.astype(np.float32), "price": price}, "tags"),
        ({"tags": tags}, "price"),
    ):
        with pytest.raises(
            ConfigError, match=rf"run of other settings or data \(features\.{name} was .*, now .*\)"
        ):
            train(**other)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    dataset, settings = world(), config(tmp_path)
    for change, message in [
        ("train.dropout=0.1", "train.dropout: stu has none"),
        ("feedback.tasks=click,share", "feedback.tasks: the dataset has no action 'share'"),
        ("train.out=", "train.out"),
    ]:
        extra = ["feedback.weights=1,1"] if "tasks" in change else []
        with pytest.raises((ConfigError, DataError), match=message):
            feedback.train_feedback(override(settings, change, *extra), dataset, {})
    with pytest.raises(ConfigError, match="stu reads no features"):
        feedback.make_config(settings, dataset, {"price": np.zeros((12, 1), np.float32)})
    plain = replace(dataset, interactions=leave_one_out([[0, 1, 2, 3]]))
    with pytest.raises(UserError, match="no action 'click'"):
        feedback.train_feedback(settings, plain, {})
    for wrong, message in [("feedback.weights=1,2,3", "3 of them"), ("feedback.weights=0,1", "above 0")]:
        with pytest.raises(ConfigError, match=message):
            override(settings, wrong)


def test_a_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "stu", "stack": 3}')
    with pytest.raises(CheckpointError, match="not the config of a scorer"):
        scorers.load(tmp_path)
