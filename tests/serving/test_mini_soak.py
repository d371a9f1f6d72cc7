# SPDX-License-Identifier: Apache-2.0
"""Twenty seconds of what benchmarks/soak.py does for an hour: callers, changes, erasures, and nothing wrong or lost."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from benchmarks.hostile_world import Process
from benchmarks.soak_world import CATALOGS, Soak
from tests.serving.versions.test_shared_memory import Two


def test_under_load_and_changes_nothing_is_wrong_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Two(tmp_path)
    try:
        soak = Soak(
            int(server.listener.url.rpartition(":")[2]),
            Process(os.getpid()),
            change_s=0.25,
            measure_s=0.5,
            kept=40,
        )
        with caplog.at_level(logging.ERROR):
            found = soak.run(20.0)
    finally:
        server.stop()  # which audits the engines and the pool, and that every page is free
    assert not found.unasked
    assert not found.wrong
    assert found.compared >= 40 * CATALOGS
    assert (found.lost_pages, found.stray, found.compiled_for_requests) == (0, 0, 0)
    assert len({row["pages"] for row in found.series}) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    counts = found.counts
    assert min(counts[f"/v1/{kind} 200"] for kind in ("recommend", "rank")) > 100
    assert min(counts[what] for what in ("left", "read slowly", "activate", "reload", "erasures")) > 0, counts
