# SPDX-License-Identifier: Apache-2.0
"""The runs that a scorer's costs are fitted to: their shapes, and that they are the programs that serve."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jgr.models import params, scorer_costs, scorers
from jgr.models.climber import ClimberConfig
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorer_costs import Work
from jgr.serving.engine.cost_profile import Trial
from jgr.serving.scorers import cost_grid
from jgr.serving.scorers.executors import PartWork
from jgr.serving.scorers.user_block import new_block, user_layout
from tests.serving.scorer_fakes import HSTU, STU

SASREC = SasrecConfig(n_items=60, max_items=12, hidden=8, layers=1, heads=2, mlp=8, items="")
LRUREC = cost_grid.LruRecConfig(n_items=60, max_items=12, hidden=8, layers=1, mlp=8, items="")
CLIMBER = ClimberConfig(
    n_items=60, max_items=12, blocks=2, layers=1, hidden=8, heads=2, mlp=8, tasks=("click",), items=""
)


def draw(cfg: Any) -> Any:
    return params.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0))


@pytest.fixture(scope="module")
def made() -> tuple[list[Trial], list[tuple[int, int, str]]]:
    """A grid's runs, and what was told while their programs were compiled."""
    steps: list[tuple[int, int, str]] = []
    return cost_grid.trials(SASREC, draw(SASREC), 8, lambda *step: steps.append(step), most=5), steps


def test_the_grid_has_other_lengths_and_sizes_than_are_served(made: Any) -> None:
    trials, steps = made
    kinds = {kind: [t for t in trials if t.kind == kind] for kind in ("user", "part", "whole")}
    assert [t.label for t in kinds["user"]] == [f"{n} events" for n in (1, 2, 3, 4, 6, 9, 12)]
    assert len(kinds["part"]) == len(kinds["whole"]) == 5 and len(trials) == 17
    sizes = {trial.label for trial in kinds["part"]}
    assert {"1 candidates, 1 events", "8 candidates, 1 events", "1 candidates, 12 events"} < sizes
    assert {trial.label for trial in kinds["whole"]} == sizes
    assert [step[:2] for step in steps] == [(n, 7) for n in range(1, 8)]
    for trial in trials:
        *size, events = [int(word) for word in trial.label.split() if word.isdigit()]
        cfg = cost_grid.with_history(SASREC, draw(SASREC), events)[0]
        work = Work(trial.kind != "part", size[0] if size else 0)
        assert trial.cost == scorer_costs.sasrec(cfg, work) and trial.requests == 1  # type: ignore[arg-type]
        answer = trial.collect(trial.launch())
        if size:
            assert answer.shape == (size[0], 1)


def test_a_part_and_a_whole_of_the_longest_history_score_alike(made: Any) -> None:
    scores = {t.kind: t.collect(t.launch()) for t in made[0] if t.label == "8 candidates, 12 events"}
    np.testing.assert_allclose(scores["part"], scores["whole"], atol=1e-5)
    # Those of item 0 after a history of 12 times item 0, as the model gives them.
    block, views = new_block(user_layout(scorers.scorer(SASREC).needs(SASREC)))
    views["rows"][:] = 0
    users = scorers.Users(views["rows"][None], *[np.zeros((1, 1), np.int32)] * 5)
    model, drawn = scorers.scorer(SASREC), draw(SASREC)
    asked = scorers.Candidates(np.zeros((1, 8), np.int32), {})  # type: ignore[arg-type]
    np.testing.assert_allclose(
        scores["part"], model.score(drawn, SASREC, model.read(drawn, SASREC, users), asked)[0], atol=1e-5
    )
    assert isinstance(PartWork(np.zeros(1, np.int32), block).user, np.ndarray)


@pytest.mark.parametrize(
    ("cfg", "name", "longest"),
    [
        (HSTU, "hstu", 3),
        (STU, "stu", 4),
        (CLIMBER, "climber", 4),
        (LRUREC, "lru_rec", 6),
        (SASREC, "sasrec", 6),
    ],
)
def test_every_familys_history_can_be_shorter(cfg: Any, name: str, longest: int) -> None:
    assert cost_grid.family(cfg) == name
    drawn = draw(cfg)
    shorter, fitted = cost_grid.with_history(cfg, drawn, longest)
    assert shorter.max_items == longest
    model = scorers.scorer(shorter)
    params.check(model.spec(shorter), fitted)
    same = jax.tree.map(lambda x, y: x.shape == y.shape and x is y, fitted, drawn)
    assert sum(jax.tree.leaves(same)) > len(jax.tree.leaves(same)) // 2
    needs = model.needs(shorter)
    _, views = new_block(user_layout(needs))
    assert views["rows"].shape == (longest,)
    assert cost_grid.cost(shorter, Work(True, 3)).flops < cost_grid.cost(cfg, Work(True, 3)).flops
