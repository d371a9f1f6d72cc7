# SPDX-License-Identifier: Apache-2.0
"""Shapes that test and time prefill attention. lengths: tokens of each row."""

from __future__ import annotations

from jgr.ops.testing import Case

_BENCH = frozenset({"bench"})

CASES = (
    Case("one_token", dict(tokens=1, lengths=(1,), heads=2, kv_heads=1, dim=8)),
    Case("ragged", dict(tokens=19, lengths=(19, 12, 1), heads=4, kv_heads=2, dim=16)),
    Case("empty_row", dict(tokens=8, lengths=(0, 8), heads=2, kv_heads=2, dim=32)),
    Case("two_blocks", dict(tokens=130, lengths=(130, 128), heads=6, kv_heads=2, dim=16)),
    Case("qwen3_0.6b_1k", dict(tokens=1024, lengths=(1024,), heads=16, kv_heads=8, dim=128), _BENCH),
    Case("qwen3_0.6b_512_b8", dict(tokens=512, lengths=(512,) * 8, heads=16, kv_heads=8, dim=128), _BENCH),
)
