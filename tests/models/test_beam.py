# SPDX-License-Identifier: Apache-2.0
"""Beam search and ranking over small random catalogs: against brute force, and against every way of batching."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.data.prefix_tree import PrefixTree
from jgr.models import beam, decoder, params

CFG = decoder.DecoderConfig(
    family="qwen3", vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48,
    rope_theta=10_000.0, norm_eps=1e-6, tied=True, max_position=64,
)  # fmt: skip
LEVEL = 12  # tokens of each level's vocabulary
ATOL = 1e-4  # what jgr promises between any two ways to compute a score in float32
SEPARATE = 2e-4  # scores further apart than this have an order


@pytest.fixture(scope="module")
def weights() -> decoder.DecoderParams:
    drawn = params.initialize(decoder.spec(CFG), jax.random.key(0))
    return jax.tree.map(lambda x: x * 4, drawn)  # peaked distributions: beams differ and die


prefill = jax.jit(decoder.prefill, static_argnames="cfg")


class World(NamedTuple):
    tree: PrefixTree
    tables: beam.CatalogTables


def world(weights: decoder.DecoderParams, n_items: int, depth: int, seed: int = 0) -> World:
    codes = np.random.default_rng(seed).integers(0, LEVEL, (n_items, depth)).astype(np.int32)
    tree = PrefixTree.build(codes)
    tokens = tuple((4 + LEVEL * level + np.arange(LEVEL)).astype(np.int32) for level in range(depth))
    return World(tree, beam.catalog_tables(tree, tokens, weights))


def prompts(lengths: list[int], padded: int, seed: int = 0, filler: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full((len(lengths), padded), filler, np.int32)
    for row, length in enumerate(lengths):  # a row's tokens depend on its own number alone
        tokens[row, :length] = np.random.default_rng((seed, row)).integers(4, 40, length)
    return tokens, np.array(lengths, np.int32)


def search(weights, tables, tokens, lengths, widths, width, normalize="valid", excluded=None) -> beam.Beams:
    if excluded is None:
        excluded = np.full((len(tokens), 1), tables.n_leaves, np.int32)
    out = beam.recommend(
        weights, tables, tokens, lengths, np.asarray(widths, np.int32), excluded,
        cfg=CFG, width=width, normalize=normalize,
    )  # fmt: skip
    return beam.Beams(*(np.asarray(x) for x in out))


def brute_force(weights, world: World, tokens: np.ndarray, normalize: str) -> np.ndarray:
    """Score of every leaf after one prompt [t], by whole forwards over prompt + path, in log-probabilities."""
    tree, tables = world
    depth = tree.depth
    paths = np.stack([tree.codes[level][tree.paths[:, level]] for level in range(depth)], 1)
    full = np.stack(
        [np.concatenate([tokens, [tables.tokens[i][c] for i, c in enumerate(path)]]) for path in paths]
    )
    out = prefill(weights, CFG, full.astype(np.int32), np.full(len(full), full.shape[1], np.int32))
    logits = np.asarray(decoder.logits(weights, out.hidden), np.float64)[:, len(tokens) - 1 : -1]
    scores = np.zeros(len(paths))
    for leaf, path in enumerate(paths):
        for level in range(depth):
            row = logits[leaf, level]
            siblings = sorted(
                {tuple(p[: level + 1]) for p in paths if tuple(p[:level]) == tuple(path[:level])}
            )
            legal = [int(tables.tokens[level][s[-1]]) for s in siblings]
            over = row[legal] if normalize == "valid" else row
            scores[leaf] += (
                row[int(tables.tokens[level][path[level]])]
                - np.log(np.exp(over - over.max()).sum())
                - over.max()
            )
    return scores


def same_ranking(leaves: np.ndarray, scores: np.ndarray, want: np.ndarray) -> None:
    """leaves and scores are the best of want [all leaves]; order is checked where scores are apart."""
    np.testing.assert_allclose(scores, np.sort(want)[::-1][: len(scores)], atol=ATOL)
    np.testing.assert_allclose(scores, want[leaves], atol=ATOL)


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("normalize", ["valid", "full"])
def test_wide_beams_equal_brute_force(weights, depth: int, normalize: str) -> None:
    small = world(weights, 30, depth)
    tokens, lengths = prompts([9], 9)
    width = 32  # at least the number of prefixes of every level: the search is exhaustive
    beams = search(weights, small.tables, tokens, lengths, [width], width, normalize)
    want = brute_force(weights, small, tokens[0], normalize)
    n = small.tree.n_leaves
    assert sorted(beams.leaves[0, :n]) == list(range(n))
    assert np.isneginf(beams.scores[0, n:]).all()
    same_ranking(beams.leaves[0, :n], beams.scores[0, :n], want)
    codes = np.stack([small.tree.codes[i][small.tree.paths[beams.leaves[0, :n], i]] for i in range(depth)], 1)
    np.testing.assert_array_equal(beams.codes[0, :n], codes)
    if normalize == "valid":
        np.testing.assert_allclose(np.exp(want).sum(), 1.0, atol=1e-6)


@pytest.mark.parametrize("normalize", ["valid", "full"])
def test_rank_gives_the_scores_of_recommend(weights, normalize: str) -> None:
    shop = world(weights, 200, 3)
    tokens, lengths = prompts([11, 5], 16)
    beams = search(weights, shop.tables, tokens, lengths, [16, 16], 16, normalize)
    scores = beam.rank(weights, shop.tables, tokens, lengths, beams.leaves, cfg=CFG, normalize=normalize)
    np.testing.assert_allclose(np.asarray(scores), beams.scores, atol=ATOL)


def test_mixed_lengths_and_widths_in_one_batch_change_nothing(weights) -> None:
    shop = world(weights, 300, 3)
    lengths, widths = [3, 16], [8, 3]
    tokens, counts = prompts(lengths, 24, filler=7)
    together = search(weights, shop.tables, tokens, counts, widths, 8)
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        alone = search(
            weights, shop.tables, tokens[row : row + 1, :length], counts[row : row + 1], [width], width
        )
        np.testing.assert_allclose(together.scores[row, :width], alone.scores[0], atol=ATOL)
        assert np.isneginf(together.scores[row, width:]).all()
        separate = np.abs(np.diff(alone.scores[0], append=-np.inf, prepend=np.inf))
        clear = (separate[:-1] > SEPARATE) & (separate[1:] > SEPARATE)
        np.testing.assert_array_equal(together.leaves[row, :width][clear], alone.leaves[0][clear])


def test_rank_is_independent_of_company_and_order(weights) -> None:
    shop = world(weights, 100, 3)
    tokens, lengths = prompts([7, 12], 12)
    leaves = np.random.default_rng(0).permutation(shop.tree.n_leaves)[:20].astype(np.int32)
    both = np.asarray(
        beam.rank(weights, shop.tables, tokens, lengths, np.stack([leaves, leaves[::-1]]), cfg=CFG)
    )
    alone = np.asarray(beam.rank(weights, shop.tables, tokens[:1], lengths[:1], leaves[None, :1], cfg=CFG))
    np.testing.assert_allclose(both[0, 0], alone[0, 0], atol=ATOL)
    swapped = np.asarray(
        beam.rank(weights, shop.tables, tokens, lengths, np.stack([leaves[::-1], leaves]), cfg=CFG)
    )
    np.testing.assert_allclose(swapped[0][::-1], both[0], atol=ATOL)


def test_excluded_leaves_are_dropped_and_the_others_keep_their_scores(weights) -> None:
    shop = world(weights, 40, 2)
    tokens, lengths = prompts([6], 6)
    width = 48
    free = search(weights, shop.tables, tokens, lengths, [width], width)
    gone = free.leaves[:, :5]
    left = search(weights, shop.tables, tokens, lengths, [width], width, excluded=gone)
    n = shop.tree.n_leaves - 5
    np.testing.assert_array_equal(left.leaves[0, :n], free.leaves[0, 5 : 5 + n])
    np.testing.assert_allclose(left.scores[0, :n], free.scores[0, 5 : 5 + n], atol=1e-6)
    assert np.isneginf(left.scores[0, n:]).all()


@pytest.mark.parametrize(
    "codes", [[[3]], [[1, 2, 3]], [[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 4], [1, 5, 0]]]
)
@pytest.mark.parametrize("width", [4])
def test_tiny_catalogs(weights, codes: list[list[int]], width: int) -> None:
    """A single item, one id for two items, fewer items than beams."""
    tree = PrefixTree.build(np.array(codes, np.int32))
    tokens = tuple((4 + LEVEL * i + np.arange(LEVEL)).astype(np.int32) for i in range(tree.depth))
    small = World(tree, beam.catalog_tables(tree, tokens, weights))
    prompt, lengths = prompts([4], 4)
    beams = search(weights, small.tables, prompt, lengths, [width], width)
    alive = np.isfinite(beams.scores[0])
    assert alive.sum() == min(width, tree.n_leaves)
    assert len(set(beams.leaves[0][alive])) == alive.sum()
    if width >= tree.n_leaves:
        same_ranking(
            beams.leaves[0][alive], beams.scores[0][alive], brute_force(weights, small, prompt[0], "valid")
        )


def test_width_1_is_greedy(weights) -> None:
    shop = world(weights, 300, 3)
    tokens, lengths = prompts([8], 8)
    path: tuple[int, ...] = ()
    codes = np.stack([shop.tree.codes[i][shop.tree.paths[:, i]] for i in range(3)], 1)
    for level in range(3):
        so_far = np.concatenate(
            [tokens[0], [int(shop.tables.tokens[i][c]) for i, c in enumerate(path)]]
        ).astype(np.int32)
        padded = np.pad(so_far, (0, 10 - len(so_far)))[None]
        out = prefill(weights, CFG, padded, np.array([len(so_far)], np.int32))
        logits = np.asarray(decoder.logits(weights, out.hidden))[0, len(so_far) - 1]
        legal = sorted({int(c[level]) for c in codes if tuple(c[:level]) == path})
        path += (max(legal, key=lambda c: logits[int(shop.tables.tokens[level][c])]),)
    beams = search(weights, shop.tables, tokens, lengths, [1], 1)
    np.testing.assert_array_equal(beams.codes[0, 0], path)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), width=st.integers(1, 8))
def test_every_beam_is_an_item_and_no_item_comes_twice(weights_seed0, seed: int, width: int) -> None:
    weights, shop = weights_seed0
    tokens, lengths = prompts([5, 10], 12, seed=seed)
    beams = search(weights, shop.tables, tokens, lengths, [width, 8], 8)
    for row in range(2):
        alive = np.isfinite(beams.scores[row])
        leaves = beams.leaves[row][alive]
        assert len(set(leaves)) == len(leaves)
        assert (np.diff(beams.scores[row][alive]) <= 0).all()
        codes = np.stack([shop.tree.codes[i][shop.tree.paths[leaves, i]] for i in range(3)], 1)
        np.testing.assert_array_equal(beams.codes[row][alive], codes)


@pytest.fixture(scope="module")
def weights_seed0(weights):
    return weights, world(weights, 150, 3)


def test_the_prompt_is_computed_once_for_all_candidates(weights) -> None:
    """Counted FLOPs of the compiled programs: 999 more candidates cost 999 x their own tokens, and no prompt."""
    shop = world(weights, 200, 3)
    tokens, lengths = prompts([48], 48)

    def flops(candidates: int, prompt: int) -> float:
        leaves = np.zeros((1, candidates), np.int32)
        analysis = beam.rank.lower(
            weights, shop.tables, tokens[:, :prompt], lengths, leaves, cfg=CFG
        ).cost_analysis()
        assert analysis is not None
        return float(analysis["flops"])

    prompt_flops = flops(1, 48) - flops(1, 24)  # 24 prompt tokens, through every layer
    # Were the prompt repeated per candidate, the difference would grow a thousandfold; only attention reads it.
    assert 0 < flops(1000, 48) - flops(1000, 24) < 1000 * prompt_flops / 10
    assert flops(1000, 48) < flops(1, 48) * 1000 / 10
