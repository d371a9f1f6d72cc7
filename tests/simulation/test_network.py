# SPDX-License-Identifier: Apache-2.0
"""A link's time, by hand."""

from __future__ import annotations

from jgr.simulation.network import TokenBucket


def test_a_bucket_passes_its_burst_at_once_and_the_rest_at_its_rate() -> None:
    link = TokenBucket(rate=10.0, burst=5.0)
    assert link.passed(3, 0.0) == 0.0  # 2 left
    assert link.passed(12, 0.0) == 1.0  # 10 behind
    assert link.passed(10, 0.5) == 2.0  # behind those: 5 still to go, and 10
    assert link.passed(5, 100.0) == 100.0  # idle meanwhile, but no more than the burst is saved
    assert link.passed(5, 100.0) == 100.5
