# SPDX-License-Identifier: Apache-2.0
"""Shapes that test and time beam attention. lengths: prompt tokens of each row; slots: generated tokens so far."""

from __future__ import annotations

from jgr.ops.testing import Case

_BENCH = frozenset({"bench"})

CASES = (
    Case("greedy", dict(tokens=5, lengths=(5,), width=1, slots=1, heads=2, kv_heads=1, dim=8)),
    Case("ragged", dict(tokens=19, lengths=(19, 7, 1), width=5, slots=2, heads=4, kv_heads=2, dim=16)),
    Case("no_prompt", dict(tokens=4, lengths=(0, 4), width=3, slots=2, heads=2, kv_heads=2, dim=32)),
    Case("deep", dict(tokens=33, lengths=(33, 20), width=8, slots=7, heads=6, kv_heads=2, dim=16)),
    Case(
        "qwen3_0.6b_1k_w128",
        dict(tokens=1024, lengths=(1024,), width=128, slots=2, heads=16, kv_heads=8, dim=128),
        _BENCH,
    ),
    Case(
        "qwen3_0.6b_1k_w512",
        dict(tokens=1024, lengths=(1024,), width=512, slots=2, heads=16, kv_heads=8, dim=128),
        _BENCH,
    ),
)
