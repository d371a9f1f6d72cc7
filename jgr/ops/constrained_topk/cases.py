# SPDX-License-Identifier: Apache-2.0
"""Shapes that test and time the beam step: `vocabulary` columns, `nodes` nodes of at most `degree` children."""

from __future__ import annotations

from jgr.ops.testing import Case

_BENCH = frozenset({"bench"})

CASES = (
    Case("root", dict(batch=2, beams=1, vocabulary=16, nodes=1, degree=9, width=4)),
    Case("one_child", dict(batch=2, beams=3, vocabulary=5, nodes=4, degree=1, width=3)),
    Case("fewer_than_beams", dict(batch=1, beams=2, vocabulary=8, nodes=3, degree=2, width=16)),
    Case("wide", dict(batch=3, beams=8, vocabulary=32, nodes=40, degree=12, width=8)),
    Case("onerec_w256", dict(batch=1, beams=256, vocabulary=8192, nodes=8192, degree=400, width=256), _BENCH),
)
