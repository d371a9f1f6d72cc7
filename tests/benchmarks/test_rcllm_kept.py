# SPDX-License-Identifier: Apache-2.0
"""Answers that are kept: equal when read again, and asked anew for anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.rcllm_kept import Ranked, answered, key


def test_answers_are_read_again_only_for_what_was_asked(tmp_path: Path) -> None:
    rows, asked = np.arange(6, dtype=np.int32).reshape(2, 3), 0

    def ask() -> dict[str, Ranked]:
        nonlocal asked
        asked += 1
        return {"naive": Ranked(rows, rows / 7, 0.25), "cacheblend 0.18": Ranked(rows[:, ::-1], -rows / 7)}

    name = key(["ml1m", ("cache.policy=blocks",)], [rows], "abc")
    given, before = answered(name, ["naive", "cacheblend 0.18"], ask, tmp_path / "kept")
    again, after = answered(name, ["naive", "cacheblend 0.18"], ask, tmp_path / "kept")
    assert (asked, before, after) == (1, False, True) and list(given) == list(again)
    for method, of in given.items():
        np.testing.assert_array_equal(of.best, again[method].best)
        np.testing.assert_array_equal(of.scores, again[method].scores)
        assert of.approximate == again[method].approximate
    others = [
        key(["industrial", ("cache.policy=blocks",)], [rows], "abc"),
        key(["ml1m", ("cache.policy=none",)], [rows], "abc"),
        key(["ml1m", ("cache.policy=blocks",)], [rows.reshape(3, 2)], "abc"),
        key(["ml1m", ("cache.policy=blocks",)], [rows + 1], "abc"),
        key(["ml1m", ("cache.policy=blocks",)], [rows], "abd"),
    ]
    assert len({name, *others}) == 6
