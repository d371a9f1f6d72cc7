# SPDX-License-Identifier: Apache-2.0
"""The search without a catalog against a search by whole forwards, and the count of what is no item by hand."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import Examples, Ragged, leave_one_out
from jgr.evaluation.served import EvaluationError
from jgr.evaluation.unconstrained import Leaves, Share, search, search_all
from jgr.models import checkpoint, decoder, params
from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens
from tests.serving.tiny_model import N_ITEMS, make_catalog, make_folder

CFG = decoder.DecoderConfig(
    family="qwen3", vocab_size=7, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=16,
    rope_theta=10_000.0, norm_eps=1e-6, tied=True, max_position=16,
)  # fmt: skip
DEPTH = 3
prefill = jax.jit(decoder.prefill, static_argnames="cfg")


@pytest.fixture(scope="module")
def weights() -> decoder.DecoderParams:
    return jax.tree.map(lambda x: x * 4, params.initialize(decoder.spec(CFG), jax.random.key(0)))


def by_whole_forwards(
    weights: decoder.DecoderParams, prompt: list[int], width: int
) -> dict[tuple[int, ...], float]:
    """The beams and their scores, in float64 from the forwards' logits on."""
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(DEPTH):
        length = len(prompt) + len(next(iter(beams)))
        tokens = np.zeros((9, 8), np.int32)
        tokens[: len(beams), :length] = [[*prompt, *beam] for beam in beams]
        hidden = np.asarray(prefill(weights, CFG, tokens, np.full(9, length, np.int32)).hidden)
        logits = (hidden[: len(beams), length - 1] @ np.asarray(weights.embed).T).astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        longer = {
            (*beam, token): score + logp[i, token]
            for i, (beam, score) in enumerate(beams.items())
            for token in range(CFG.vocab_size)
        }
        beams = dict(sorted(longer.items(), key=lambda pair: -pair[1])[:width])
    return beams


@pytest.mark.parametrize("width", [3, 9])  # 9 is more than the first step has to choose from
def test_the_search_is_an_exact_beam_search(weights: decoder.DecoderParams, width: int) -> None:
    prompts = [[1, 2, 3, 4], [5, 6]]
    tokens = np.zeros((2, 5), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    sequences, scores = search(weights, tokens, np.array([4, 2], np.int32), cfg=CFG, depth=DEPTH, width=width)
    for row, prompt in enumerate(prompts):
        want = by_whole_forwards(weights, prompt, width)
        assert [tuple(sequence) for sequence in np.asarray(sequences)[row].tolist()] == list(want)
        np.testing.assert_allclose(scores[row], list(want.values()), atol=1e-4)


def test_beams_beyond_all_sequences_are_dead(weights: decoder.DecoderParams) -> None:
    prompt = np.array([[1, 2]], np.int32)
    sequences, scores = search(weights, prompt, np.array([2], np.int32), cfg=CFG, depth=1, width=9)
    assert sorted(np.asarray(sequences)[0, :7, 0].tolist()) == list(range(7))
    assert np.isneginf(np.asarray(scores)[0, 7:]).all()
    np.testing.assert_allclose(np.exp(np.asarray(scores)[0, :7]).sum(), 1.0, atol=1e-5)


def test_the_lookup_finds_exactly_the_semantic_ids() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (20, 3)).astype(np.int32)
    tokens_of = [rng.permutation(9)[:4].astype(np.int32) for _ in range(3)]  # not in the order of the codes
    tree = PrefixTree.build(codes)
    of_row = {
        tuple(int(tokens_of[level][code]) for level, code in enumerate(row)): int(tree.leaf_of_row[i])
        for i, row in enumerate(codes)
    }
    everything = np.stack(np.meshgrid(*[np.arange(9)] * 3, indexing="ij"), axis=-1).reshape(-1, 9, 3)
    found = Leaves(tree, tokens_of).find(everything.astype(np.int32))
    want = [[of_row.get(tuple(sequence), -1) for sequence in row] for row in everything.tolist()]
    assert found.tolist() == want
    assert (found >= 0).sum() == tree.n_leaves


def test_shares_are_counted_over_living_beams() -> None:
    share = Share(4, (1, 3))
    share.count(np.array([[-1, 5, 6, -1], [0, 1, -1, -1]]), np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool))
    assert share.to_json() == {
        "sequences": 7, "invalid": 3, "share": 3 / 7, "share@1": 1 / 2, "share@3": 2 / 6,
    }  # fmt: skip
    assert Share(2, (1,)).to_json() == {"sequences": 0, "invalid": 0, "share": 0.0, "share@1": 0.0}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = make_folder(tmp_path_factory.mktemp("model") / "tiny")
    return override(config, "profiles.tokens=32")


@pytest.mark.slow
@pytest.mark.parametrize("exclude_history", [False, True])
def test_both_searches_of_a_model(config: Config, exclude_history: bool) -> None:
    catalog, rng = make_catalog(), np.random.default_rng(0)
    histories = [rng.integers(0, N_ITEMS, size) for size in (1, 7, 3, 30)]
    examples = Examples(Ragged.of(histories), np.zeros(4, np.int32), np.zeros(4, np.int32))
    dataset = Dataset(catalog, leave_one_out(histories))
    counted: list[int] = []
    found = search_all(
        config, dataset, examples, (1, 5), exclude_history=exclude_history, on_answers=counted.append
    )
    assert sum(counted) == 4

    folder = Path(config.model.path)
    cfg, loaded = checkpoint.load(folder)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    tokens_of = level_tokens(catalog, tokenizer, cfg.vocab_size)
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, codes in enumerate(catalog.codes):
        rows_of.setdefault(tuple(int(tokens_of[i][code]) for i, code in enumerate(codes)), []).append(row)
    tokens, lengths = np.zeros((32, 32), np.int32), np.ones(32, np.int32)
    for i, history in enumerate(histories):
        prompt = PromptBuilder(config.prompt, tokenizer, catalog).build(history.astype(np.int32))
        tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
    beams = np.asarray(search(loaded, tokens, lengths, cfg=cfg, depth=3, width=8)[0])[:4]
    named = [[rows_of.get(tuple(sequence), [-1]) for sequence in best] for best in beams.tolist()]
    for i, history in enumerate(histories):
        kept = [row for rows in named[i] for row in rows if not (exclude_history and row in history)]
        assert found.ranked[i].tolist() == (kept + [-1] * 5)[:5]
    one_each = search_all(override(config, "beam.items_per_id=1"), dataset, examples, (1, 5))
    for i, rows in enumerate(named):
        assert one_each.ranked[i].tolist() == [of_id[0] for of_id in rows][:5]
    assert max(len(of_id) for of_id in rows_of.values()) > 1
    invalid = sum(best.count([-1]) for best in named)
    free, bound = found.unconstrained.to_json(), found.constrained.to_json()
    assert (free["sequences"], free["invalid"]) == (4 * 8, invalid)
    assert 0 < free["share"] == invalid / 32
    assert (bound["sequences"], bound["invalid"], bound["share"]) == (4 * 8, 0, 0.0)

    with pytest.raises(EvaluationError, match=r"a prompt has 31 tokens; .* is 16"):
        search_all(override(config, "profiles.tokens=16"), dataset, examples, (1,))
