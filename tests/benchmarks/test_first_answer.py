# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the first answer: a real start is timed, one that fails is no figure, and claims are the rows'."""

from __future__ import annotations

import pytest

import jgr
from benchmarks import first_answer as bench
from benchmarks.first_answer import Start
from benchmarks.harness import Missing


def test_a_start_ends_with_its_first_answer(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[list[str]] = []

    def ask(client: jgr.Client) -> None:
        asked.append([item.item_id for item in client.recommend(["1"], top_k=2).items])

    start = bench.start(["--null"], ask)
    assert 0 < start.ready_s < start.answer_s
    assert [len(items) for items in asked] == [2]
    with pytest.raises(Missing, match="did not start"):
        bench.start(["runs/none"], ask)
    assert "model.path: there is no model folder runs/none" in capfd.readouterr().err


def test_what_changes_compiling_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/warm")
    monkeypatch.setenv("JGR_MODEL__COMPILATION_CACHE", "/warm")
    assert "/warm" not in bench.environment().values()


def test_claims_are_medians_and_the_worst_answer_after_ready() -> None:
    rows = [
        bench.row("generator cold", [Start(20.0, 20.01), Start(30.0, 30.02), Start(70.0, 70.03)]),
        bench.row("generator warm", [Start(3.0, 3.5)]),
    ]
    found = bench.claims(rows, {"packages_mb": 146.0, "jgr_mb": 4.5})
    assert [(claim.id, claim.value, claim.holds) for claim in found] == [
        ("seconds-to-the-first-answer-cold-generator", 30.02, True),
        ("seconds-to-the-first-answer-warm-generator", 3.5, True),
        ("first-answer-after-ready", 500.0, False),
        ("serving-install-beside-jax", 150.5, False),
    ]


def test_the_install_is_counted_without_jax() -> None:
    size = bench.installed()
    assert 60 < size["largest_mb"]["tensorstore"] < size["packages_mb"] < size["jax_mb"]
    assert not {"jax", "jaxlib", "numpy", "scipy"} & size["largest_mb"].keys()
    assert 1 < size["jgr_mb"] < 20
