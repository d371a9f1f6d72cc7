# SPDX-License-Identifier: Apache-2.0
"""What the check reads of both clients' reports, and when it says that they agree. AIPerf itself is not run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import aiperf_check as bench
from benchmarks.aiperf_check import Seen
from benchmarks.harness import Missing
from jgr.traffic.mixes import RequestClass, make_mix


def test_both_reports_are_read() -> None:
    ours = {
        "sent": 600,
        "answered": {"200": 598, "429": 2},
        "achieved_per_s": 9.9,
        "latency_ms": {"p50": 4.0, "p90": 5.0, "p99": 9.0, "p99.9": None, "max": 11.0},
        "lateness_ms": {"p50": 0.1, "p90": 0.1, "p99": 0.5, "max": 1.0},
    }
    assert bench.read_ours(ours) == Seen(598, 9.9, 4.0, 9.0, 0.5)
    with pytest.raises(RuntimeError, match="600 requests are not enough for a P99"):
        bench.read_ours({**ours, "latency_ms": {**ours["latency_ms"], "p99": None}})
    theirs = {
        "request_count": {"unit": "requests", "avg": 600.0},
        "request_throughput": {"unit": "requests/sec", "avg": 10.1},
        "request_latency": {"unit": "ms", "avg": 6.4, "p50": 4.5, "p99": 37.2},
        "credit_to_start_latency": {"unit": "ms", "p99": 6.4},
    }
    assert bench.read_aiperf(theirs) == Seen(600, 10.1, 4.5, 37.2, 6.4)


def test_claims_are_differences_of_medians() -> None:
    ours = [Seen(600, 10.0, p50, 9.0, 0.1) for p50 in (4.0, 4.4, 99.0)]
    theirs = [Seen(600, 10.0, 4.0, p99, 1.0) for p99 in (9.0, 10.0, 11.0)]
    rows = [bench._row("jgr", 10.0, ours), bench._row("aiperf", 10.0, theirs)]
    claims = {claim.id: claim for claim in bench.claims(rows)}
    assert {name: claim.value for name, claim in claims.items()} == {
        "difference-of-p50-from-aiperf-at-10-per-s": pytest.approx(0.1),
        "difference-of-p99-from-aiperf-at-10-per-s": pytest.approx(0.1),
        "difference-of-rate-from-aiperf-at-10-per-s": 0.0,
    }
    faster = bench.claims([bench._row("jgr", 10.0, [Seen(600, 10.0, 2.0, 10.0, 0.1)]), rows[1]])
    assert [claim.holds for claim in faster] == [False, True, True]  # to be below is no agreement either


def test_aiperf_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(bench.VARIABLE, raising=False)
    with pytest.raises(Missing, match=r"set JGR_PEERS_AIPERF .*requirements-aiperf\.txt"):
        bench._python()
    assert (bench.ROOT / bench.REQUIREMENTS).is_file()
    monkeypatch.setenv(bench.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(Missing, match="is no program"):
        bench._python()


def test_aiperfs_body_is_that_of_ours() -> None:
    # Jinja's double braces and one filter are all that the template uses.
    ids = [f"S{i:04}" for i in range(30)]
    body = json.loads(
        bench.TEMPLATE.replace('{{ text.split(" ")|tojson }}', json.dumps(ids[: bench.HISTORY]))
    )
    mix = make_mix(
        [RequestClass(name="c", history_length=bench.HISTORY, top_k=bench.TOP_K)],
        ids,
        np.random.default_rng(0),
    )
    ours = json.loads(mix.requests[0].body)
    assert set(body) == set(ours) - {"user_id"}
    assert (len(body["history"]), body["top_k"]) == (len(ours["history"]), ours["top_k"])
