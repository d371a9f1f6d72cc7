# SPDX-License-Identifier: Apache-2.0
"""Damaged model folders load with the right weights or are refused in one line; `benchmarks.damage` has the cases."""

from __future__ import annotations

import pytest

from benchmarks.damage import FORMS, attack


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_folders_load_or_are_refused_in_one_line(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = attack(100, seed)
    assert [case for case in cases if case.problem] == []
    assert {case.form for case in cases} == set(FORMS)
    assert sum(case.outcome == "loaded" for case in cases) < 40
    assert len({case.damage for case in cases}) > 50
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and "Exception" not in out + err
