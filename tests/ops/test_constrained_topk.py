# SPDX-License-Identifier: Apache-2.0
"""The beam step against a loop that lists every (beam, child) pair and sorts it; its top-k against a sort."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.catalog.child_bitmaps import wide_children
from jgr.ops.constrained_topk import BeamStep, StepFilter, TreeLevel, constrained_topk, heap, packed_capacity
from jgr.ops.constrained_topk.cases import OP, tree_level
from jgr.ops.constrained_topk.select import best_tokens, top_k
from jgr.ops.testing import Case

FILTERS = ["none", "deny", "allow", "segment", "mixed"]
run = jax.jit(constrained_topk, static_argnames=("width", "packed", "approximate", "implementation"))


def inputs(shape: Any, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    # Few distinct values, so that ties occur and their order is tested; the head is the identity.
    logits = rng.integers(-2, 3, (shape["batch"], shape["beams"], shape["vocabulary"])).astype(np.float32)
    scores = -rng.integers(0, 3, (shape["batch"], shape["beams"])).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    distinct = [rng.permutation(max(shape["nodes"], shape["beams"]))[: shape["beams"]] for _ in scores]
    return {
        "hidden": logits,
        "head": np.eye(shape["vocabulary"], dtype=np.float32),
        "beam_scores": scores,
        "nodes": (np.stack(distinct) % shape["nodes"]).astype(np.int32),
        "level": TreeLevel(*map(jnp.asarray, tree_level(shape, np.random.default_rng(0)).values())),
    }


def draw_filter(kind: str, x: dict[str, Any], rng: np.random.Generator) -> tuple[StepFilter, np.ndarray]:
    """A filter of each request, and which children it leaves: [B, C]. Kinds differ in values, not in shapes."""
    level, batch = TreeLevel(*map(np.asarray, x["level"])), len(x["nodes"])
    children = len(level.codes)
    parent = np.searchsorted(level.offsets, np.arange(children), side="right") - 1
    only = rng.random(batch) < 0.5 if kind == "mixed" else np.full(batch, kind == "allow")
    listed = (rng.random((batch, children)) < 0.4) & (kind in ("deny", "allow", "mixed"))
    segments = rng.random((3, children)) < 0.5
    segments[0] = True
    segment = rng.integers(0, 3, batch) if kind in ("segment", "mixed") else np.zeros(batch, int)
    padded = np.pad(segments, ((0, 0), (0, 64 - children % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    entries = np.zeros((2, batch, children), np.int32)
    for row in range(batch):
        found = np.flatnonzero(listed[row])
        entries[:, row, : len(found)] = found, parent[found]
    counts = listed.sum(axis=1).astype(np.int32)
    filters = StepFilter(*map(jnp.asarray, (*entries, counts, only, segment.astype(np.int32), words)))
    return filters, (listed == only[:, None]) & segments[segment]


def loop(x: dict[str, Any], b: int, width: int, full: bool, allowed: np.ndarray | None) -> list[tuple]:
    """(score, parent, node, code) of row b, best first, dead ones left out."""
    pairs, level = [], TreeLevel(*map(np.asarray, x["level"]))
    for w, score in enumerate(x["beam_scores"][b]):
        node = x["nodes"][b, w]
        children = range(level.offsets[node], level.offsets[node + 1])
        logits = x["hidden"][b, w].astype(np.float64)
        over = logits if full else logits[[level.codes[c] for c in children]]
        normalizer = np.log(np.exp(over).sum())
        for c in children:
            if np.isfinite(score) and (allowed is None or allowed[b, c]):
                pairs.append((score + logits[level.codes[c]] - normalizer, w, c, level.codes[c]))
    return sorted(pairs, key=lambda p: (-round(p[0], 5), p[1], p[2]))[:width]


def check(shape: Any, seed: int, full: bool, kind: str, implementation: str) -> None:
    x = inputs(shape, seed)
    filters, allowed = draw_filter(kind, x, np.random.default_rng(seed + 1))
    exact = x["hidden"].astype(np.float64)
    normalizer = np.log(np.exp(exact).sum(-1)).astype(np.float32) if full else None
    step = run(
        **x,
        width=shape["width"],
        packed=shape["packed"],
        normalizer=normalizer,
        filters=filters,
        implementation=implementation,
    )
    got = BeamStep(*(np.asarray(a) for a in step))
    for b in range(shape["batch"]):
        want = loop(x, b, shape["width"], full, allowed)
        np.testing.assert_allclose(got.scores[b, : len(want)], [p[0] for p in want], atol=1e-5)
        assert np.isneginf(got.scores[b, len(want) :]).all()
        for name, column in (("parents", 1), ("nodes", 2), ("codes", 3)):
            values = getattr(got, name)[b]
            assert (values[len(want) :] == 0).all()
            if not ties_across_rounding(want):
                np.testing.assert_array_equal(values[: len(want)], [p[column] for p in want])
        codes, alive = np.asarray(x["level"].codes), got.nodes[b, : len(want)]
        assert len(set(alive.tolist())) == len(alive)
        np.testing.assert_array_equal(codes[alive], got.codes[b, : len(want)])


def ties_across_rounding(pairs: list[tuple]) -> bool:
    """Sums that are equal on paper may differ in the last bit of float32, and then order otherwise."""
    scores = [p[0] for p in pairs]
    return any(
        abs(a - b) < 1e-5 and p[1] != q[1]
        for p, q, a, b in zip(pairs, pairs[1:], scores, scores[1:], strict=False)
    )


@pytest.mark.parametrize("case", OP.tagged("ci"), ids=lambda c: c.name)
def test_cases(case: Case) -> None:
    for seed, kind in enumerate(FILTERS):
        check(case.shape, seed, False, kind, "xla")


def test_the_reference() -> None:
    for seed, kind in enumerate(FILTERS):
        check(SMALL, seed, False, kind, "reference")


# Two blocks of columns.
SMALL = dict(batch=2, beams=4, vocabulary=140, nodes=9, degree=60, width=6, packed=128)


def test_small_has_wide_nodes_and_fits_the_packed_form_or_not() -> None:
    level = inputs(SMALL, 0)["level"]
    degrees = np.sort(np.diff(level.offsets))
    assert 1 < len(level.wide_nodes) < SMALL["nodes"]
    assert degrees[:4].sum() < SMALL["packed"] < degrees[-4:].sum()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(FILTERS))
def test_random_instances(seed: int, kind: str) -> None:
    check(SMALL, seed, False, kind, "xla")


def test_a_normalizer_may_be_given() -> None:
    for seed in range(6):
        check(SMALL, seed, True, "mixed", "xla")


def test_a_filter_leaves_the_other_scores_alone() -> None:
    x = inputs(SMALL, 0)
    filters, _ = draw_filter("none", x, np.random.default_rng(0))
    free = run(**x, width=6, packed=128, filters=filters, implementation="xla")
    best, parent = free.nodes[:, 0], x["nodes"][np.arange(2), free.parents[:, 0]]
    filters = filters._replace(
        children=filters.children.at[:, 0].set(best),
        parents=filters.parents.at[:, 0].set(parent),
        counts=jnp.ones_like(filters.counts),
    )
    without = run(**x, width=6, packed=128, filters=filters, implementation="xla")
    np.testing.assert_array_equal(without.nodes[:, :5], free.nodes[:, 1:])
    np.testing.assert_array_equal(without.scores[:, :5], free.scores[:, 1:])


@pytest.mark.parametrize("packed", [0, 8])
def test_equal_scores_take_the_lower_beam_then_the_lower_child(packed: int) -> None:
    offsets, codes = np.array([0, 3, 6], np.int32), np.tile(np.arange(3, dtype=np.int32), 2)
    step = run(
        jnp.zeros((1, 2, 3)),
        jnp.zeros((3, 3)),
        jnp.zeros((1, 2)),
        jnp.array([[1, 0]], jnp.int32),
        TreeLevel(*map(jnp.asarray, (offsets, codes, *wide_children(offsets, codes, 3)))),
        width=4,
        packed=packed,
    )
    np.testing.assert_array_equal(step.parents, [[0, 0, 0, 1]])
    np.testing.assert_array_equal(step.nodes, [[3, 4, 5, 0]])


def test_a_nan_is_no_dead_beam() -> None:
    for seed in range(6):  # packed and dense
        x = inputs(SMALL, seed)
        x["hidden"][0, 1], x["beam_scores"][0, 1] = np.nan, 0.0
        filters, _ = draw_filter("none", x, np.random.default_rng(0))
        step = run(**x, width=6, packed=128, filters=filters, implementation="xla")
        assert np.isnan(np.asarray(step.scores[0])).any()


def test_the_approximate_form_takes_few_children_of_a_beam() -> None:
    shape = dict(batch=2, beams=4, vocabulary=12, nodes=9, degree=6, width=20)
    x = inputs(shape, 5)
    steps = [run(**x, width=20, approximate=2, implementation=name) for name in ("reference", "xla")]
    np.testing.assert_allclose(steps[0].scores, steps[1].scores, atol=1e-6)
    for row in range(2):
        alive = np.isfinite(np.asarray(steps[1].scores[row]))
        assert np.bincount(np.asarray(steps[1].parents[row])[alive]).max() == 2
        degree = np.diff(x["level"].offsets)[x["nodes"][row]][np.isfinite(x["beam_scores"][row])]
        assert alive.sum() == np.minimum(degree, 2).sum()


def test_wide_children_are_the_codes() -> None:
    shape = dict(vocabulary=1100, nodes=30, degree=300)
    level = tree_level(shape, np.random.default_rng(0))
    degrees = np.diff(level["offsets"])
    np.testing.assert_array_equal(level["wide_nodes"], np.flatnonzero(degrees >= 34))
    bits = np.unpackbits(level["wide_bitmaps"].view(np.uint8), axis=1, bitorder="little")
    for node, row in zip(level["wide_nodes"], bits, strict=True):
        own = level["codes"][level["offsets"][node] : level["offsets"][node + 1]]
        np.testing.assert_array_equal(np.flatnonzero(row), own)


def test_small_vocabularies_are_never_packed() -> None:
    assert packed_capacity(256, 8192) == 32768
    assert packed_capacity(32, 64) == 0


by_blocks = jax.jit(functools.partial(top_k, k=7, block=4))


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 1.0]), min_size=48, max_size=48))
def test_the_best_blocks_hold_the_best_in_the_order_of_a_stable_sort(values: list[float]) -> None:
    row = np.array(values, np.float32)
    want = np.argsort(-row, kind="stable")[:7]
    scores, index = by_blocks(row[None])
    np.testing.assert_array_equal(scores[0], row[want])
    alive = np.isfinite(row[want])
    np.testing.assert_array_equal(np.asarray(index[0])[alive], want[alive])


@pytest.mark.parametrize(("vocabulary", "width"), [(300, 40), (256, 40), (5, 20)])
def test_the_best_of_all_tokens_are_those_of_a_stable_sort(vocabulary: int, width: int) -> None:
    """With ties within a beam and between beams, dead beams, tokens that may not be, and too few of all."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.integers(-2, 3, (2, 4, vocabulary)).astype(np.float32)
    logits[:, 2] = np.roll(logits[:, 1], 1, axis=-1)  # another beam with the same sum
    logits[0, 1, :3] = -np.inf
    scores = np.array([[0, -1, -1, -np.inf], [-np.inf, -0.5, -np.inf, -3]], np.float32)
    got, index = (np.asarray(x) for x in jax.jit(best_tokens, static_argnums=2)(logits, scores, width))
    exact = logits.astype(np.float64)
    flat = scores[..., None] + exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for row, values in enumerate(flat.reshape(2, -1)):
        want = np.argsort(-values.round(5), kind="stable")[:width]
        alive = np.isfinite(values[want])
        np.testing.assert_allclose(got[row, : len(want)], values[want], atol=1e-5)
        assert np.isneginf(got[row, len(want) :]).all()
        np.testing.assert_array_equal(index[row, : len(want)][alive], want[alive])
        assert ((index >= 0) & (index < 4 * vocabulary)).all()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 1.0]), min_size=24, max_size=24),
    width=st.integers(1, 30),
)
def test_the_heap_is_a_stable_sort(values: list[float], width: int) -> None:
    rows = np.array(values, np.float32).reshape(4, 6)
    want = np.argsort(-rows.ravel(), kind="stable")[:width]
    want = want[np.isfinite(rows.ravel()[want])]
    got = heap.top_k(rows, width)
    np.testing.assert_array_equal(got.indices, want)
    np.testing.assert_array_equal(got.scores, rows.ravel()[want])
    assert len(want) <= got.visited <= np.isfinite(rows).sum()


def test_the_heap_visits_few_candidates() -> None:
    rng = np.random.default_rng(0)
    for alpha in (0.05, 50.0):
        scores = np.log(rng.dirichlet(np.full(64, alpha), 32) + 1e-12).astype(np.float32)
        assert heap.top_k(scores, 32).visited < 0.15 * scores.size
