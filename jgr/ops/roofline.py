# SPDX-License-Identifier: Apache-2.0
"""Times the ops' "bench" cases on this device, against the roofline that it measures in the same run.

The roofline is the FLOP/s of a large matmul and the bytes/s of a large copy. An op's least time is that of its FLOPs or
of its bytes, whichever is longer, so 100 % is the best that a form can reach, unless its arrays fit into a cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops import native
from jgr.ops.testing import Case, OpCases, Work, all_ops

AT_LEAST_S = 0.2


def measure(only: str = "") -> dict[str, Any]:
    """Time the cases of every op whose "name case" contains `only`; the rows can be written as JSON."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    dtype = jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32)
    chosen = [
        (op, case) for op in all_ops() for case in op.tagged("bench") if only in f"{op.name} {case.name}"
    ]
    roofline = rates(on_gpu)
    rows = [
        row
        for op, case in chosen
        for row in _rows(op, case, dtype, [x for x in op.timed if _can_run(x, on_gpu)], roofline)
    ]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "dtype": dtype.name,
        "matmul_tflops": round(roofline.flops / 1e12, 4),
        "copy_gb_per_s": round(roofline.bytes / 1e9, 2),
        "rows": rows,
    }


def rates(on_gpu: bool) -> Work:
    """FLOP/s of a large matmul, in bfloat16 on a GPU and else in float32, and bytes/s of a large copy."""
    dtype = jnp.dtype(jnp.bfloat16 if on_gpu else jnp.float32)
    return Work(_matmul_flops(8192 if on_gpu else 2048, dtype), _copy_bytes(2**30 if on_gpu else 2**27))


def _can_run(form: str, on_gpu: bool) -> bool:
    return on_gpu if form == "pallas" else form != "native" or (not on_gpu and not native.library().problem)


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report as lines of text."""
    head = (
        f"{report['device']}, {report['dtype']}: matmul {report['matmul_tflops']:g} TFLOP/s, "
        f"copy {report['copy_gb_per_s']:g} GB/s"
    )
    shown = [f"{'op':<20} {'case':<24} {'form':<8} {'ms':>9} {'GB/s':>8} {'TFLOP/s':>8} {'roofline':>8}"]
    for row in report["rows"]:
        shown.append(
            f"{row['op']:<20} {row['case']:<24} {row['implementation']:<8} {row['ms']:>9.3f} "
            f"{row['gb_per_s']:>8.1f} {row['tflops']:>8.3f} {row['roofline']:>8.1%}"
        )
    return [head, *shown]


def _rows(
    op: OpCases, case: Case, dtype: Any, implementations: Sequence[str], roofline: Work
) -> Iterator[dict[str, Any]]:
    arguments = op.draw(case, dtype)
    flops, size = op.work(case, dtype)
    least_s = max(flops / roofline.flops, size / roofline.bytes)
    for name in implementations:
        call = jax.jit(functools.partial(op.call, implementation=name, **op.options(case)))
        seconds = seconds_per_call(functools.partial(call, **arguments))
        yield {
            "op": op.name,
            "case": case.name,
            "implementation": name,
            "ms": seconds * 1e3,
            "gb_per_s": size / seconds / 1e9,
            "tflops": flops / seconds / 1e12,
            "roofline": least_s / seconds,
        }


def seconds_per_call(call: Callable[[], Any], at_least_s: float = AT_LEAST_S) -> float:
    """Seconds a call in the fastest of three runs. Calls are queued, which hides the host's part, as in serving."""

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            last = call()  # the others' memory is free again at once
        jax.block_until_ready(last)
        return time.perf_counter() - start

    run(1)
    calls = 1
    while (elapsed_s := run(calls)) < at_least_s / 3 and calls < 4096:
        calls *= 2
    return min(elapsed_s, run(calls), run(calls)) / calls


def _matmul_flops(n: int, dtype: Any) -> float:
    a, b = jax.random.normal(jax.random.key(0), (2, n, n)).astype(dtype)
    return 2 * n**3 / seconds_per_call(functools.partial(jax.jit(jnp.matmul), a, b))


def _copy_bytes(size: int) -> float:
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / seconds_per_call(functools.partial(jax.jit(lambda x: x + 1), x))
