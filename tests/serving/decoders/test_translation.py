# SPDX-License-Identifier: Apache-2.0
"""Requests to works and outcomes to items, on random catalogs, against brute force over the rows."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import Int32, PrefixTree
from jgr.config import ConfigError
from jgr.serving.api import RankRequest, RecommendRequest
from jgr.serving.decoders.translation import Translator
from jgr.serving.decoders.work import RankOutcome, RankWork, RecommendOutcome, RecommendWork
from tests.serving.fakes import CATALOG, TREE, make_config


class Rows:
    """Prompts that are the rows themselves."""

    def build(self, rows: Int32) -> Int32:
        return rows


def make(catalog: Catalog, width: int = 64) -> tuple[Translator, PrefixTree]:
    tree = PrefixTree.build(catalog.codes)
    config = make_config(f"beam.width={width}")
    return Translator("m", catalog, tree, Rows(), config, max_beam_width=64, max_candidates=64), tree


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    """Few codes, so that many items share a semantic id."""
    paths = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12))
    return Catalog.build([f"i{n}" for n in range(len(paths))], paths, [{"n": n} for n in range(len(paths))])


@settings(max_examples=200, deadline=None)
@given(catalog=catalogs(), exclude=st.booleans(), data=st.data())
def test_recommend_against_brute_force(catalog: Catalog, exclude: bool, data: st.DataObject) -> None:
    translator, tree = make(catalog)
    history = data.draw(st.lists(st.sampled_from(catalog.item_ids), min_size=1, max_size=12))
    top_k = data.draw(st.integers(1, catalog.n_items))
    request = RecommendRequest(history=list(history), top_k=top_k, exclude_history=exclude)
    task = translator.prepare(request)
    assert isinstance(task.work, RecommendWork)
    assert task.work.prompt.tolist() == [catalog.row(item) for item in history]

    paths = {item: tuple(codes) for item, codes in zip(catalog.item_ids, catalog.codes.tolist(), strict=True)}
    leaves = sorted(set(paths.values()))
    hidden = set(history) if exclude else set()
    gone = [n for n, leaf in enumerate(leaves) if all(i in hidden for i in paths if paths[i] == leaf)]
    every = np.arange(tree.n_leaves, dtype=np.int32)
    assert every[~task.work.filter.enters(every)].tolist() == gone

    beams = data.draw(st.permutations([n for n in range(tree.n_leaves) if n not in gone]))
    scores = -np.arange(len(beams), dtype=np.float32)
    items = translator.items(task, RecommendOutcome(np.array(beams, np.int32), scores))
    expected = [
        (item, -float(n))
        for n, beam in enumerate(beams)
        for item in catalog.item_ids
        if paths[item] == leaves[beam] and item not in hidden
    ]
    assert [(item.item_id, item.score) for item in items] == expected[:top_k]
    assert [item.rank for item in items] == list(range(1, len(items) + 1))


@settings(max_examples=100, deadline=None)
@given(catalog=catalogs(), data=st.data())
def test_rank_against_brute_force(catalog: Catalog, data: st.DataObject) -> None:
    translator, tree = make(catalog)
    candidates = data.draw(st.lists(st.sampled_from(catalog.item_ids), min_size=1, unique=True))
    scores = data.draw(st.lists(st.sampled_from([-1.0, -2.0, -3.5]), min_size=len(candidates)))[
        : len(candidates)
    ]
    top_k = data.draw(st.none() | st.integers(1, len(candidates)))
    request = RankRequest(history=["i0"], candidates=list(candidates), top_k=top_k, include_metadata=True)
    task = translator.prepare(request)
    assert isinstance(task.work, RankWork)
    assert [tree.paths[leaf].tolist() for leaf in task.work.leaves] == [
        tree.paths[tree.leaf_of_row[int(item[1:])]].tolist() for item in candidates
    ]
    items = translator.items(task, RankOutcome(np.array(scores, np.float32)))
    ordered = sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1])  # stable
    assert [(item.item_id, item.score) for item in items] == ordered[:top_k]
    assert [item.metadata for item in items] == [{"n": int(item[1:])} for item, _ in ordered[:top_k]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_is_the_executors_fault(bad: float) -> None:
    translator, _ = make(CATALOG)
    task = translator.prepare(RankRequest(history=["a"], candidates=["a", "b"]))
    with pytest.raises(ValueError, match="not finite"):
        translator.items(task, RankOutcome(np.array([-1.0, bad], np.float32)))


def test_a_default_beam_wider_than_every_profile_is_refused() -> None:
    config = make_config("beam.width=6")
    with pytest.raises(ConfigError, match=r"beam.width is 6.*profiles.widths is 5"):
        Translator("m", CATALOG, TREE, Rows(), config, max_beam_width=5, max_candidates=4)
