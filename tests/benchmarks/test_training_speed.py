# SPDX-License-Identifier: Apache-2.0
"""Training that is held between steps is jgr's own; ratios are those of one round, against the best peer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import training_speed as bench
from benchmarks import training_world as world
from benchmarks.titles import title
from benchmarks.training_speed import Taken
from jgr.config import DataConfig
from jgr.data.datasets import load_dataset


def test_a_held_training_takes_the_steps_that_peers_are_given(tmp_path: Path) -> None:
    config = world.recipe("sasrec")
    sizes = dict(batch=8, max_items=6, hidden=8, heads=2, mlp=8, dropout=0.0)
    config = replace(
        config, data=DataConfig(), train=replace(config.train, out=str(tmp_path / "out"), **sizes)
    )
    dataset = load_dataset(config.data)
    losses = world.export(tmp_path / "peer", config, dataset, 12)
    items = len(dataset.catalog.item_ids)
    assert len(losses) == world.CHECKED_STEPS
    assert losses[0] == pytest.approx(np.log(items), rel=0.05)  # untrained: all items are alike
    written = json.loads((tmp_path / "peer/sizes.json").read_text())
    assert written["hidden"] == 8 and written["train"]["batch"] == 8
    with np.load(tmp_path / "peer/windows.npz") as windows:
        rows, widths = windows["rows"], windows["widths"]
    assert rows.shape == (12, 8, 7)
    assert all((of[:, width:] == -1).all() for of, width in zip(rows, widths, strict=True))
    with np.load(tmp_path / "peer/weights.npz") as weights:
        assert weights["layers/wq"].shape == (2, 8, 8)
        assert weights["embed"].shape == (items, 8)

    training = world.HeldTraining(config, dataset)
    try:
        found = training.steps(2)
        assert found["first"] == 1 and found["seconds"] > 0
        # Seven steps are under way, and the device has done three: the last two of these were timed.
        assert found["status"] == f"loss {losses[-1]:.3f}"
        assert training.steps(3)["first"] == world.WARM_STEPS + 2 + 1
    finally:
        training.close()


def test_recbole_gets_whole_histories(tmp_path: Path) -> None:
    dataset = load_dataset(DataConfig())
    world.export_histories(tmp_path / "histories", dataset)
    lines = (tmp_path / "histories/histories.inter").read_text().splitlines()
    assert lines[0] == "user_id:token\titem_id:token\ttimestamp:float"
    test = dataset.interactions.test
    assert len(lines) == 1 + test.histories.lengths.sum() + len(test.targets)
    assert [line.split("\t")[1] for line in lines[1:]][len(test.histories[0])] == str(test.targets[0])


def taken(*seconds: float, targets: int = 1000, loss: float | None = None) -> list[Taken]:
    return [Taken(10, s, targets, None if loss is None else loss - at) for at, s in enumerate(seconds)]


def test_the_best_peer_is_compared_round_by_round() -> None:
    done = {
        "jgr, default": taken(2.0, 4.0, 3.0),
        "jgr, kept": taken(1.0, 2.0, 1.5),
        "pytorch eager, default": taken(4.0, 8.0, 6.0, loss=9.0),
        "pytorch compiled, kept": taken(2.0, 3.0, 3.0, loss=9.0),
        "recbole, default": taken(0.5, 1.0, 0.75, targets=128, loss=9.0),
    }
    rows = [
        {"model": "hstu", "peer": "pytorch", "missing": "set JGR_PEERS_TORCH"},
        bench.difference("sasrec", "pytorch eager, default", [9.0, 8.0], [9.0, 8.00005]),
        *bench.make_rows("sasrec", done),
    ]
    found = {c.id: (c.value, c.target, c.holds, c.interval) for c in bench.claims(rows)}
    assert found == {
        "training-peers-missing": (1, 0, False, None),
        "training-loss-of-sasrec-less-that-of-pytorch": (5e-05, 1e-4, True, None),
        "training-loss-of-recbole-falls-by": (2.0, 0, True, None),
        "training-steps-per-s-of-sasrec-over-pytorch": (2.0, 1.0, True, (1.5, 2.0)),
        "training-steps-per-s-of-sasrec-over-recbole": (0.5, 1.0, False, (0.5, 0.5)),
        "training-targets-per-s-of-sasrec-over-recbole": (3.906, 1.0, True, (3.906, 3.906)),
        "training-steps-per-s-of-sasrec-over-defaults": (2.0, 1.0, True, (2.0, 2.0)),
    }
    titles = [title({"id": name}) for name in found]
    assert None not in titles and len(set(titles)) == len(titles)
