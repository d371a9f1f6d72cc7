# SPDX-License-Identifier: Apache-2.0
"""The file is ready to run: without a GPU it claims nothing, and a miss of any load is a miss of the claim."""

from __future__ import annotations

import pytest

from benchmarks import h200_http as bench
from benchmarks.harness import Missing, Row
from benchmarks.titles import title
from jgr.evaluation.machine import CpuTimes, Quiet

QUIET = Quiet(1.0, sample=lambda: CpuTimes(0.0, 0.0, 0.0), sleep=lambda seconds: None)


def test_without_a_gpu_there_is_no_result() -> None:
    with pytest.raises(Missing, match="needs a GPU; jax found cpu"):
        bench.measure(False, QUIET)


def loaded(load: float, goodput_per_s: float, in_time: int) -> Row:
    report = {
        "goodput_per_s": goodput_per_s,
        "in_time": in_time,
        "answered": {"200": 500, "429": 100},
        "latency_ms": {},
        "lateness_ms": {},
    }
    return bench.goodput_row(load, 100.0, 200, report)


def test_the_worst_load_is_claimed() -> None:
    one = {
        "score_difference_from_rank": 0.05,
        "one_in_flight_ms": {"median": 16.0},
        "interval": [15.0, 18.0],
    }
    rows = [loaded(0.9, 90.0, 500), loaded(1.5, 80.0, 499), loaded(3.0, 95.0, 490)]
    found = {
        claim.id: claim
        for claim in bench.claims(
            [one, {"capacity_per_s": 90.0}, *rows],
        )
    }
    assert found["h200-http-goodput-share"].value == 0.8
    assert not found["h200-http-goodput-share"].holds
    assert found["h200-http-in-time"].value == 0.98
    assert not found["h200-http-one-request-in-flight"].holds  # its interval passes 17.6
    assert found["h200-http-answers-a-second"].holds  # 8 in 93.2 ms are 85.8 a second
    assert all(title(claim.to_json()) for claim in found.values())
