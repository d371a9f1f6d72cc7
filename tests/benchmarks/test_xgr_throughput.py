# SPDX-License-Identifier: Apache-2.0
"""The baselines find jgr's beams; brackets, rates to try, traces and claims are what the benchmark says."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import xgr_sequences, xgr_throughput
from benchmarks.peers.trie import Beam, Trie
from benchmarks.xgr_probes import Probe, bracket
from benchmarks.xgr_throughput import Search, Setting, Trace
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import beam, decoder, params
from jgr.models.decoder import DecoderConfig
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.work import RecommendOutcome, RecommendWork
from jgr.serving.policies.jobs import Profile

MODEL = DecoderConfig(
    family="qwen3", vocab_size=60, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24, rope_theta=1e4,
    norm_eps=1e-6, tied=False, max_position=32,
)  # fmt: skip
LEVEL = 8
TREE = PrefixTree.build(
    np.unique(np.random.default_rng(3).integers(0, LEVEL, (90, 3)), axis=0).astype(np.int32)
)
TOKENS = tuple(np.arange(20 + LEVEL * at, 20 + LEVEL * (at + 1), dtype=np.int32) for at in range(3))
PROFILE = Profile("recommend", 2, 12, 6)
PROMPTS = [np.arange(2, 13, dtype=np.int32), np.arange(5, 9, dtype=np.int32)]


@pytest.fixture(scope="module")
def staged() -> tuple[RowExecutor, Any, list[Any]]:
    """jgr's executor, the weights, and its outcomes for two prompts of different lengths and widths."""
    weights: Any = params.initialize(decoder.spec(MODEL), jax.random.key(1))
    weights = replace(weights, head=10 * weights.head)  # scores that differ
    tables = beam.catalog_tables(TREE, TOKENS, weights)
    executor = RowExecutor(MODEL, weights, tables, (PROFILE,), "valid")
    executor.warm_up(lambda done, total, label: None)
    return executor, weights, executor.run(PROFILE, works())


def works() -> list[RecommendWork]:
    return [RecommendWork(prompt, width) for prompt, width in zip(PROMPTS, (6, 4), strict=True)]


@pytest.mark.parametrize("form", ["copied", "paged"])
def test_beams_as_sequences_are_jgrs_beams(form: Any, staged: tuple[RowExecutor, Any, list[Any]]) -> None:
    executor, weights, wanted = staged
    baseline = xgr_sequences.executor(executor, weights, form, [PROFILE], 1)
    baseline.warm_up(lambda done, total, label: None)
    for ours, theirs, width in zip(wanted, baseline.run(PROFILE, works()), (6, 4), strict=True):
        assert isinstance(theirs, RecommendOutcome)
        assert len(theirs.leaves) == width
        np.testing.assert_array_equal(theirs.leaves, ours.leaves)
        np.testing.assert_allclose(theirs.scores, ours.scores, atol=1e-5)


def test_sequences_with_copies_read_a_prompt_for_each_beam(
    staged: tuple[RowExecutor, Any, list[Any]],
) -> None:
    """The copies are there: as many bytes more than in the form that shares the prompt's pages, at least."""
    executor, weights, _ = staged
    wide = Profile("recommend", 1, 24, 16)
    temporary = {}
    for form in ("copied", "paged"):
        program = xgr_sequences.executor(executor, weights, form, [wide], 1).compile(wide)
        temporary[form] = program.memory_analysis().temp_size_in_bytes
    copies = 4 * 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * wide.tokens * (wide.width - 1)
    assert temporary["copied"] - temporary["paged"] >= copies


def test_batches_whose_copies_do_not_fit_have_no_profile() -> None:
    cfg = replace(MODEL, layers=4, kv_heads=4, head_dim=64)
    assert xgr_sequences.copies_fit(cfg, Profile("recommend", 1, 2048, 128))
    assert not xgr_sequences.copies_fit(cfg, Profile("recommend", 4, 2048, 128))


def test_the_peers_loop_over_the_tree_is_an_exact_search() -> None:
    """Against all paths of the tree, with drawn log-probabilities."""
    arrays: dict[str, Any] = {"sequences": np.zeros((1, 3))}
    for level in range(3):
        arrays |= {f"tokens_{level}": TOKENS[level], f"codes_{level}": TREE.codes[level]}
        arrays |= {f"offsets_{level}": TREE.offsets[level]}
    trie, rng = Trie(arrays), np.random.default_rng(0)
    drawn: dict[tuple[int, ...], dict[int, float]] = {}

    def of(found: Beam) -> dict[int, float]:
        children = trie.children(found)
        if found.tokens not in drawn:
            logits = rng.normal(size=len(children))
            values = logits - np.logaddexp.reduce(logits)
            drawn[found.tokens] = dict(zip(children, values.tolist(), strict=True))
        return drawn[found.tokens]

    beams = [Beam()]
    for _ in range(3):
        beams = trie.step(beams, [of(one) for one in beams], 1000)
    paths = {tuple(TOKENS[at][code] for at, code in enumerate(path)): 0.0 for path in _paths()}
    for path in paths:
        paths[path] = sum(drawn[path[:at]][path[at]] for at in range(3))
    assert {one.tokens: pytest.approx(one.score) for one in beams} == paths
    assert [one.score for one in beams] == sorted((one.score for one in beams), reverse=True)
    assert trie.step([Beam()], [drawn[()]], 2) == [Beam((t,), n, s) for t, n, s in _best(drawn[()], trie, 2)]


def _paths() -> list[tuple[int, ...]]:
    return [tuple(int(TREE.codes[level][path[level]]) for level in range(3)) for path in TREE.paths.tolist()]


def _best(values: dict[int, float], trie: Trie, count: int) -> list[tuple[int, int, float]]:
    children = trie.children(Beam())
    ranked = sorted(values.items(), key=lambda item: -item[1])[:count]
    return [(token, children.index(token), value) for token, value in ranked]


def _probe(rate: float, late: int, count: int = 500, in_time_s: float = 0.1) -> Probe:
    return Probe(rate, np.array([in_time_s] * (count - late) + [9.0] * late))


def test_a_bracket_is_between_what_held_and_what_failed_above_it() -> None:
    probes = [_probe(8, 0), _probe(16, 400), _probe(4, 400), _probe(11, 4), _probe(12, 7)]
    assert bracket(probes, 0.2) == (11, 12, 8, 16)  # 4 of 500 late hold, and show nothing; 7 refute nothing
    assert bracket(probes, 0.05) == (0.0, 4, 0.0, 4)
    assert bracket(probes[:1], 0.2) == (8, math.inf, 8, math.inf)
    assert not _probe(1, 0, 20).shows(0.2)  # too few
    assert _probe(1, 0, 299).shows(0.2)
    assert _probe(1, 2, 20).refutes(0.2) and not _probe(1, 1, 20).refutes(0.2)


def _search(true_rates: dict[float, float], setting: Setting) -> Search:
    """A search over a system that holds each limit up to a rate."""
    search = Search("x", 32, Probe(3.0, np.array([0.1])), tuple(true_rates))
    while (rate := search.next_rate(setting)) is not None:
        latency = min((limit for limit, most in true_rates.items() if rate <= most), default=math.inf)
        search.probes.append(Probe(rate, np.full(500, latency)))
    return search


def test_the_least_limit_is_bisected_first_and_probes_are_shared() -> None:
    search = _search({0.2: 10.0, 1.0: 14.0}, Setting(probes=20, precision=0.05))
    for limit_s, true in ((0.2, 10.0), (1.0, 14.0)):
        found = search.of(limit_s)
        assert found.held <= true < found.failed and found.ratio <= 1.05
    rates = [probe.rate for probe in search.probes]
    assert rates[:3] == [3, 6, 12]
    assert rates[3] == pytest.approx(math.sqrt(72))
    few = _search({0.2: 10.0, 1.0: 14.0}, Setting(probes=4))
    assert len(few.probes) == 4
    assert _search({0.2: 0.5}, Setting(probes=9)).of(0.2).held <= 0.5
    assert _search({}, Setting()).probes == []


def test_all_rates_have_the_same_trace_of_power_law_prompts() -> None:
    sequences = np.zeros((100, 3), np.int32)
    one, same = (Trace(sequences, 512, 400, seed=7) for _ in range(2))
    slow, fast = one.schedule(2.0, 400, []), same.schedule(8.0, 400, [])
    np.testing.assert_allclose(slow.at_s, 4 * fast.at_s)
    np.testing.assert_array_equal(slow.which, fast.which)
    assert slow.offered_per_s == 2.0
    assert len(slow) == 400
    lengths = np.array([len(rows) for rows in one.rows])
    assert lengths.min() >= 16 and lengths.max() <= 170
    assert (lengths < 50).sum() > (lengths >= 100).sum()
    assert all((a == b).all() for a, b in itertools.zip_longest(one.rows, same.rows))


def _row(
    system: str, limit_s: float, holds: bool, shown: float | None, refuted: float | None
) -> dict[str, Any]:
    ends = {
        "shown_per_s": shown,
        "refuted_at_per_s": refuted,
        "capacity_per_s": shown,
        "fails_at_per_s": refuted,
    }
    return {
        "system": system, "beam_width": 32, "limit_s": limit_s, "holds_alone": holds, "exact_beams_share": 1.0, **ends,
    }  # fmt: skip


def test_a_claim_is_the_lower_end_at_the_least_limit_that_both_hold() -> None:
    rows = [
        _row("staged", 0.2, True, 20.0, 24.0),
        _row("staged", 0.5, True, 22.0, 25.0),
        _row("copied", 0.2, True, 4.0, 5.0),
        _row("copied", 0.5, True, 6.0, 7.0),
        _row("vllm", 0.2, False, None, None),
        _row("vllm", 0.5, True, 1.0, 2.0),
        _row("paged", 0.2, False, None, None),
        _row("paged", 0.5, False, None, None),  # never holds: a row and no ratio
        _row("transformers", 0.2, True, 3.0, None),  # no rate refuted
        {"server": "vllm", "versions": {}},
        {"server": "other", "missing": "set JGR_PEERS_OTHER"},
    ]
    rows[3]["exact_beams_share"] = 0.5
    ratios = {(r["over"], r["limit_s"]): (r["low"], r["high"]) for r in xgr_throughput.ratios(rows)}
    assert ratios == {
        ("copied", 0.2): (4.0, 6.0),
        ("transformers", 0.2): (None, 8.0),
        ("copied", 0.5): (3.14, 4.17),
        ("vllm", 0.5): (11.0, 25.0),
    }
    found = {claim.id: (claim.value, claim.target) for claim in xgr_throughput.claims(rows)}
    name = "rate-over-{}-at-least-common-p99-limit-beam-32"
    assert found == {
        "xgr-throughput-peers-missing": (1, 0),
        "xgr-throughput-rows-with-inexact-beams": (1, 0),
        name.format("copied"): (4.0, 3.5),
        name.format("transformers"): (0.0, 1.0),
        name.format("vllm"): (11.0, 8.0),
    }
