# SPDX-License-Identifier: Apache-2.0
"""The STU form: Meta's PyTorch stacks whole and in parts, its positional encoder, and M-FALCON's invariants."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jgr.models import stu_scorer
from jgr.models.hstu import WindowSlides
from jgr.models.hstu_costs import cost, of_candidates, of_history
from jgr.models.params import Spec
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import Events, HistoryIsWhole, Mlp, StuScorerConfig, StuScorerParams
from tests.models.test_hstu import assert_reproduced
from tools.hstu_parity import FILES


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("research")])
def test_stacks_caches_masks_and_positions_are_those_of_the_authors(file: str) -> None:
    """Whole, and in parts behind what is cached."""
    assert_reproduced(file)


STACK = StuConfig(hidden=12, layers=2, heads=2, qk_dim=4, v_dim=6, length=40, contextual=2)
CFG = StuScorerConfig(
    stack=STACK, n_items=30, max_items=9, item_dim=8, actions=3, action_dim=2, slots=(4, 5), mlp=10,
    position_rows=16, time_rows=20, tasks=("click", "like"), items="v",
)  # fmt: skip
GROWING = dataclasses.replace(
    CFG, stack=dataclasses.replace(STACK, contextual=0, max_attention=4), slots=(), position_rows=0, time_rows=0
)  # fmt: skip
NOW = np.array([10**8 + 50_000, 10**8 + 90_000, 10**8 + 700_000], np.int32)


def draw(cfg: StuScorerConfig) -> StuScorerParams:
    """Parameters where nothing is zero."""
    rng = np.random.default_rng(0)

    def one(declared: Spec) -> np.ndarray:
        scale = 0.2 + (declared.fan_in or 25) ** -0.5
        return np.float32(scale * rng.normal(size=declared.shape))

    drawn: StuScorerParams = jax.tree.map(one, stu_scorer.spec(cfg), is_leaf=lambda x: isinstance(x, Spec))
    return drawn


def draw_events(counts: tuple[int, ...], places: int) -> Events:
    """Of users with so many events; times up to three days before NOW."""
    rng = np.random.default_rng(1)
    shape = (len(counts), places)
    rows = np.where(np.arange(places) < np.array(counts)[:, None], rng.integers(0, 30, shape), -1)
    times = NOW[:, None] - np.sort(rng.integers(1, 250_000, shape))[:, ::-1]
    return Events(rows.astype(np.int32), rng.integers(0, 8, shape).astype(np.int32), times.astype(np.int32))


EVENTS = draw_events((9, 0, 4), 9)
CONTEXT = np.array([[1, 4], [3, -1], [-1, 0]], np.int32)
CANDIDATES = np.random.default_rng(2).permuted(np.tile(np.arange(30, dtype=np.int32), (3, 1)), axis=1)[:, :11]


def scores_by_hand(weights: StuScorerParams, user: int, candidate: int) -> np.ndarray:
    """[P] in float64, of one candidate and its user in one pass: the formulas around the stack, and its layers."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)

    def norm(x: np.ndarray, scale_bias: np.ndarray, eps: float = 1e-5) -> np.ndarray:
        normal: np.ndarray = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return normal * (1 + scale_bias[0]) + scale_bias[1]

    def mlp(x: np.ndarray, of: Mlp) -> np.ndarray:
        x = x @ of.w1 + of.b1[0]
        x = (x / (1 + np.exp(-norm(x, of.norm1)))) @ of.w2 + of.b2[0]
        return x if of.norm2 is None else norm(x, of.norm2)

    first = (0, 4)
    inputs = [
        np.zeros(12) if value < 0 else w.slots[first[slot] + value] @ w.slot_weights[slot] + w.slot_biases[slot]
        for slot, value in enumerate(CONTEXT[user])
    ]  # fmt: skip
    events = [i for i in range(9) if EVENTS.rows[user, i] >= 0]
    for i in events:
        bits = np.array([EVENTS.actions[user, i] >> bit & 1 for bit in range(3)])
        done = mlp((w.actions * bits[:, None]).ravel(), w.action)
        inputs.append(mlp(w.embed[EVENTS.rows[user, i]], w.content) + done)
    inputs.append(mlp(w.embed[candidate], w.content) + mlp(w.candidate_action, w.action))
    count = len(events)
    backwards = [min(2 + count - i, 15) for i in range(count)]
    ages = [0, 0, *(NOW[user] - EVENTS.times[user, i] for i in events), 0]
    buckets = [min(int(np.sqrt(max(age, 1e-6) / 60)), 19) for age in ages]
    h = np.stack(inputs) * np.sqrt(12) + w.position[[0, 1, *backwards, 2]] + w.time[buckets]
    numbers = np.array([0, 0, *range(1, count + 2)])
    sees = np.eye(len(h), dtype=bool) | (numbers[:, None] > numbers) | (numbers[:, None] == 0)
    sees[:2, -1] = False  # context sees no candidate
    for at in range(2):
        layer = jax.tree.map(lambda x, at=at: x[at], w.layers)
        u, v, q, k = np.split(
            norm(h, layer.input_norm, 1e-6) @ layer.uvqk + layer.beta[0], (12, 24, 32), axis=1
        )
        u, o = u / (1 + np.exp(-u)), np.zeros_like(u)
        for head in range(2):
            qk, of = slice(4 * head, 4 * head + 4), slice(6 * head, 6 * head + 6)
            logits = q[:, qk] @ k[:, qk].T / 2
            o[:, of] = np.where(sees, logits / (1 + np.exp(-logits)) / 40, 0) @ v[:, of]
        h = h + np.concatenate([u, o, u * norm(o, layer.output_norm, 1e-6)], axis=1) @ layer.out
    angles = [2 * np.pi * (NOW[user] % period) / period for period in (86_400, 604_800)]
    asked = norm(np.concatenate([h[-1], np.cos(angles), np.sin(angles)]) @ w.out + w.out_bias[0], w.out_norm)
    return 1 / (1 + np.exp(-mlp(asked * mlp(w.embed[candidate], w.tower), w.head)))


def test_scores_are_the_formulas_of_the_whole_ranker() -> None:
    weights = draw(CFG)
    user = stu_scorer.prefill(weights, EVENTS, CONTEXT, NOW, cfg=CFG)
    got = stu_scorer.score(weights, user, CANDIDATES, cfg=CFG, micro_batch=4)
    for row in range(3):
        expected = [scores_by_hand(weights, row, candidate) for candidate in CANDIDATES[row, :3]]
        np.testing.assert_allclose(got[row, :3], expected, rtol=0, atol=2e-5)


def test_scores_depend_on_no_micro_batch_order_or_company() -> None:
    weights = draw(CFG)
    user = stu_scorer.prefill(weights, EVENTS, CONTEXT, NOW, cfg=CFG)
    want = np.asarray(stu_scorer.score(weights, user, CANDIDATES, cfg=CFG, micro_batch=4))
    got = stu_scorer.score(weights, user, CANDIDATES, cfg=CFG, micro_batch=16)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    order = np.random.default_rng(3).permutation(11)
    got = stu_scorer.score(weights, user, CANDIDATES[:, order], cfg=CFG, micro_batch=4)
    np.testing.assert_allclose(got, want[:, order], rtol=0, atol=2e-6)
    fewer = np.where(np.arange(11) % 3 == 0, CANDIDATES, -1)
    got = stu_scorer.score(weights, user, fewer, cfg=CFG, micro_batch=4)
    np.testing.assert_allclose(got, np.where(fewer[..., None] >= 0, want, 0), rtol=0, atol=2e-6)


def test_a_history_grows_where_no_row_depends_on_its_end() -> None:
    weights, counts, none = draw(GROWING), np.array([5, 0, 4]), np.zeros((3, 0), np.int32)
    places = np.arange(9)
    begun = EVENTS._replace(rows=np.where(places < counts[:, None], EVENTS.rows, -1))
    user = stu_scorer.prefill(weights, begun, none, NOW, cfg=GROWING)
    new = jax.tree.map(lambda x: x[:, 5:], EVENTS)  # four more of the first user, none of the others
    user = stu_scorer.extend(weights, user, new, NOW + 60, cfg=GROWING)
    got = stu_scorer.score(weights, user, CANDIDATES, cfg=GROWING, micro_batch=4)
    whole = stu_scorer.prefill(weights, EVENTS, none, NOW + 60, cfg=GROWING)
    want = stu_scorer.score(weights, whole, CANDIDATES, cfg=GROWING, micro_batch=4)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    with pytest.raises(WindowSlides, match="13 events, the window holds 9"):
        stu_scorer.extend(weights, user, new, NOW, cfg=GROWING)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_rows": 4}, "positions that count back"),
        ({"time_rows": 4}, "times that count back"),
        ({"stack": dataclasses.replace(GROWING.stack, full_rows=1)}, "full rows at"),
        ({"stack": STACK, "slots": (4, 5)}, "contextual slots, which see the history both ways"),
    ],
)
def test_a_history_whose_rows_depend_on_its_end_does_not_grow(change: dict[str, Any], words: str) -> None:
    with pytest.raises(HistoryIsWhole, match=words):
        stu_scorer.refuse_growth(dataclasses.replace(GROWING, **change))


def test_the_candidates_cost_does_not_hold_the_history_again() -> None:
    products, both = 12 * (2 * 2 * (4 + 6) + 3 * 2 * 6), 2 * (4 + 6)
    history, candidates = of_history(100), of_candidates(6, history=100, micro_batch=4)
    assert candidates == (6, 200, 606) and history == (100, 0, 5050)
    found = cost(STACK, candidates)
    assert found.flops == 2 * 2 * (6 * products + 606 * both)
    assert found.bytes == 2 * 4 * (products + 206 * both)
