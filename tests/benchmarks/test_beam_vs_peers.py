# SPDX-License-Identifier: Apache-2.0
"""How two beam searches are compared, and that the catalog, rows and claims are what the benchmark says."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from benchmarks import beam_vs_peers as bench
from benchmarks import harness
from benchmarks.beam_vs_peers import Found
from benchmarks.peers import workload
from benchmarks.peers.workload import Beams, agreement
from jgr.evaluation.machine import CpuTimes, Quiet
from jgr.models import decoder, params


def _beams(names: str, *scores: float) -> Beams:
    sequences = np.array([[24_000, 24_300, ord(c)] for c in names], np.int32).reshape(-1, 3)
    return Beams(sequences, np.array(scores, np.float32))


THEIRS = _beams("abcd", -1.0, -2.0, -2.0001, -3.0)


@pytest.mark.parametrize(
    ("ours", "common", "same"),
    [
        (THEIRS, 4, True),
        (_beams("acbd", -1.0, -2.00005, -2.00005, -3.0), 4, True),  # a tie
        (_beams("bacd", -1.0, -2.0, -2.0001, -3.0), 4, False),  # no tie
        (_beams("abce", -1.0, -2.0, -2.0001, -3.0), 3, True),  # of two that tie, another was cut off
        (_beams("ebcd", -1.0, -2.0, -2.0001, -3.0), 3, False),
        (_beams("abcd", -1.0, -2.0, -2.0001, -3.0002), 4, False),  # beyond the tolerance
        (_beams("abc", -1.0, -2.0, -2.0001), 3, False),
        (_beams(""), 0, False),
    ],
)
def test_order_may_differ_within_ties_only(ours: Beams, common: int, same: bool) -> None:
    found = agreement(ours, THEIRS)
    assert (found.common, found.same, found.returned) == (common, same, 4)


def test_score_error_is_the_largest_over_the_positions() -> None:
    found = agreement(_beams("abcd", -1.5, -2.0, -2.0, -3.0), THEIRS)
    assert found.max_score_error == 0.5
    assert not found.same


def test_sequences_that_differ_in_any_token_differ() -> None:
    ours, theirs = (Beams(np.array([s], np.int32), np.zeros(1, np.float32)) for s in ([1, 2, 3], [2, 1, 3]))
    assert agreement(ours, theirs).common == 0


def test_the_catalog_and_the_model_have_the_stated_sizes() -> None:
    catalog = workload.make_catalog(np.random.default_rng(0))
    assert catalog.tree.n_leaves == workload.N_ITEMS == 12_000
    assert catalog.sequences.shape == (12_000, 3)
    assert len(np.unique(catalog.sequences, axis=0)) == 12_000
    for level in range(3):
        low = workload.FIRST_TOKEN + 256 * level
        assert low <= catalog.sequences[:, level].min() <= catalog.sequences[:, level].max() < low + 256
    assert catalog.sequences.max() < workload.MODEL.vocab_size == 25_000
    assert 15.5e6 < params.count(decoder.spec(workload.MODEL)) < 16.5e6
    prompt = workload.draw_prompt(catalog, 512, np.random.default_rng(1))
    assert prompt.shape == (512,)
    assert np.isin(
        prompt[:510].reshape(-1, 3) @ [10**10, 10**5, 1], catalog.sequences @ [10**10, 10**5, 1]
    ).all()


def test_a_row_compares_each_peer_with_ours_and_a_slow_one_in_the_round_that_it_has() -> None:
    wrong = _beams("a", -1.0)
    row = bench.make_row(
        {
            "jgr": [Found(10.0, THEIRS), Found(12.0, THEIRS), Found(11.0, THEIRS)],
            "transformers": [Found(440.0, THEIRS)],
            "vllm": [Found(22.0, wrong)] * 3,
        }
    )
    assert row["interval"] == {"vllm": (1.83, 2.2)}
    assert row["time_over_jgr"] == {"transformers": 40.0, "vllm": 2.0}
    assert row["time_ms"]["transformers"]["runs"] == 1
    assert row["agreement"]["transformers"] == {
        "same": True, "in_common": 4, "returned": 4, "max_score_error": 0.0
    }  # fmt: skip
    assert row["agreement"]["vllm"] == {
        "same": False, "in_common": 1, "returned": 1, "max_score_error": None
    }  # fmt: skip


def test_a_long_call_is_in_the_first_kept_round_only() -> None:
    order: list[str] = []

    def variant(name: str) -> str:
        order.append(name)
        return name

    # The first round that is looked at is disturbed: others used a core.
    busy = iter([0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    at = iter(range(9))
    quiet = Quiet(10.0, sample=lambda: CpuTimes(next(busy), 0.0, float(next(at))), sleep=lambda s: None)
    variants = {name: functools.partial(variant, name) for name in ("fast", "long")}
    done = harness.interleave(variants, 2, quiet, sleep=lambda s: None, once=("long",))
    assert done == {"fast": ["fast", "fast"], "long": ["long"]}
    assert order == ["fast", "fast", "long", "fast", "long", "fast"]


def _row(search: str, width: int, ratios: dict[str, float], **differing: float | None) -> dict[str, Any]:
    found = {
        name: {"same": name not in differing, "max_score_error": differing.get(name, 1e-6)} for name in ratios
    }
    point = {"search": search, "prompt_tokens": 512, "beam_width": width}
    interval = {name: (ratio - 0.1, ratio + 0.1) for name, ratio in ratios.items() if name != "vllm"}
    return {**point, "time_over_jgr": ratios, "interval": interval, "agreement": found}


def test_claims_name_what_differs_and_what_was_not_compared() -> None:
    rows = [
        _row("unconstrained", 8, {"pytorch": 0.9, "vllm": 1.2}, pytorch=2e-5),
        _row("unconstrained", 128, {"pytorch": 2.0, "vllm": 9.0}),
        _row("valid", 128, {"pytorch": 1.55, "vllm": 0.7}, vllm=None),  # it has lost some of the beams
        _row("unconstrained", 32, {"pytorch": 0.5}) | {"prompt_tokens": 700},
        {"peer": "pytorch", "versions": {"torch": "1"}},
        {"peer": "transformers", "missing": "set JGR_PEERS_TORCH"},
    ]
    assert [(c.id, c.value, c.target, c.holds) for c in bench.claims(rows, "-51m")] == [
        ("beam-search-peers-missing-51m", 1, 0, False),
        ("beam-searches-that-differ-from-a-peer-51m", 2, 0, False),
        ("score-difference-from-a-peer-51m", 2e-5, 1e-4, True),
        ("least-time-of-any-peer-over-jgr-51m", 0.7, 1.0, False),
        ("least-time-between-profiles-51m", 0.5, 1.0, False),
        ("time-of-vllm-over-jgr-unconstrained-prompt-512-beam-128-51m", 9.0, 8.0, True),
        ("time-of-vllm-over-jgr-valid-prompt-512-beam-128-51m", 0.7, 8.0, False),
        (
            "time-of-pytorch-over-jgr-valid-prompt-512-beam-128-51m",
            1.55,
            1.5,
            False,
        ),  # its interval begins at 1.45
    ]
