# SPDX-License-Identifier: Apache-2.0
"""What all rankers give: a state of the user, and scores that depend on it and on the candidate alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.models import retrievers, scorers
from jgr.models.config_file import scorer_config
from jgr.models.hstu import HstuConfig
from jgr.models.lru_rec import LruRecConfig, LruRecParams
from jgr.models.params import abstract, initialize
from jgr.models.retrievers import RetrieverConfig
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import Candidates, ScorerConfig, Users
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import StuScorerConfig

ITEMS, PLACES = 30, 6
STACK = StuConfig(hidden=8, layers=2, heads=2, qk_dim=4, v_dim=4, length=16, contextual=1)
CONFIGS: dict[str, ScorerConfig] = {
    "sasrec": SasrecConfig(ITEMS, PLACES, hidden=8, layers=2, heads=2, mlp=8, items=""),
    "lrurec": LruRecConfig(ITEMS, PLACES, hidden=8, layers=2, mlp=8, items=""),
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


@pytest.mark.parametrize("name", ["sasrec", "lrurec", "hstu"])
def test_a_retrievers_scores_are_those_it_retrieves_by(name: str) -> None:
    cfg = CONFIGS[name]
    if isinstance(cfg, HstuConfig):
        cfg = replace(cfg, bias="positions")
    assert isinstance(cfg, RetrieverConfig)
    model = scorers.scorer(cfg)
    # Of some length: a vector that only its norm tells apart would hide a table that was not normalised.
    params = jax.tree.map(lambda x: 30 * x, initialize(model.spec(cfg), jax.random.key(0)))
    if isinstance(params, LruRecParams):  # biases start at 0
        params = replace(params, bias=jax.random.normal(jax.random.key(1), params.bias.shape))
    given = users()
    rows = np.random.default_rng(2).integers(0, ITEMS, (3, 17)).astype(np.int32)
    read, score = (jax.jit(of, static_argnums=1) for of in (model.read, model.score))
    found = score(params, cfg, read(params, cfg, given), Candidates(jnp.asarray(rows), {}))
    every = np.take_along_axis(np.asarray(retrievers.scores_after(params, given.rows, cfg=cfg)), rows, axis=1)
    np.testing.assert_allclose(np.asarray(found)[..., 0], every, rtol=1e-6, atol=1e-6 * np.abs(every).max())


@pytest.mark.parametrize("name", ["sasrec", "lrurec", "hstu"])
def test_many_candidates_are_scored_by_the_whole_table_to_the_same(name: str) -> None:
    cfg = CONFIGS[name]
    model = scorers.scorer(cfg)
    params, given = initialize(model.spec(cfg), jax.random.key(0)), users()
    score = jax.jit(partial(model.score, cfg=cfg))
    rows = np.random.default_rng(3).integers(-1, ITEMS, (3, scorers.MANY)).astype(np.int32)
    state = jax.jit(model.read, static_argnums=1)(params, cfg, given)
    many = Candidates(rows, {})
    assert f"{rows.shape[1]},8]" not in score.lower(params, state=state, candidates=many).compile().as_text()
    few = [
        np.asarray(score(params, state=state, candidates=Candidates(part, {})))
        for part in np.array_split(rows, 2, axis=1)
    ]
    found = np.asarray(score(params, state=state, candidates=many))
    np.testing.assert_allclose(found, np.concatenate(few, axis=1), atol=1e-6)
    assert not found[rows < 0].any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 0}, "heads is 0, which is no size of a model"),
        ({"max_items": 0}, "max_items is 0, which is no size of a model"),
        ({"heads": 3}, "3 heads do not divide 8 hidden"),
    ],
)
def test_impossible_sizes_of_a_config_are_named(wrong: dict[str, int], message: str) -> None:
    whole = {"model_type": "sasrec", **asdict(CONFIGS["sasrec"])}
    assert scorer_config(whole, {"sasrec": SasrecConfig}) == CONFIGS["sasrec"]
    with pytest.raises(ValueError, match=message):
        scorer_config(whole | wrong, {"sasrec": SasrecConfig})


@pytest.mark.parametrize("name", ["sasrec", "lrurec", "hstu"])
def test_scoring_touches_the_rows_of_the_candidates_alone(name: str) -> None:
    def flops(items: int) -> float:
        cfg = replace(CONFIGS[name], n_items=items)
        model = scorers.scorer(cfg)
        state = jax.ShapeDtypeStruct((1, 8), np.float32)
        rows = Candidates(jax.ShapeDtypeStruct((1, 128), np.int32), {})  # type: ignore[arg-type]
        score = jax.jit(partial(model.score, cfg=cfg))
        program = score.lower(abstract(model.spec(cfg)), state=state, candidates=rows).compile()
        return float(program.cost_analysis()["flops"])

    assert flops(3_000) == flops(1_000_000) < 128 * 100
