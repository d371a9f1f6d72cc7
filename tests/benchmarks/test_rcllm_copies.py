# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of copies says of times by hand, and when it makes copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rcllm_copies import DEVICE, FIRST, HOST, Copies, claims, summary
from benchmarks.rcllm_ttft import WIDE, Size


def test_what_is_exposed_and_what_is_hidden() -> None:
    """Copies of 10 ms add 3 to each answer, and 11 where they come first; turns differ by what both share."""
    turns = [[100.0 + 7 * i, 102.0 + 7 * i] for i in range(8)]
    ms = {
        name: [[one + by for one in turn] for turn in turns]
        for name, by in ((DEVICE, 0), (HOST, 3), (FIRST, 11))
    }
    row = summary(Size(WIDE, 4, 78, 8), 2030, ms, [9.0, 10.0, 12.0])
    assert (row["exposed_ms"], row["exposed_interval"]) == (3, [3, 3])
    assert (row["exposed_when_first_ms"], row["copies_ms"]["median"]) == (11, 10)
    assert row["hidden"] == pytest.approx(0.7) and row["ms"][HOST]["median"] == 128.5
    (claim,) = claims([row])
    assert claim.id == "rcllm-copies-hidden-4-layers" and "2,030 tokens" in claim.title and not claim.holds
    lost = {**row, "exposed_when_first_interval": [-1, 12]}
    assert claims([lost]) == [], "not even copies that nothing hides are seen"


def test_copies_come_first_where_that_is_asked() -> None:
    told: list[str] = []

    def read(program: Any, epoch: int) -> Any:
        told.append("wait")
        return program(epoch)

    paged: Any = SimpleNamespace(
        launch=lambda profile, works: told.append(f"launch {profile} {works}"),
        catch_up=lambda: told.append("copy"),
        pool=SimpleNamespace(epoch=1, read=read),
    )
    copies = Copies(paged)
    paged.launch("profile", "works")
    assert told == ["launch profile works"] and not copies.ms
    copies.first = True
    paged.launch("profile", "others")
    assert told[1:] == ["copy", "wait", "launch profile others"] and len(copies.ms) == 1
