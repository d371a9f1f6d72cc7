# SPDX-License-Identifier: Apache-2.0
"""How two beam searches are compared, and that the catalog and claims are what the benchmark says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import beam_vs_transformers as bench
from benchmarks.beam_vs_transformers import Beams, agreement
from jgr.models import decoder, params


def _beams(leaves: str, *scores: float) -> Beams:
    return Beams(np.array([ord(c) for c in leaves], np.int32), np.array(scores, np.float32))


THEIRS = _beams("abcd", -1.0, -2.0, -2.0001, -3.0)


@pytest.mark.parametrize(
    ("ours", "moved", "same"),
    [
        (THEIRS, 0, True),
        (_beams("acbd", -1.0, -2.00005, -2.00005, -3.0), 2, True),  # a tie
        (_beams("bacd", -1.0, -2.0, -2.0001, -3.0), 2, False),  # no tie
        (_beams("abce", -1.0, -2.0, -2.0001, -3.0), 1, True),  # of two that tie, another was cut off
        (_beams("ebcd", -1.0, -2.0, -2.0001, -3.0), 1, False),
        (_beams("abcd", -1.0, -2.0, -2.0001, -3.0002), 0, False),  # beyond the tolerance
        (_beams("abc", -1.0, -2.0, -2.0001), 4, False),
    ],
)
def test_order_may_differ_within_ties_only(ours: Beams, moved: int, same: bool) -> None:
    found = agreement(ours, THEIRS)
    assert (found.moved, found.same) == (moved, same)


def test_score_error_is_the_largest_over_the_positions() -> None:
    found = agreement(_beams("abcd", -1.5, -2.0, -2.0, -3.0), THEIRS)
    assert found.max_score_error == 0.5
    assert not found.same


def test_the_catalog_and_the_model_have_the_stated_sizes() -> None:
    catalog = bench.make_catalog(np.random.default_rng(0))
    assert catalog.tree.n_leaves == bench.N_ITEMS == 12_000
    assert catalog.sequences.shape == (12_000, 3)
    assert len(np.unique(catalog.sequences, axis=0)) == 12_000
    for level in range(3):
        low = bench.FIRST_TOKEN + 256 * level
        assert low <= catalog.sequences[:, level].min() <= catalog.sequences[:, level].max() < low + 256
    assert catalog.sequences.max() < bench.MODEL.vocab_size == 25_000
    assert 15.5e6 < params.count(decoder.spec(bench.MODEL)) < 16.5e6


def _row(width: int, ratio: float, error: float, same: bool = True) -> dict[str, Any]:
    return {
        "prompt_tokens": 512,
        "beam_width": width,
        "time_over_jgr": {"transformers": ratio},
        "agreement": {"transformers": {"same_sequences": same, "max_score_error": error}},
    }


def test_claims_are_about_the_512_token_prompt() -> None:
    rows = [_row(8, 3.0, 1e-6), _row(32, 20.0, 2e-5, same=False), _row(128, 50.0, 1e-5)]
    rows.append({**_row(128, 10.0, 1e-6), "prompt_tokens": 1024})
    assert [(c.id, c.value, c.target, c.holds) for c in bench._claims(rows)] == [
        ("searches-that-differ-from-transformers", 1, 0, False),
        ("score-difference-from-transformers", 2e-5, 1e-4, True),
        ("time-of-transformers-over-jgr-prompt-512-beam-8", 3.0, 4.0, False),
        ("time-of-transformers-over-jgr-prompt-512-beam-128", 50.0, 40.0, True),
    ]
