# SPDX-License-Identifier: Apache-2.0
"""What all rankers give: a state of the user, and scores that depend on it and on the candidate alone."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jgr.models import retrievers, scorers
from jgr.models.hstu import HstuConfig
from jgr.models.params import initialize
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import Candidates, ScorerConfig, Users
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import StuScorerConfig

ITEMS, PLACES = 30, 6
STACK = StuConfig(hidden=8, layers=2, heads=2, qk_dim=4, v_dim=4, length=16, contextual=1)
CONFIGS: dict[str, ScorerConfig] = {
    "sasrec": SasrecConfig(ITEMS, PLACES, hidden=8, layers=2, heads=2, mlp=8, items=""),
    "hstu": HstuConfig(ITEMS, PLACES, 8, 2, 2, 4, 4, length=17, items="", bias="times"),
    "stu": StuScorerConfig(
        STACK, ITEMS, PLACES, item_dim=8, actions=2, action_dim=4, slots=(3,), mlp=8, position_rows=9,
        time_rows=16, tasks=("click", "like"), items="",
    ),
}  # fmt: skip


def users() -> Users:
    rng = np.random.default_rng(1)
    lengths = np.array([6, 2, 1])
    there = np.arange(PLACES) < lengths[:, None]
    times = np.cumsum(rng.integers(0, 90_000, (3, PLACES)), axis=1)
    return Users(
        np.where(there, rng.integers(0, ITEMS, there.shape), -1).astype(np.int32),
        np.where(there, rng.integers(0, 4, there.shape), 0).astype(np.int32),
        np.where(there, times, 0).astype(np.int32),
        (times[:, -1] + 5000).astype(np.int32),
        np.array([[2], [-1], [0]], np.int32),
        np.zeros(3, np.int32),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_score_depends_on_the_user_and_the_candidate_alone(name: str) -> None:
    cfg = CONFIGS[name]
    model = scorers.scorer(cfg)
    params, given = initialize(model.spec(cfg), jax.random.key(0)), users()
    read, score = (jax.jit(partial(f, cfg=cfg)) for f in (model.read, model.score))
    rows = np.stack([np.random.default_rng(user).permutation(ITEMS) for user in range(3)]).astype(np.int32)
    rows[1, 4] = -1
    state = read(params, users=given)
    found = np.asarray(score(params, state=state, candidates=Candidates(rows, {})))
    assert found.shape == (3, ITEMS, len(model.needs(cfg).tasks)) and not found[1, 4].any()

    order = np.arange(ITEMS)[::-1]
    parts = [rows[:, order[:10]], rows[:, order[10:20]], rows[:, order[20:]]]
    halves = [np.asarray(score(params, state=state, candidates=Candidates(part, {}))) for part in parts]
    np.testing.assert_allclose(np.concatenate(halves, axis=1), found[:, order], atol=1e-5)

    alone = read(params, users=jax.tree.map(lambda x: x[1:2], given))
    one = score(params, state=alone, candidates=Candidates(rows[1:2], {}))
    np.testing.assert_allclose(np.asarray(one)[0], found[1], atol=1e-5)


def test_a_retrievers_scores_are_those_it_retrieves_by() -> None:
    cfg = CONFIGS["sasrec"]
    assert isinstance(cfg, SasrecConfig)
    model = scorers.scorer(cfg)
    params, given = initialize(model.spec(cfg), jax.random.key(0)), users()
    rows = np.tile(np.arange(ITEMS, dtype=np.int32), (3, 1))
    found = model.score(params, cfg, model.read(params, cfg, given), Candidates(rows, {}))
    every = retrievers.scores_after(params, given.rows, cfg=cfg)
    np.testing.assert_allclose(np.asarray(found)[..., 0], np.asarray(every), atol=1e-5)
