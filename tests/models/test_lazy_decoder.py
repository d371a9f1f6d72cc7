# SPDX-License-Identifier: Apache-2.0
"""The lazy decoder against its formulas in numpy, searched and ranked against brute force, from a folder to answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, ConfigError, override
from jgr.models import beam, checkpoint, lazy_decoder
from jgr.models.lazy_decoder import LazyConfig, LazyParams
from jgr.models.params import CheckpointError, Spec
from jgr.prompt.tokens import level_tokens, semantic_id_tokenizer
from jgr.serving.api import Filters, RankRequest, RecommendRequest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.explanations import ExplainedLevel, ExplainRecommend
from tests.serving import tiny_model

PLAIN = LazyConfig(
    vocab_size=39, first_tokens=(3, 15, 27), level_sizes=(12, 12, 12), max_items=6, hidden=32, layers=2, heads=4,
    kv_heads=4, head_dim=8, mlp=48,
)  # fmt: skip
MIXED = dataclasses.replace(
    PLAIN, layers=3, kv_heads=2, context_heads=2, context_layers=2, context_parts=2, experts=5, experts_active=2,
    expert_mlp=16, dense_layers=1,
)  # fmt: skip
CONFIGS = pytest.mark.parametrize("cfg", [PLAIN, MIXED], ids=["plain", "mixed"])
ATOL = 1e-4
Array = np.ndarray[Any, Any]

begin, advance, forward = (
    jax.jit(f, static_argnums=1) for f in (lazy_decoder.begin, lazy_decoder.advance, lazy_decoder.forward)
)


def draw(cfg: LazyConfig, seed: int = 0) -> LazyParams:
    """Peaked distributions, and no norm that is one."""
    rng = np.random.default_rng(seed)

    def one(spec: Spec) -> Array:
        scale = 3 / np.sqrt(spec.fan_in) if spec.fan_in else 0.2
        return (rng.normal(0, scale, spec.shape) + (spec.init == "ones")).astype(np.float32)

    declared = lazy_decoder.spec(cfg)
    return jax.tree.map(lambda s: jnp.asarray(one(s)), declared, is_leaf=lambda x: isinstance(x, Spec))


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def by_hand(weights: LazyParams, cfg: LazyConfig, history: Array, path: list[int]) -> Array:
    """Logits of all tokens, place by place, after a history [n, depth] and the first tokens of an item; float64."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    d, width = cfg.head_dim, cfg.context_heads * cfg.head_dim

    def norm(x: Array, scale: Array) -> Array:
        return x / np.sqrt((x**2).mean() + cfg.norm_eps) * scale

    context = []  # per item, per slice [G, d]
    for at, item in enumerate(history):
        x = w.embed[item].sum(axis=0) + w.position[min(len(history) - 1 - at, cfg.max_items - 1)]
        slices = (x @ w.context).reshape(-1, width)
        context.append([norm(s, n).reshape(-1, d) for s, n in zip(slices, w.context_norm, strict=True)])

    def attention(q: Array, keys: list[Array], values: list[Array]) -> Array:
        """One query [H * d] over keys and values, [K, d] each."""
        if not keys:
            return np.zeros_like(q)
        heads = []
        for head, query in enumerate(q.reshape(-1, d)):
            shared = head // (cfg.heads // len(keys[0]))
            weight = softmax(np.array([query @ key[shared] for key in keys]) / np.sqrt(d))
            heads.append(sum(x * value[shared] for x, value in zip(weight, values, strict=True)))
        return np.concatenate(heads)

    def mlp(m: Any, x: Array) -> Array:
        return (silu(x @ m.gate) * (x @ m.up)) @ m.down

    def mixture(m: Any, x: Array) -> Array:
        scores = x @ m.router
        chosen = np.argsort(-scores)[: cfg.experts_active]
        out = mlp(m.shared, x)
        for expert, share in zip(chosen, softmax(scores[chosen]), strict=True):
            out = out + share * (silu(x @ m.gate[expert]) * (x @ m.up[expert])) @ m.down[expert]
        return out

    h = [w.bos[0], *w.embed[path]]
    for layer in range(cfg.layers):
        plain = layer < cfg.plain_layers
        stack, number = (w.plain, layer) if plain else (w.mixed, layer - cfg.plain_layers)
        block = jax.tree.map(lambda x, number=number: x[number], stack)
        first = layer * cfg.context_layers // cfg.layers * cfg.context_parts
        keys, values = [c[first] for c in context], [c[first + cfg.context_parts - 1] for c in context]
        own_k, own_v = [], []
        for place, x in enumerate(h):
            x = x + attention(norm(x, block.cross_norm) @ block.cross_q, keys, values) @ block.cross_o
            y = norm(x, block.self_norm)
            own_k.append((y @ block.wk).reshape(-1, d))
            own_v.append((y @ block.wv).reshape(-1, d))
            x = x + attention(y @ block.wq, own_k, own_v) @ block.wo
            y = norm(x, block.mlp_norm)
            h[place] = x + (mlp if plain else mixture)(block.mlp, y)
    return np.stack([w.output @ norm(x, scale) for x, scale in zip(h, w.norms, strict=False)])


def histories(cfg: LazyConfig, lengths: list[int], seed: int = 1) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [
        np.stack([first + rng.integers(0, 12, n) for first in cfg.first_tokens], 1).astype(np.int32)
        for n in lengths
    ]


def pad(items: list[Array], width: int, filler: int = 0) -> tuple[Array, Array]:
    tokens = np.full((len(items), width), filler, np.int32)
    for row, item in zip(tokens, items, strict=True):
        row[: item.size] = item.ravel()
    return tokens, np.array([item.size for item in items], np.int32)


@CONFIGS
def test_training_and_generation_compute_the_formulas(cfg: LazyConfig) -> None:
    weights, given = draw(cfg), histories(cfg, [5, 0, 1, 9])
    tokens, lengths = pad(given, 29, filler=5)  # 29: room for nine items, and two tokens that nothing reads
    targets = np.concatenate(histories(cfg, [4], seed=2))
    hidden = forward(weights, cfg, tokens, lengths, targets)
    state, stepped = None, []
    for level in range(3):
        if level == 0:
            out, state = begin(weights, cfg, tokens, lengths)
        else:
            # Two beams, the second a stranger in row 0; the ancestors say that row 1 holds ours.
            pair = np.stack([np.full(4, 7), targets[:, level - 1]], 1).astype(np.int32)
            ancestors = np.ones((4, level, 2), np.int32) * np.array([1, 1])
            ancestors[:, -1] = [0, 1]
            out, state = advance(weights, cfg, pair, state, ancestors)
        stepped.append(out[:, -1])
    for row, history in enumerate(given):
        want = by_hand(weights, cfg, history, targets[row, :2].tolist())
        for level in range(3):
            first = cfg.first_tokens[level]
            for x in (hidden[row, level], stepped[level][row]):
                got, start = lazy_decoder.next_logits(weights, cfg, x, level)
                assert start == first and got.shape == (12,)
                np.testing.assert_allclose(got, want[level, first : first + 12], atol=ATOL, rtol=1e-5)


def log_likelihoods(
    weights: LazyParams, cfg: LazyConfig, history: Array, tree: PrefixTree, full: bool
) -> Array:
    """Of every leaf, by hand."""
    whole: Array = prefix_likelihoods(weights, cfg, history, tree, full)[:, -1]
    return whole


def prefix_likelihoods(
    weights: LazyParams, cfg: LazyConfig, history: Array, tree: PrefixTree, full: bool
) -> Array:
    """Of the first codes of every leaf, by their number less one, by hand: [leaves, depth]."""
    paths = np.stack([tree.codes[level][tree.paths[:, level]] for level in range(tree.depth)], 1)
    scores = np.zeros(paths.shape)
    for leaf, path in enumerate(paths):
        logits = by_hand(weights, cfg, history, [cfg.first_tokens[i] + c for i, c in enumerate(path[:-1])])
        for level in range(tree.depth):
            siblings = {int(p[level]) for p in paths if (p[:level] == path[:level]).all()}
            row = logits[level, cfg.first_tokens[level] :][:12]
            over = row if full else row[sorted(siblings)]
            scores[leaf, level] = row[path[level]] - np.log(np.exp(over).sum())
    return scores.cumsum(axis=1)


def test_search_and_ranking_equal_brute_force() -> None:
    """Scores normalised over the level's whole vocabulary; the engine's test below has the other kind."""
    cfg = PLAIN
    weights, given = draw(cfg), histories(cfg, [4, 0])
    tree = PrefixTree.build(np.random.default_rng(0).integers(0, 12, (20, 3)).astype(np.int32))
    tokens_of = tuple((first + np.arange(12)).astype(np.int32) for first in cfg.first_tokens)
    tables = beam.catalog_tables(tree, tokens_of, weights)
    tokens, lengths = pad(given, 12)
    given_to = weights, tables, tokens, lengths, np.array([20, 20], np.int32)
    found = beam.recommend(*given_to, cfg=cfg, width=20, normalize="full", levels=True)
    assert found.levels is not None
    every = np.tile(np.arange(tree.n_leaves, dtype=np.int32), (2, 1))
    ranked = beam.rank(weights, tables, tokens, lengths, every, cfg=cfg, normalize="full")
    for row, history in enumerate(given):
        by_level = prefix_likelihoods(weights, cfg, history, tree, full=True)
        want = by_level[:, -1]
        np.testing.assert_allclose(ranked[row], want, atol=ATOL)
        for level in range(tree.depth):  # there are beams for all
            nodes, first = np.unique(tree.paths[:, level], return_index=True)
            scores = np.asarray(found.levels.scores)[row, level]
            assert sorted(np.asarray(found.levels.nodes)[row, level][np.isfinite(scores)]) == nodes.tolist()
            wanted = np.sort(by_level[first, level])[::-1]
            np.testing.assert_allclose(scores[: len(nodes)], wanted, atol=ATOL)
        alive = np.isfinite(found.scores[row])
        assert sorted(found.leaves[row][alive].tolist()) == list(range(tree.n_leaves))
        np.testing.assert_allclose(found.scores[row][alive], want[found.leaves[row][alive]], atol=ATOL)
        assert (np.diff(found.scores[row][alive]) <= 0).all()


def make_folder(folder: Path, cfg: LazyConfig, depth: int) -> Config:
    """A model folder over the tiny catalog, 60 items on levels of 5, and the configuration that serves it."""
    catalog = tiny_model.make_catalog(depth)
    tokenizer = semantic_id_tokenizer(catalog)
    first, sizes = (3, 8, 13)[:depth], (5, 5, 5)[:depth]
    cfg = dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size, first_tokens=first, level_sizes=sizes)

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, draw(cfg, seed=3), write_beside)
    return override(
        Config(), f"model.path={folder}", "model.compilation_cache=", "prompt.template={history}",
        "prompt.max_items=6", "profiles.batch=2", f"profiles.tokens={6 * depth + 1}", "profiles.widths=60",
        "beam.width=60", "profiles.candidates=4",
    )  # fmt: skip


@pytest.mark.slow
def test_a_folder_is_served_with_filters_and_ranked(tmp_path: Path) -> None:
    # A dense layer and one of experts, a level from the prompt and a step of the beam.
    config = make_folder(tmp_path / "lazy", dataclasses.replace(MIXED, layers=2), depth=2)
    cfg, weights = checkpoint.load(tmp_path / "lazy")
    catalog = tiny_model.make_catalog(depth=2)
    tokens_of = level_tokens(catalog, semantic_id_tokenizer(catalog), cfg.vocab_size)
    tree, rows = PrefixTree.build(catalog.codes), [7, 31, 2]
    history = np.stack([tokens_of[level][catalog.codes[rows, level]] for level in range(2)], 1)
    want = log_likelihoods(weights, cfg, history, tree, full=False)[tree.leaf_of_row]
    np.testing.assert_allclose(
        np.exp(want[np.unique(tree.leaf_of_row, return_index=True)[1]]).sum(), 1, atol=1e-6
    )
    denied, few = catalog.item_ids[:20], ["B004", "B050", "B017"]

    async def ask() -> list[dict[str, float]]:
        engine = load_engine(override(config, "server.explain=true"))
        await engine.start()
        ids = [f"B{row:03}" for row in rows]
        ticket = engine.submit(ExplainRecommend(history=ids, top_k=60))
        told = engine.served.explanation(ticket.task, await ticket.answer)
        check_levels(told.levels, catalog, want)
        answers = await asyncio.gather(
            engine.answer(RecommendRequest(history=ids, top_k=60)),
            engine.answer(
                RecommendRequest(history=[*ids[:1], "B059"], top_k=5)
            ),  # another, in the same batch
            engine.answer(RecommendRequest(history=ids, top_k=60, filters=Filters(deny=list(denied)))),
            engine.answer(RankRequest(history=ids, candidates=few)),
        )
        await engine.drain(10)
        return [{item.item_id: item.score for item in answer.items} for answer in answers]

    every, _, filtered, ranked = asyncio.run(ask())
    assert every.keys() == set(catalog.item_ids) and filtered.keys() == set(catalog.item_ids[20:])
    assert ranked.keys() == set(few)
    for found in (every, filtered, ranked):
        expected = [want[catalog.row(item_id)] for item_id in found]
        np.testing.assert_allclose(list(found.values()), expected, atol=ATOL)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def check_levels(levels: list[ExplainedLevel], catalog: Catalog, want: Array) -> None:
    """The score of a prefix is the mass of the ids below it. want: the log-likelihood of each item's id."""
    for level in levels:
        for one in level.beams:
            below = (catalog.codes[:, : level.level + 1] == one.prefix).all(axis=1)
            _, first = np.unique(catalog.codes[below], axis=0, return_index=True)
            assert one.score == pytest.approx(np.log(np.exp(want[below][first]).sum()), abs=ATOL)
            assert one.items == below.sum() and one.kept
        assert sum(one.items for one in level.beams) == catalog.n_items
    assert len(levels) == catalog.depth


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "lazy", PLAIN, depth=3)
    cfg, _ = checkpoint.load(tmp_path / "lazy")
    prompt, tokens = config.prompt, [np.arange(first, first + 5) for first in (3, 8, 13)]
    assert lazy_decoder.misfit(cfg, prompt, tokens) == ""
    assert "have 2 levels, the model's 3" in lazy_decoder.misfit(cfg, prompt, tokens[:2])
    assert "level 1: the model's tokens there are 8 to 12" in lazy_decoder.misfit(
        cfg, prompt, [tokens[0], tokens[1] + 1, tokens[2]]
    )
    with pytest.raises(ConfigError, match=r"reads items only: template=\{history\}"):
        load_engine(override(config, "prompt.template=<bos>{history}"))
    with pytest.raises(ConfigError, match=r"can need 24 positions, the model was made for 21"):
        load_engine(override(config, "prompt.max_items=7", "profiles.tokens=21"))
    path = tmp_path / "lazy" / "config.json"
    stored = json.loads(path.read_text())
    path.with_name("digests.json").unlink()  # which would name the changed file
    for change, message in (
        ({"heads": 3}, "heads 3 is not a multiple of kv_heads 4"),
        ({"hidden": "wide"}, "hidden is 'wide'"),
        ({"level_sizes": [5, 5]}, "first_tokens and level_sizes must be of equal length"),
        ({"first_tokens": [3, 8, 14]}, "within vocab_size"),
        ({"first_tokens": [3, 7, 13]}, "must not overlap"),
        ({"norm_eps": 0}, "norm_eps is 0"),
        ({"experts": 4, "experts_active": 5}, "experts need"),
        ({"context_parts": 3}, "context_parts 1 or 2"),
    ):
        path.write_text(json.dumps({**stored, **change}))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path / "lazy")
