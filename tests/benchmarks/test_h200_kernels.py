# SPDX-License-Identifier: Apache-2.0
"""The file is ready to run: the same code compares and times a few small cases here, and claims nothing."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import h200_kernels as bench
from benchmarks.harness import Missing
from benchmarks.titles import title
from jgr.evaluation.machine import CpuTimes, Quiet
from jgr.ops import roofline
from jgr.ops.testing import Work

QUIET = Quiet(1.0, sample=lambda: CpuTimes(0.0, 0.0, 0.0), sleep=lambda seconds: None)


def test_a_few_cases_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two that compile alike read what the other has half written to the cache.
    monkeypatch.setattr(bench, "THREADS", 1)
    monkeypatch.setattr(roofline, "rates", lambda on_gpu: Work(1e12, 1e11))
    monkeypatch.setattr(roofline, "seconds_per_call", lambda run, least: 1e-3)
    measured = bench.measure(True, QUIET)
    assert measured.claims == []
    *rows, about = measured.rows
    compared = [row for row in rows if "distance" in row]
    assert [row["op"] for row in compared] == ["add_norm"] * 4
    assert all(row["share_of_limit"] < 1 for row in compared)
    times = [row for row in rows if "ms" in row]
    assert {(row["op"], row["implementation"]) for row in times} >= {
        ("add_norm", "reference"), ("beam_attention", "xla"), ("constrained_topk", "xla")
    }  # fmt: skip
    assert all(row["call_ms"] == 1.0 and 0 < row["ms"] < 1000 for row in times)
    assert about["gb_per_s_of_copy"] == 100.0


def test_without_a_gpu_there_is_no_result() -> None:
    with pytest.raises(Missing, match="needs a GPU; jax found cpu"):
        bench.measure(False, QUIET)


def row(op: str, form: str, ms: float) -> dict[str, Any]:
    return {"op": op, "case": "one", "implementation": form, "ms": ms}


def test_the_best_kernel_is_compared_with_the_best_plain_form() -> None:
    rows = [{"share_of_limit": 0.2}, {"share_of_limit": 0.5}]
    rows += [row("a", "cudnn", 1.0), row("a", "pallas", 2.0), row("a", "xla", 4.0), row("b", "pallas", 3.0)]
    rows += [row("b", "reference", 2.0), row("c", "xla", 1.0)]
    found = {claim.id: claim for claim in bench.claims(rows)}
    assert found["h200-kernels-largest-distance-over-limit"].value == 0.5
    assert found["h200-kernels-slowest-over-xla"].value == 1.5
    assert not found["h200-kernels-checked"].holds  # 2 of many
    assert all(title(claim.to_json()) for claim in found.values())
