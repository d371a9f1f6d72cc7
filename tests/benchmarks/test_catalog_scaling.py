# SPDX-License-Identifier: Apache-2.0
"""The catalogs are what their names say, the search without a tree is exact, and claims are about the worst rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import catalog_scaling as bench
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import decoder, params
from jgr.models.decoder import DecoderConfig


@pytest.mark.parametrize(("kind", "n"), [("zipf", 20_000), ("one_prefix", 20_000), ("one_prefix", 5000)])
def test_catalogs_have_as_many_distinct_ids_as_stated(kind: str, n: int) -> None:
    items = bench.make_items(kind, n)
    tree = PrefixTree.build(items.codes)
    assert (len(items.ids), tree.n_leaves) == (n, n)
    assert (items.ids[0], items.ids[n - 1]) == ("0" * len(str(n - 1)), str(n - 1))
    assert items.ids.find([str(n - 1), "x"]).tolist() == [n - 1, -1]
    if kind == "one_prefix":
        assert tree.max_degrees == ((1, 8192, 8192) if n > 2 * 8192 else (1, 1, n))
    else:
        counts = np.sort(np.bincount(items.codes[:, 0], minlength=bench.LEVEL_SIZE))[::-1]
        assert 1.5 < counts[0] / counts[1] < 2.5 and 6 < counts[0] / counts[9] < 14, "1 / rank"


@pytest.mark.slow
def test_the_search_without_a_tree_is_exact() -> None:
    cfg = DecoderConfig("qwen3", 400, 16, 1, 2, 1, 8, 16, 1e4, 1e-6, False, 32)
    drawn: Any = jax.jit(lambda key: params.initialize(decoder.spec(cfg), key))(jax.random.key(0))
    weights = decoder.DecoderParams(drawn.embed, drawn.layers, drawn.norm, 20 * np.asarray(drawn.head))
    tokens_of = tuple(np.arange(start, start + 128, dtype=np.int32) for start in (0, 128))
    heads = tuple(weights.output_rows[at : at + 128] for at in (0, 128))
    prompt = np.arange(5, dtype=np.int32)[None]
    found, scores = bench.search_without_tree(
        weights, tokens_of, heads, prompt, np.array([5], np.int32), cfg=cfg, width=6
    )
    begin = jax.jit(lambda tokens, lengths: decoder.begin(weights, cfg, tokens, lengths)[0][:, 0])
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for level in range(2):
        sequences = np.zeros((6, 8), np.int32)
        for row, (_, path) in enumerate(beams):
            sequences[row, : 5 + level] = [*range(5), *path]
        hidden = begin(sequences, np.full(6, 5 + level, np.int32))
        logits = np.asarray(hidden) @ heads[level].T
        gained = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).tolist()
        grown = [
            (score + gained[row][i], [*path, 128 * level + i])
            for row, (score, path) in enumerate(beams)
            for i in range(128)
        ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:6]
    assert found[0].tolist() == [path for _, path in beams]
    np.testing.assert_allclose(scores[0], [score for score, _ in beams], atol=1e-4)


def test_rows_and_claims() -> None:
    times = {
        "on 8": [2.0, 2.2, 2.1],
        "off 8": [2.0, 2.0, 2.0],
        "all_tokens 8": [9.0],
        "on 16": [1.0],
        "off 16": [4.0],
    }
    row = bench.make_row(times, 8)
    assert row["on_over_off"] == 1.05 and row["time_ms"]["all_tokens"]["median"] == 9.0
    assert bench.make_row(times, 16)["on_over_off"] == 0.25
    rows = [
        {"catalog": "zipf", "on_over_off": 1.02},
        {"catalog": "zipf", "on_over_off": 1.04},
        {"catalog": "one_prefix", "on_over_off": 1.06},
        {"build": {"items": 10_000_000, "load_s": 2.0, "tree_s": 3.5}},
    ]
    assert [(c.id, c.value, c.holds) for c in bench.claims(rows)] == [
        ("time-constrained-over-unconstrained-at-every-catalog-size", 1.04, True),
        ("time-constrained-over-unconstrained-one-prefix-with-all-children", 1.06, False),
        ("load-and-tree-of-10-million-items", 5.5, True),
    ]
