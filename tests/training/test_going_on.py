# SPDX-License-Identifier: Apache-2.0
"""A run that is killed or stopped goes on as if nothing had happened, and one that has ended goes on to more steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import ConfigError, override
from jgr.models import checkpoint, manifest
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.params import CheckpointError
from jgr.training.generator import train_generator
from jgr.training.progress import RunFolder
from jgr.training.trainer import State
from tests.training.shortcuts import equal_steps_compiled_once
from tests.training.test_progress import CONSTANT, SETTINGS, make_way, stopped
from tests.training.test_trainer import rule_config, rule_dataset

# Trains, and kills its own process with SIGKILL as soon as step 10 is done: two steps after a checkpoint.
KILLED = """
import os, signal, sys
from jgr.config import override
from jgr.training import generator, run
from collections.abc import Iterator
from pathlib import Path
from tests.training.test_trainer import rule_config, rule_dataset

inner = run.fit

def fit(trainer, state, batches, on_step, place):
    def until(done, state, loss):
        enough = on_step(done, state, loss)
        if done == 10:
            loss.block_until_ready()
            os.kill(os.getpid(), signal.SIGKILL)
        return enough
    return inner(trainer, state, batches, until, place)

run.fit = fit
generator.train_generator(override(rule_config(Path(sys.argv[1])), *sys.argv[2:]), rule_dataset())
"""


@pytest.fixture(scope="module", autouse=True)
def one_program_for_equal_steps() -> Iterator[None]:
    """Most runs here take the same steps over the same data."""
    with equal_steps_compiled_once():
        yield


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.slow
def test_kill_9_and_resume_equals_the_unbroken_run(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_generator(override(rule_config(whole), *SETTINGS), rule_dataset())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(broken), *SETTINGS], env={**os.environ, "PYTHONPATH": "."}
    )
    assert killed.returncode == -signal.SIGKILL
    assert not broken.exists()
    assert len(losses(tmp_path / "broken.training")) == 8
    train_generator(override(rule_config(broken), *SETTINGS), rule_dataset())
    assert len(losses(whole)) == 12
    np.testing.assert_allclose(losses(broken), losses(whole), atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        checkpoint.load(broken)[1],
        checkpoint.load(whole)[1],
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "broken",
        "broken.training",
        "whole",
        "whole.training",
    ]


def test_the_best_weights_outlive_the_process_that_found_them(tmp_path: Path) -> None:
    """The step that validated best is kept over those saved after it, by this process or by one that goes on."""

    def state(step: int) -> State:
        return State({"w": jnp.full(3, float(step))}, (), jnp.int32(step))

    recalls = {2: 0.5, 4: 0.3, 6: None, 8: 0.2, 10: None, 12: 0.4}
    for first in (2, 6, 10):  # three processes, two steps each
        with RunFolder(tmp_path, {}) as folder:
            found = folder.latest(state(0))
            assert int(0 if found is None else found.step) == first - 2
            for step in (first, first + 2):
                folder.save(step, state(step), recalls[step])
    with RunFolder(tmp_path, {}) as folder:
        np.testing.assert_array_equal(folder.restore(2, state(0)).params["w"], [2.0, 2.0, 2.0])
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [2, 10, 12]


def test_a_run_goes_on_over_its_validations(tmp_path: Path) -> None:
    """Stopped after a validation and before the next checkpoint, it asks for none of them twice."""
    settings = ("train.steps=9", "train.evaluate_every=3", "train.checkpoint_every=100")
    config, asked = override(rule_config(tmp_path / "ring"), *CONSTANT, *settings), []

    def validate(cfg: DecoderConfig, params: DecoderParams) -> float:
        if len(asked) == 1:
            asked.append(0.0)
            raise KeyboardInterrupt
        asked.append(float(len(asked)))
        return asked[-1]

    with pytest.raises(KeyboardInterrupt):
        train_generator(config, rule_dataset(), validate=validate)
    train_generator(config, rule_dataset(), validate=validate)
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["recall@10"]) for line in lines if "recall@10" in line] == [
        (3, 0),
        (6, 2),
        (9, 3),
    ]


def test_a_disk_that_fills_up_ends_a_run_that_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = override(rule_config(tmp_path / "ring"), *SETTINGS)
    usage, free = shutil.disk_usage(tmp_path), iter([1 << 40, 1000])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=next(free)))
        with pytest.raises(CheckpointError, match="the disk is full"):
            train_generator(config, rule_dataset())
    assert len(losses(tmp_path / "ring.training")) == 4
    train_generator(config, rule_dataset())
    assert len(losses(tmp_path / "ring")) == 12


def test_a_run_that_has_ended_goes_on_to_more_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a constant rate the first steps do not depend on the last one, so 8 and then 12 are 12 at once."""
    whole, parts = (override(rule_config(tmp_path / name), *CONSTANT) for name in ("whole", "parts"))
    train_generator(whole, rule_dataset())
    train_generator(override(parts, "train.steps=8"), rule_dataset())
    assert [path.name for path in (tmp_path / "parts.training" / "checkpoints").iterdir()] == ["8"]
    make_way(str(tmp_path / "parts"), fresh=False, overwrite=False)
    with caplog.at_level("INFO"):
        train_generator(parts, rule_dataset())
    assert "going on from step 8 to 12" in caplog.text
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        checkpoint.load(tmp_path / "parts")[1],
        checkpoint.load(tmp_path / "whole")[1],
    )
    with caplog.at_level("INFO"):
        train_generator(override(parts, "beam.width=3"), rule_dataset())
    assert "all 12 steps are done: a larger train.steps goes on, --overwrite starts anew" in caplog.text
    assert (
        manifest.folder_config(tmp_path / "parts").beam.width == 3
    )  # the settings of serving are written again
    with pytest.raises(
        ConfigError, match=r"train\.steps: .* has gone 12 steps, more than 9: .* or --overwrite"
    ):
        train_generator(override(parts, "train.steps=9"), rule_dataset())


def test_an_unfinished_run_goes_on_to_another_end(tmp_path: Path) -> None:
    stopped(tmp_path / "ring", CONSTANT)
    config = override(rule_config(tmp_path / "ring"), *CONSTANT, "train.steps=15", "train.checkpoint_every=5")
    train_generator(config, rule_dataset())
    assert len(losses(tmp_path / "ring")) == 15


def test_a_run_that_is_to_end_where_it_was_cut_short_is_validated_there(tmp_path: Path) -> None:
    """It has a checkpoint of step 8, and no validation: the first is due at step 100, or at the end."""
    seen: list[np.ndarray] = []

    def validate(cfg: DecoderConfig, params: DecoderParams) -> float:
        seen.append(np.asarray(params.embed))
        return 0.5

    def stop(done: int, total: int, note: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    config = override(rule_config(tmp_path / "ring"), *SETTINGS, "train.evaluate_every=100")
    with pytest.raises(KeyboardInterrupt):
        train_generator(config, rule_dataset(), stop, validate)
    assert seen == []
    for _ in range(2):  # and once more, when it is known
        train_generator(override(config, "train.steps=8"), rule_dataset(), validate=validate)
        lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
        assert [line for line in lines if "recall@10" in line] == [{"step": 8, "recall@10": 0.5}]
        assert manifest.read(tmp_path / "ring").metrics == {"steps": 8.0, "recall@10": 0.5}  # type: ignore[union-attr]
    (validated,) = seen
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "ring")[1].embed, validated)


def test_patience_that_ended_a_run_can_be_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recalls = iter([0.5, 0.4, 0.3, 0.2, 0.6])
    config = override(rule_config(tmp_path / "ring"), *CONSTANT, "train.evaluate_every=2", "train.patience=2")

    def train(*changes: str) -> None:
        with caplog.at_level("INFO"):
            train_generator(
                override(config, *changes), rule_dataset(), validate=lambda cfg, params: next(recalls)
            )

    train()
    assert (
        len([path for path in (tmp_path / "ring.training" / "checkpoints").iterdir()]) == 2
    )  # the best, the last
    kept = sum(path.stat().st_size for path in (tmp_path / "ring.training").rglob("*") if path.is_file())
    assert f"ring.training ({kept / 1e6:.1f} MB) is for going on to more steps; without" in caplog.text
    train()
    assert "step 6 was the last, by train.patience: with a larger one it goes on" in caplog.text
    train("train.patience=4", "train.steps=10")
    lines = [json.loads(line) for line in (tmp_path / "ring" / "metrics.jsonl").read_text().splitlines()]
    assert [line["recall@10"] for line in lines if "recall@10" in line] == [0.5, 0.4, 0.3, 0.2, 0.6]
    assert manifest.read(tmp_path / "ring").metrics == {"steps": 10.0, "recall@10": 0.6}  # type: ignore[union-attr]
