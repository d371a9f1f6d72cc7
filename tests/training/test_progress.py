# SPDX-License-Identifier: Apache-2.0
"""What a run of training writes and tells, what ends it, and which folders it refuses."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from jgr.config import ConfigError, UserError, override
from jgr.models import checkpoint
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.params import CheckpointError
from jgr.training import clock as clock_module
from jgr.training import run
from jgr.training.clock import Clock
from jgr.training.curves import plot_curves
from jgr.training.generator import train_generator
from jgr.training.progress import RunFolder
from jgr.training.run import LAG, making_way
from jgr.training.trainer import State
from tests.training.shortcuts import equal_steps_compiled_once
from tests.training.test_trainer import rule_config, rule_dataset


def make_way(out: str, fresh: bool, overwrite: bool) -> None:
    with making_way(out, fresh, overwrite):
        pass


SETTINGS = (
    "train.steps=12", "train.checkpoint_every=4", "train.warmup_steps=2", "train.dropout=0.2", "train.batch=10"
)  # fmt: skip
CONSTANT = (*SETTINGS, "train.schedule=constant")
"""For runs of other lengths, whose steps are the same then."""


@pytest.fixture(scope="module", autouse=True)
def one_program_for_equal_steps() -> Iterator[None]:
    """Most runs here take the same steps over the same data."""
    with equal_steps_compiled_once():
        yield


def stopped(folder: Path, settings: tuple[str, ...] = SETTINGS) -> None:
    """A run that stops after step 9, as by Ctrl-C."""

    def progress(done: int, total: int, note: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_generator(override(rule_config(folder), *settings), rule_dataset(), progress)


def test_a_run_that_diverges_is_not_saved(tmp_path: Path) -> None:
    config = override(rule_config(tmp_path / "ring"), *SETTINGS, "train.learning_rate=1e14")
    with pytest.raises(ConfigError, match=r"the loss of step 4 is nan: lower train\.learning_rate"):
        train_generator(config, rule_dataset())
    assert not (tmp_path / "ring").exists()


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "ring")
    with pytest.raises(
        ConfigError, match=r"run of other settings or data \(train\.seed was 0, now 7\): --fresh starts anew"
    ):
        train_generator(override(rule_config(tmp_path / "ring"), *SETTINGS, "train.seed=7"), rule_dataset())


def test_a_setting_that_is_newer_than_the_run_had_its_default_value_then(tmp_path: Path) -> None:
    stopped(tmp_path / "ring")
    described = tmp_path / "ring.training" / "run.json"
    run = json.loads(described.read_text())
    del run["train"]["item_loss"], run["train"]["skip_events"]
    described.write_text(json.dumps(run))
    with pytest.raises(
        ConfigError, match=r"data \(train\.skip_events was 0\.0, now 0\.5\): --fresh starts anew"
    ):
        train_generator(
            override(rule_config(tmp_path / "ring"), *SETTINGS, "train.skip_events=0.5"), rule_dataset()
        )
    train_generator(override(rule_config(tmp_path / "ring"), *SETTINGS), rule_dataset())
    assert (tmp_path / "ring" / "metrics.jsonl").exists()


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path, {}), pytest.raises(ConfigError, match="another training writes here"):
        RunFolder(tmp_path, {})
    RunFolder(tmp_path, {}).__exit__()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "ring")
    for path in (tmp_path / "ring.training" / "checkpoints").rglob("*"):
        if path.is_file() and path.parent.name in ("d", "ocdbt.process_0"):
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="the checkpoint of step 8 is damaged"):
        train_generator(override(rule_config(tmp_path / "ring"), *SETTINGS), rule_dataset())


def test_the_best_validated_weights_are_kept_and_patience_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the curves are drawn."""
    monkeypatch.setattr(run, "plot_curves", plot_curves)
    recalls, seen = iter([0.3, 0.5, 0.5, 0.4, 0.2, 0.9]), []

    def validate(cfg: DecoderConfig, params: DecoderParams) -> float:
        seen.append(np.asarray(params.embed))
        return next(recalls)

    settings = ("train.steps=40", "train.evaluate_every=2", "train.patience=2", "train.checkpoint_every=3")
    train_generator(
        override(rule_config(tmp_path / "ring"), *CONSTANT, *settings), rule_dataset(), validate=validate
    )
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["recall@10"]) for line in lines if "recall@10" in line]
    assert found == [(2, 0.3), (4, 0.5), (6, 0.5), (8, 0.4), (10, 0.2)]  # two in a row without a better one
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    np.testing.assert_array_equal(
        checkpoint.load(tmp_path / "ring")[1].embed, seen[2]
    )  # the latest of the best
    assert (tmp_path / "ring" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_ends_by_the_clock_with_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes three seconds: the minute is over long before the steps are."""
    looks = itertools.count(0, 3)
    monkeypatch.setattr(run, "Clock", functools.partial(Clock, clock=lambda: float(next(looks))))
    recalls, seen = iter([0.3, 0.2]), list[np.ndarray]()

    def validate(cfg: DecoderConfig, params: DecoderParams) -> float:
        seen.append(np.asarray(params.embed))
        return next(recalls)

    settings = (
        "train.steps=1000",
        "train.minutes=1",
        "train.evaluate_every=5",
        "train.checkpoint_every=1000",
    )
    config = override(rule_config(tmp_path / "ring"), *settings)
    train_generator(config, rule_dataset(), validate=validate)
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, 11))  # 60 s of two looks a step; the last one is validated too
    assert [(line["step"], line["recall@10"]) for line in lines if "recall@10" in line] == [
        (5, 0.3),
        (10, 0.2),
    ]
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "ring")[1].embed, seen[0])


def test_the_clock_has_the_schedules_place_by_time_or_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "COMPILING", 2)
    seconds = iter([0.0, 0.0, 20.0, 45.0, 70.0, 70.0, 119.0, 130.0, 130.0, 119.0])
    clock = Clock(2.0, 1000, clock=lambda: next(seconds))
    places = [clock.place(done) for done in (0, 1, 2, 2, 900, 990, 991)]
    # The schedule's time begins at 20 s, when the compiler is done, and ends at 120 s.
    assert places == [0, 1, 250, 500, 900, 990, 1000]
    assert clock.over and not clock.over  # at 130 s and at 119 s


@pytest.mark.parametrize(
    "damaged", [b"{\n", b"[]\n", b'{"loss": 1}\n', b'{"step": "\xff"}\n', b"[" * 10_000 + b"\n"]
)
def test_a_damaged_line_is_named_and_nothing_of_the_file_is_lost(tmp_path: Path, damaged: bytes) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 1, "loss": 2.0}\n' + damaged + b'{"step": 2, "lo')
    before = metrics.read_bytes()
    with (
        RunFolder(tmp_path, {}) as folder,
        pytest.raises(ConfigError, match=r"metrics\.jsonl:2: the line is damaged"),
    ):
        folder.latest(State({}, (), jnp.int32(0)))
    assert metrics.read_bytes() == before


def fixed(config: Any, params: Any) -> float:
    """A validation that always finds the same."""
    return 0.5


def test_every_step_is_told_of_with_a_loss_that_need_not_be_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = list[tuple[int, int, str]]()
    config = override(rule_config(tmp_path / "ring"), *SETTINGS, "train.evaluate_every=4")
    with caplog.at_level("INFO", "jgr"):
        train_generator(config, rule_dataset(), lambda *call: told.append(call), fixed)
    assert caplog.messages.count("compiling the step for batches of 10 x 6") == 1  # for those who see no bar
    assert told[0] == (0, 12, "compiling the step")
    steps = [(done, text) for done, total, text in told[1:] if text != "validating"]
    assert [done for done, _ in steps] == list(range(1, 13))
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    for done, text in steps:
        shown = losses[12 if done == 12 else max(1, done - LAG)]
        assert text.startswith(f"loss {shown:.3f}")
    assert (4, 12, "validating") in told and ", recall@10 0.5000" in steps[-1][1]


def test_what_tensorboard_reads_is_what_the_metrics_file_holds(tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.evaluate_every=4", f"train.tensorboard={tmp_path / 'board'}"]
    config = override(rule_config(tmp_path / "ring"), *settings)

    def stop(done: int, total: int, note: str) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_generator(config, rule_dataset(), stop, fixed)
    moved = override(config, f"train.tensorboard={tmp_path / 'other'}")
    train_generator(moved, rule_dataset(), validate=fixed)  # the folder does not make it another run
    assert scalars(tmp_path / "board"), "of the steps until the last checkpoint"
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    (path,) = (tmp_path / "other").iterdir()
    starts = [event for event in events(path) if event.HasField("session_log")]
    assert [(each.session_log.status, each.step) for each in starts] == [(event_pb2.SessionLog.START, 1)]
    assert scalars(tmp_path / "other") == {
        (name.replace("@", "_at_"), line["step"]): pytest.approx(value, rel=1e-6)
        for line in lines
        for name, value in line.items()
        if name != "step"
    }


def events(path: Path) -> Iterator[Any]:
    """The events of a file. Records: length (8 bytes), its checksum (4), data, its checksum (4)."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """What event files hold, by name and step."""
    return {
        (value.tag, event.step): value.simple_value
        for path in folder.iterdir()
        for event in events(path)
        for value in event.summary.value
    }


def test_what_is_there_decides_how_a_training_begins(tmp_path: Path) -> None:
    out, running = tmp_path / "ring", tmp_path / "ring.training"
    make_way(str(out), fresh=False, overwrite=False)  # nothing is there
    running.mkdir()
    make_way(str(out), fresh=False, overwrite=True)
    assert running.exists()  # an unfinished run goes on; it is no model
    with making_way(str(out), fresh=True, overwrite=False):
        assert not running.exists()
    running.rmdir()
    (out / "params").mkdir(parents=True)
    message = "ring holds a trained model: --overwrite replaces it, or give another train.out"
    with pytest.raises(UserError, match=message):
        make_way(str(out), fresh=False, overwrite=False)  # without its run it cannot go on
    running.mkdir()
    make_way(str(out), fresh=False, overwrite=False)
    with pytest.raises(UserError, match=message):
        make_way(str(out), fresh=True, overwrite=False)
    with RunFolder(running, {}), pytest.raises(ConfigError, match="another training writes here"):
        make_way(str(out), fresh=True, overwrite=True)
    with making_way(str(out), fresh=False, overwrite=True):
        assert not running.exists() and out.exists()  # the model stays until the new one is whole


def test_a_run_is_dropped_only_when_another_has_begun(tmp_path: Path) -> None:
    out, running, aside = tmp_path / "ring", tmp_path / "ring.training", tmp_path / "ring.training.aside"
    running.mkdir()
    (running / "kept").touch()
    with pytest.raises(UserError, match="no data"), making_way(str(out), fresh=True, overwrite=False):
        assert not running.exists()
        raise UserError("no data")
    assert (running / "kept").exists() and not aside.exists()
    with pytest.raises(UserError, match="nan"), making_way(str(out), fresh=True, overwrite=False):
        with RunFolder(running, {}):
            assert not aside.exists()
        raise UserError("nan")
    assert running.exists() and not (running / "kept").exists() and not aside.exists()
    running.rename(aside)  # as a kill leaves it
    make_way(str(out), fresh=False, overwrite=False)
    assert running.exists() and not aside.exists()


def test_a_name_that_ends_in_a_slash_is_the_same_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data"), making_way(f"{tmp_path / 'ring'}/", True, False):
        (tmp_path / "ring.training").mkdir()
        raise UserError("no data")
    config = override(rule_config(tmp_path / "ring"), *CONSTANT, "train.steps=2")
    train_generator(override(config, f"train.out={tmp_path / 'ring'}/"), rule_dataset())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring", "ring.training"]
    assert (tmp_path / "ring" / "params").is_dir()
    make_way(f"{tmp_path / 'ring'}/", fresh=False, overwrite=False)  # the model's own run is found


def test_a_full_disk_leaves_what_describes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = tmp_path / "ring.training"
    with RunFolder(running, {"seed": 1}):
        pass
    before = (running / "run.json").read_bytes()

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(ConfigError, match=r"run\.json: .*No space left on device"):
            RunFolder(running, {"seed": 1})
    assert (running / "run.json").read_bytes() == before
    with RunFolder(running, {"seed": 1}):
        pass


def test_a_model_without_room_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    config = override(rule_config(tmp_path / "ring"), *SETTINGS, "train.layers=1000000000")
    with pytest.raises(
        ConfigError, match=r"train\.layers, .*: there is no room for this model: it needs \d+ MB"
    ):
        train_generator(config, rule_dataset())
    assert not (tmp_path / "ring.training").exists()


def test_another_run_than_the_models_needs_overwrite(tmp_path: Path) -> None:
    config = override(rule_config(tmp_path / "ring"), *CONSTANT, "train.steps=4")
    train_generator(config, rule_dataset())
    with pytest.raises(
        ConfigError, match=r"train\.learning_rate was .*, now 0\.5.*: --overwrite starts anew"
    ):
        train_generator(override(config, "train.learning_rate=0.5"), rule_dataset())
    (tmp_path / "ring.training" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its run\.json is damaged"):
        train_generator(config, rule_dataset())
