# SPDX-License-Identifier: Apache-2.0
"""`jgr bench ops`: what it times and what it says."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jgr.ops import roofline
from jgr.ops.beam_attention.cases import OP
from jgr.ops.testing import OpCases, all_ops


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' cases in place of the large ones, timed shortly on a small roofline."""
    ops = [
        OpCases(OP.name, OP.call, OP.cases, OP.shapes, OP.integers, OP.work),
    ]
    monkeypatch.setattr(OpCases, "tagged", lambda self, tag: self.cases[1:2])
    monkeypatch.setattr(roofline, "all_ops", lambda: ops)
    monkeypatch.setattr(roofline, "_matmul_flops", lambda n, dtype: 2e9)
    monkeypatch.setattr(roofline, "_copy_bytes", lambda size: 1e9)
    timed = functools.partial(roofline.seconds_per_call, at_least_s=0.0)
    monkeypatch.setattr(roofline, "seconds_per_call", lambda call: timed(call) * 0 + 1e-3)


def test_rates_follow_from_the_least_work_and_the_time(small: None) -> None:
    report = roofline.measure()
    (row,) = report["rows"]
    assert (report["device"], report["dtype"], report["matmul_tflops"]) == ("cpu", "float32", 0.002)
    assert (row["op"], row["case"], row["implementation"], row["ms"]) == (
        "beam_attention",
        "ragged",
        "xla",
        1.0,
    )
    # 5 beams of 4 heads of 16, 27 prompt tokens and 2 slots in each of 3 requests.
    flops = 4 * 5 * 4 * 16 * (27 + 6)
    values = 2 * 3 * 5 * 4 * 16 + 2 * 27 * 2 * 16 + 2 * 3 * 2 * 5 * 2 * 16
    assert row["tflops"] == pytest.approx(flops / 1e-3 / 1e12)
    assert row["gb_per_s"] == pytest.approx(4 * values / 1e-3 / 1e9)
    assert row["roofline"] == pytest.approx(max(flops / 2e9, 4 * values / 1e9) / 1e-3)
    head, columns, line = roofline.lines(report)
    assert head == "cpu, float32: matmul 0.002 TFLOP/s, copy 1 GB/s"
    assert columns.split() == ["op", "case", "form", "ms", "GB/s", "TFLOP/s", "roofline"]
    assert line.split()[:4] == ["beam_attention", "ragged", "xla", "1.000"]


def test_only_what_is_asked_for_is_timed(small: None) -> None:
    assert roofline.measure("no such op")["rows"] == []


def test_calls_are_counted_until_they_take_long_enough() -> None:
    calls: list[Any] = []
    assert roofline.seconds_per_call(lambda: calls.append(0), at_least_s=0.0) >= 0.0
    assert len(calls) == 4  # one to warm up, three to time


def test_every_op_that_is_timed_has_its_work_stated() -> None:
    for op in all_ops():
        for case in op.tagged("bench"):
            work = op.work(case, "float32")
            assert work.bytes > 0, (op.name, case.name)
            assert work.flops >= 0, (op.name, case.name)


@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_every_form_that_a_gpu_would_time_is_there(op: OpCases) -> None:
    """Traced on their own small cases; nothing is compiled. An implementation that an op lacks is a ValueError."""
    case = next(case for case in op.cases if "bench" not in case.tags)
    for name in op.timed:
        try:
            jax.eval_shape(
                functools.partial(op.call, implementation=name, **op.options(case)),
                **op.shapes(case, jnp.bfloat16),
            )
        except ValueError as error:
            assert "no implementation" not in str(error)
