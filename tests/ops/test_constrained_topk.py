# SPDX-License-Identifier: Apache-2.0
"""The beam step against a loop that lists every (beam, child) pair and sorts it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.ops.constrained_topk import BeamStep, cases, constrained_topk
from jgr.ops.testing import Case

IMPLEMENTATIONS = ["reference", "xla", "auto"]


def inputs(shape: Any, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    degrees = rng.integers(1, shape["degree"] + 1, shape["nodes"])
    degrees[0] = shape["degree"]
    codes = [np.sort(rng.choice(shape["vocabulary"], d, replace=False)) for d in degrees]
    # Few distinct values, so that ties occur and their order is tested.
    logits = rng.integers(-2, 3, (shape["batch"], shape["beams"], shape["vocabulary"])).astype(np.float32)
    scores = -rng.integers(0, 3, (shape["batch"], shape["beams"])).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    return {
        "logits": logits,
        "beam_scores": scores,
        "nodes": rng.integers(0, shape["nodes"], scores.shape).astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32),
        "codes": np.concatenate(codes).astype(np.int32),
    }


def loop(x: dict[str, np.ndarray], b: int, width: int, full: bool, banned: np.ndarray | None) -> list[tuple]:
    """(score, parent, node, code) of row b, best first, dead ones left out."""
    pairs = []
    for w, score in enumerate(x["beam_scores"][b]):
        node = x["nodes"][b, w]
        children = range(x["offsets"][node], x["offsets"][node + 1])
        logits = x["logits"][b, w].astype(np.float64)
        over = logits if full else logits[[x["codes"][c] for c in children]]
        normalizer = np.log(np.exp(over).sum())
        for c in children:
            if np.isfinite(score) and not (banned is not None and banned[b, c]):
                pairs.append((score + logits[x["codes"][c]] - normalizer, w, c, x["codes"][c]))
    return sorted(pairs, key=lambda p: (-round(p[0], 5), p[1], p[2]))[:width]


def check(shape: Any, seed: int, full: bool, ban: bool, implementation: str) -> None:
    x = inputs(shape, seed)
    rng = np.random.default_rng(seed + 1)
    banned = rng.random((shape["batch"], len(x["codes"]))) < 0.4 if ban else None
    exact = x["logits"].astype(np.float64)
    normalizer = np.log(np.exp(exact).sum(-1)).astype(np.float32) if full else None
    got = BeamStep(
        *(
            np.asarray(a)
            for a in constrained_topk(
                *(jnp.asarray(a) for a in x.values()),
                max_degree=shape["degree"],
                width=shape["width"],
                normalizer=normalizer,
                banned=banned,
                implementation=implementation,
            )
        )
    )
    for b in range(shape["batch"]):
        want = loop(x, b, shape["width"], full, banned)
        np.testing.assert_allclose(got.scores[b, : len(want)], [p[0] for p in want], atol=1e-5)
        assert np.isneginf(got.scores[b, len(want) :]).all()
        for name, column in (("parents", 1), ("nodes", 2), ("codes", 3)):
            values = getattr(got, name)[b]
            assert (values[len(want) :] == 0).all()
            if not ties_across_rounding(want):
                np.testing.assert_array_equal(values[: len(want)], [p[column] for p in want])


def ties_across_rounding(pairs: list[tuple]) -> bool:
    """Sums that are equal on paper may differ in the last bit of float32, and then order otherwise."""
    scores = [p[0] for p in pairs]
    return any(
        0 < abs(a - b) < 1e-5 or (a == b and p[1] != q[1])
        for p, q, a, b in zip(pairs, pairs[1:], scores, scores[1:], strict=False)
    )


@pytest.mark.parametrize("case", [c for c in cases.CASES if "ci" in c.tags], ids=lambda c: c.name)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("ban", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cases(case: Case, full: bool, ban: bool, implementation: str) -> None:
    for seed in range(3):
        check(case.shape, seed, full, ban, implementation)


def test_a_ban_leaves_the_other_scores_alone() -> None:
    shape = {"batch": 1, "beams": 1, "vocabulary": 8, "nodes": 1, "degree": 5, "width": 5}
    x = {k: jnp.asarray(v) for k, v in inputs(shape, 0).items()} | {"beam_scores": jnp.zeros((1, 1))}
    free = constrained_topk(**x, max_degree=5, width=5)
    best = int(free.nodes[0, 0])
    without = constrained_topk(**x, max_degree=5, width=5, banned=jnp.arange(5)[None] == best)
    np.testing.assert_array_equal(without.nodes[0, :4], free.nodes[0, 1:])
    np.testing.assert_array_equal(without.scores[0, :4], free.scores[0, 1:])
    assert np.isneginf(without.scores[0, 4])


def test_equal_scores_take_the_lower_beam_then_the_lower_child() -> None:
    step = constrained_topk(
        jnp.zeros((1, 2, 3)),
        jnp.zeros((1, 2)),
        jnp.zeros((1, 2), jnp.int32),
        jnp.array([0, 3], jnp.int32),
        jnp.arange(3, dtype=jnp.int32),
        max_degree=3,
        width=4,
    )
    np.testing.assert_array_equal(step.parents, [[0, 0, 0, 1]])
    np.testing.assert_array_equal(step.nodes, [[0, 1, 2, 0]])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), full=st.booleans(), ban=st.booleans())
def test_random_instances(seed: int, full: bool, ban: bool) -> None:
    shape = {
        "batch": 2,
        "beams": 4,
        "vocabulary": 12,
        "nodes": 9,
        "degree": 6,
        "width": 6,
    }  # one shape: one compile
    check(shape, seed, full, ban, "auto")
