# SPDX-License-Identifier: Apache-2.0
"""Beam search and ranking over small random catalogs: against brute force, and against every way of batching."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.catalog.item_filters import ItemFilter, ItemFilters
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import beam, decoder, params
from jgr.ops.constrained_topk import packed_capacity

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


WIDTH, PADDED = 8, 24  # of what most tests ask of one shop, so that they share its programs


@pytest.fixture(scope="module")
def shop(weights) -> World:
    return world(weights, 200, 3)


def search(weights, tables, tokens, lengths, widths, width, normalize="valid", filters=None) -> beam.Beams:
    out = beam.recommend(
        weights, tables, tokens, lengths, np.asarray(widths, np.int32), filters,
        cfg=CFG, width=width, normalize=normalize,
    )  # fmt: skip
    return beam.Beams(*(np.asarray(x) for x in out))


def brute_force(weights, world: World, tokens: np.ndarray, normalize: str, cfg=CFG) -> np.ndarray:
    """Score of every leaf after one prompt [t], by whole forwards over prompt + path, in log-probabilities."""
    tree, tables = world
    depth = tree.depth
    paths = np.stack([tree.codes[level][tree.paths[:, level]] for level in range(depth)], 1)
    full = np.stack(
        [np.concatenate([tokens, [tables.tokens[i][c] for i, c in enumerate(path)]]) for path in paths]
    )
    out = prefill(weights, cfg, full.astype(np.int32), np.full(len(full), full.shape[1], np.int32))
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


@pytest.mark.parametrize(
    ("depth", "normalize"), [(1, "valid"), (3, "valid"), (5, "valid"), (1, "full"), (3, "full")]
)
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
def test_rank_gives_the_scores_of_recommend(weights, shop: World, normalize: str) -> None:
    tokens, lengths = prompts([11, 5], PADDED)
    beams = search(weights, shop.tables, tokens, lengths, [WIDTH, WIDTH], WIDTH, normalize)
    scores = beam.rank(weights, shop.tables, tokens, lengths, beams.leaves, cfg=CFG, normalize=normalize)
    np.testing.assert_allclose(np.asarray(scores), beams.scores, atol=ATOL)


def test_mixed_lengths_and_widths_in_one_batch_change_nothing(weights, shop: World) -> None:
    lengths, widths = [3, 16], [WIDTH, 3]
    tokens, counts = prompts(lengths, PADDED, filler=7)
    together = search(weights, shop.tables, tokens, counts, widths, WIDTH)
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        alone = search(
            weights, shop.tables, tokens[row : row + 1, :length], counts[row : row + 1], [width], width
        )
        np.testing.assert_allclose(together.scores[row, :width], alone.scores[0], atol=ATOL)
        assert np.isneginf(together.scores[row, width:]).all()
        separate = np.abs(np.diff(alone.scores[0], append=-np.inf, prepend=np.inf))
        clear = (separate[:-1] > SEPARATE) & (separate[1:] > SEPARATE)
        np.testing.assert_array_equal(together.leaves[row, :width][clear], alone.leaves[0][clear])


def test_rank_is_independent_of_company_and_order(weights, shop: World) -> None:
    tokens, lengths = prompts([7, 12], PADDED)
    leaves = np.random.default_rng(0).permutation(shop.tree.n_leaves)[:WIDTH].astype(np.int32)
    both = np.asarray(
        beam.rank(weights, shop.tables, tokens, lengths, np.stack([leaves, leaves[::-1]]), cfg=CFG)
    )
    alone = np.asarray(beam.rank(weights, shop.tables, tokens[:1], lengths[:1], leaves[None, :1], cfg=CFG))
    np.testing.assert_allclose(both[0, 0], alone[0, 0], atol=ATOL)
    swapped = np.asarray(
        beam.rank(weights, shop.tables, tokens, lengths, np.stack([leaves[::-1], leaves]), cfg=CFG)
    )
    np.testing.assert_allclose(swapped[0][::-1], both[0], atol=ATOL)


def device_filters(
    chosen: list[ItemFilter], depth: int, capacity: int, segments: ItemFilters
) -> beam.Filters:
    """As an executor lays them out; every combination that is named has a row."""
    batch = len(chosen)
    children, parents = np.zeros((2, batch, depth, capacity), np.int32)
    counts, segment = np.zeros((batch, depth), np.int32), np.zeros(batch, np.int32)
    every = [segments.combination([name]) for name in segments.segments]
    rows = [[np.full_like(words, 2**32 - 1)] for words in every[0].node_words]
    for row, one in enumerate(chosen):
        for level in range(depth if one.children else 0):
            counts[row, level] = n = len(one.children[level])
            children[row, level, :n], parents[row, level, :n] = one.children[level], one.parents[level]
        if one.segment is not None:
            segment[row] = len(rows[0])
            for level, words in enumerate(one.segment.node_words):
                rows[level].append(words)
    while len(rows[0]) < 4:
        for level_rows in rows:
            level_rows.append(np.zeros_like(level_rows[0]))
    only = np.array([one.only for one in chosen])
    return beam.Filters(children, parents, counts, only, segment, tuple(np.stack(r) for r in rows))


FILTERED = dict(n_items=70, depth=3, width=5, prompts=3, tokens=8)


@pytest.fixture(scope="module")
def filtered(weights):
    """A small world, its prompts, and each prompt's logits after every node: per level [prompts, nodes, vocabulary]."""
    small = world(weights, FILTERED["n_items"], FILTERED["depth"])
    tokens, lengths = prompts([8, 5, 3], FILTERED["tokens"])
    logits = []
    for level in range(FILTERED["depth"]):
        _, first = np.unique(small.tree.paths[:, level - 1], return_index=True) if level else ([0], [0])
        rows = []
        for prompt, length in zip(tokens, lengths, strict=True):
            after = np.zeros((len(first), 8 + 3), np.int32)
            for i, leaf in enumerate(first):
                path = [
                    int(small.tables.tokens[k][small.tree.codes[k][small.tree.paths[leaf, k]]])
                    for k in range(level)
                ]
                after[i, : length + level] = [*prompt[:length], *path]
            out = prefill(weights, CFG, after, np.full(len(first), length + level, np.int32))
            rows.append(np.asarray(decoder.logits(weights, out.hidden[:, length + level - 1]), np.float64))
        logits.append(np.stack(rows))
    return small, tokens, lengths, logits, weights


def levels_by_hand(filtered, prompt: int, width: int, leaves: set[int], normalize: str) -> list[list[tuple]]:
    """By level (score, parent, node), best first: beam search over the nodes above `leaves`, scores normalised by the
    whole tree."""
    tree, tables = filtered[0]
    beams, levels = [(0.0, 0, 0)], []
    for level in range(tree.depth):
        reachable = {int(tree.paths[leaf, level]) for leaf in leaves}
        found = []
        for at, (score, _, node) in enumerate(beams):
            row = filtered[3][level][prompt, node]
            children = np.arange(tree.offsets[level][node], tree.offsets[level][node + 1])
            legal = row[np.asarray(tables.tokens[level])[tree.codes[level][children]]]
            over = legal if normalize == "valid" else row
            norm = np.log(np.exp(over - over.max()).sum()) + over.max()
            found += [
                (score + x - norm, at, int(child))
                for child, x in zip(children, legal, strict=True)
                if int(child) in reachable
            ]
        beams = sorted(found, key=lambda f: (-f[0], *f[1:]))[:width]
        levels.append(beams)
    return levels


def beam_search_by_hand(*given) -> list[tuple]:
    """The last level of `levels_by_hand`: (score, leaf), best first."""
    return [(score, leaf) for score, _, leaf in levels_by_hand(*given)[-1]]


@pytest.mark.parametrize("normalize", ["valid", "full"])
def test_every_level_is_that_of_a_search_by_hand(filtered, normalize: str) -> None:
    (tree, tables), tokens, lengths, _, weights = filtered
    rows, widths = np.arange(FILTERED["n_items"], dtype=np.int32), [FILTERED["width"], 2, 1]
    denied = [rows[:0], rows[5:40], rows[::2]]
    chosen = [ItemFilters(tree, {"all": rows}).choose(each, None, []) for each in denied]
    laid_out = device_filters(chosen, tree.depth, len(rows), ItemFilters(tree, {"all": rows}))
    given = weights, tables, tokens, lengths, np.array(widths, np.int32), laid_out
    found = beam.recommend(*given, cfg=CFG, width=FILTERED["width"], normalize=normalize, levels=True)
    plain = search(weights, tables, tokens, lengths, widths, FILTERED["width"], normalize, laid_out)
    for one, other in zip(found[:3], plain[:3], strict=True):
        np.testing.assert_allclose(np.asarray(one), other, atol=ATOL)
    nodes, parents, scores = (np.asarray(each) for each in found.levels)
    assert nodes.shape == parents.shape == scores.shape == (3, tree.depth, FILTERED["width"])
    for row, width in enumerate(widths):
        left = set(tree.leaf_of_row[np.setdiff1d(rows, denied[row])].tolist())
        for level, wanted in enumerate(levels_by_hand(filtered, row, width, left, normalize)):
            alive = len(wanted)
            assert np.isneginf(scores[row, level, alive:]).all()
            np.testing.assert_allclose(
                scores[row, level, :alive], [score for score, _, _ in wanted], atol=ATOL
            )
            assert nodes[row, level, :alive].tolist() == [node for _, _, node in wanted]
            assert parents[row, level, :alive].tolist() == [parent for _, parent, _ in wanted]
        np.testing.assert_array_equal(nodes[row, -1], np.asarray(found.leaves)[row])
        np.testing.assert_array_equal(scores[row, -1], np.asarray(found.scores)[row])


def test_without_levels_the_program_is_what_it_is_without_the_argument(weights) -> None:
    """Its text has no trace of them; with them it has three more outputs."""
    tokens, lengths = prompts([5], PADDED)
    given = weights, world(weights, 30, 2).tables, tokens, lengths, np.array([WIDTH], np.int32)
    lowered = [
        beam.recommend.lower(*given, cfg=CFG, width=WIDTH, **more)
        for more in ({}, {"levels": False}, {"levels": True})
    ]
    texts = [one.as_text() for one in lowered]
    assert texts[0] == texts[1] != texts[2]
    assert [len(jax.tree.leaves(one.out_info)) for one in lowered] == [3, 3, 6]


@pytest.mark.parametrize("normalize", ["valid", "full"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_filter_is_a_search_of_the_tree_that_it_leaves(
    filtered, normalize: str, data: st.DataObject
) -> None:
    """With fewer beams than leaves: none of them is lost to a subtree in which nothing is left."""
    (tree, tables), tokens, lengths, _, weights = filtered
    rows = np.arange(FILTERED["n_items"], dtype=np.int32)
    named = {"odd": rows[rows % 2 == 1], "few": rows[:9], "most": rows[rows % 7 > 0]}
    filters, chosen, left, widths = ItemFilters(tree, named), [], [], []
    for _ in range(FILTERED["prompts"]):
        keep = data.draw(st.sampled_from([0, 1, 4, 20, 60]))
        some = np.array(data.draw(st.permutations(range(len(rows)))), np.int32)
        kind = data.draw(st.sampled_from(["none", "deny", "allow", "segment", "all"]))
        denied = some[keep:] if kind in ("deny", "all") else some[:0]
        allowed = some[: keep + 10] if kind in ("allow", "all") and data.draw(st.booleans()) else None
        names = (
            data.draw(st.lists(st.sampled_from(list(named)), max_size=2))
            if kind in ("segment", "all")
            else []
        )
        one = filters.choose(denied, allowed, names)
        chosen.append(one)
        left.append(set(tree.leaf_of_row[rows[one.keeps(rows)]].tolist()))
        widths.append(data.draw(st.integers(1, FILTERED["width"])))
    laid_out = device_filters(chosen, tree.depth, len(rows), filters)
    beams = search(weights, tables, tokens, lengths, widths, FILTERED["width"], normalize, laid_out)
    for row, width in enumerate(widths):
        want = beam_search_by_hand(filtered, row, width, left[row], normalize)
        alive = np.isfinite(beams.scores[row])
        np.testing.assert_allclose(beams.scores[row][alive], [score for score, _ in want], atol=ATOL)
        leaves = beams.leaves[row][alive].tolist()
        assert len(set(leaves)) == len(leaves) and set(leaves) <= left[row]
        if len(want) < 2 or np.diff([score for score, _ in want]).max() < -SEPARATE:
            assert leaves == [leaf for _, leaf in want]
        # Where everything that is left fits into the beams, all of it is found.
        if len(left[row]) <= width:
            assert set(leaves) == left[row]


def test_few_children_are_gathered_and_score_the_same() -> None:
    """Levels of 130 tokens with few children a node: the packed form, at the last level at least."""
    cfg = dataclasses.replace(CFG, vocab_size=270)
    weights = jax.tree.map(lambda x: x * 4, params.initialize(decoder.spec(cfg), jax.random.key(0)))
    tree = PrefixTree.build(np.random.default_rng(0).integers(0, 130, (70, 2)).astype(np.int32))
    tables = beam.catalog_tables(
        tree, tuple((4 + 130 * level + np.arange(130)).astype(np.int32) for level in range(2)), weights
    )
    width, (tokens, lengths) = 32, prompts([7], 8)
    assert np.sort(np.diff(tree.offsets[1]))[::-1][:width].sum() <= packed_capacity(width, 130)
    beams = beam.recommend(
        weights, tables, tokens, lengths, np.array([width], np.int32), cfg=cfg, width=width
    )
    want = brute_force(weights, World(tree, tables), tokens[0, :7], "valid", cfg)
    found = np.asarray(beams.scores)[0]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, want[np.asarray(beams.leaves)[0]], atol=ATOL)


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


def test_width_1_is_greedy(weights, shop: World) -> None:
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
@given(seed=st.integers(0, 1000), width=st.integers(1, WIDTH))
def test_every_beam_is_an_item_and_no_item_comes_twice(weights, shop: World, seed: int, width: int) -> None:
    tokens, lengths = prompts([5, 10], PADDED, seed=seed)
    beams = search(weights, shop.tables, tokens, lengths, [width, WIDTH], WIDTH)
    for row in range(2):
        alive = np.isfinite(beams.scores[row])
        leaves = beams.leaves[row][alive]
        assert len(set(leaves)) == len(leaves)
        assert (np.diff(beams.scores[row][alive]) <= 0).all()
        codes = np.stack([shop.tree.codes[i][shop.tree.paths[leaves, i]] for i in range(3)], 1)
        np.testing.assert_array_equal(beams.codes[row][alive], codes)


def test_the_prompt_is_computed_once_for_all_candidates(weights) -> None:
    """Counted FLOPs of the compiled programs: 999 more candidates cost 999 x their own tokens, and no prompt."""
    (tokens, lengths), tables = prompts([48], 48), world(weights, 30, 2).tables

    @functools.cache
    def flops(candidates: int, prompt: int) -> float:
        leaves = np.zeros((1, candidates), np.int32)
        analysis = beam.rank.lower(
            weights, tables, tokens[:, :prompt], lengths, leaves, cfg=CFG
        ).cost_analysis()
        assert analysis is not None
        return float(analysis["flops"])

    prompt_flops = flops(1, 48) - flops(1, 24)  # 24 prompt tokens, through every layer
    # Were the prompt repeated per candidate, the difference would grow a thousandfold; only attention reads it.
    assert 0 < flops(1000, 48) - flops(1000, 24) < 1000 * prompt_flops / 10
    assert flops(1000, 48) < flops(1, 48) * 1000 / 10


@given(st.integers(1, 20_000_000))
def test_growth_classes_are_few_and_not_much_larger(n: int) -> None:
    size = beam.growth_class(n)
    assert n <= size <= max(64, n + n // 4)
    assert beam.growth_class(size) == size
    assert len({beam.growth_class(x) for x in range(size, 2 * size + 1, max(1, size // 16))}) <= 6


@pytest.mark.parametrize("normalize", ["valid", "full"])
def test_tables_with_room_to_grow_give_the_same(weights, shop: World, normalize) -> None:
    level_tokens = tuple((4 + LEVEL * level + np.arange(LEVEL)).astype(np.int32) for level in range(3))
    grown = beam.catalog_tables(shop.tree, level_tokens, weights, growing=True)
    assert grown.n_leaves == 192 > shop.tables.n_leaves
    tokens, lengths = prompts([9, 4], PADDED)
    plain, roomy = (
        search(weights, t, tokens, lengths, [WIDTH, 5], WIDTH, normalize) for t in (shop.tables, grown)
    )
    for one, other in zip(plain, roomy, strict=True):
        np.testing.assert_array_equal(one, other)
