# SPDX-License-Identifier: Apache-2.0
"""Every op on an H200: right, against the plain form in float32, and against the least time that its work takes there.

Right: each case in bfloat16 and in float32, as "auto" runs it. Fast: the "bench" cases in bfloat16, each form by
itself, by the profiler: `ms` is the time in which the device was busy, `call_ms` that of queued calls, which is the
host's where a call is short. The least time is that of the multiplications or of the bytes, whichever is longer, at the
rates of a large matmul and of a large copy in the same run (jgr/ops/roofline.py).

    python -m benchmarks.h200_kernels            needs a GPU
    python -m benchmarks.h200_kernels --quick    a few small cases on whatever there is; no claims

Needs jax, numpy and absl-py.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.evaluation import profiling
from jgr.ops import roofline
from jgr.ops.testing import FARTHEST, Case, Check, OpCases, Work, all_ops, checks

AT_LEAST_S = 0.05
TRACED_CALLS = 5
THREADS = 12
"""That compile at once: what most of the run is."""


OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
"""What runs in a CUDA graph has no name in a trace."""
SAVES_MEMORY = ("reorder_beam_kv",)
"""Ops whose kernel needs no second buffer, and is not there to save time."""


class Form(NamedTuple):
    """A form of an op that is timed, in bfloat16."""

    op: OpCases
    case: Case
    implementation: str


def forms(quick: bool, on_gpu: bool) -> list[Form]:
    tag = "ci" if quick else "bench"
    return [
        Form(op, case, name)
        for op in all_ops()
        if "pallas" in op.timed or op.name == "constrained_topk"
        for case in op.tagged(tag)[: 1 if quick else None]
        for name in ("cudnn", *op.timed)
        if name != "native" and (on_gpu or name not in ("pallas", "cudnn"))
    ]


def checked(check: Check, programs: tuple[Any, Any]) -> Row:
    """How far the case is from the plain form."""
    far = check.distance(programs)
    return {
        "op": check.op.name,
        "case": check.case.name,
        "dtype": check.dtype,
        "distance": harness.rounded(far, 3),
        "share_of_limit": harness.rounded(far / FARTHEST[check.dtype], 3),
    }


def compiled(form: Form) -> Any:
    """The form's program; None where the op has no such form for the case."""
    shapes = form.op.shapes(form.case, jnp.bfloat16)
    call = functools.partial(form.op.call, implementation=form.implementation, **form.op.options(form.case))
    try:
        lowered = jax.jit(call).lower(**shapes)
    except ValueError as e:  # "no implementation", or what the form cannot run
        harness.note(str(e))
        return None
    return lowered.compile(OPTIONS if jax.default_backend() == "gpu" else None)


def timed(form: Form, run: Any, rates: Work) -> Row:
    flops, size = form.op.work(form.case, jnp.dtype(jnp.bfloat16))
    call = functools.partial(run, **form.op.draw(form.case, jnp.bfloat16))
    call_s, seconds = roofline.seconds_per_call(call, AT_LEAST_S), busy_s(call)
    least_s = max(flops / rates.flops, size / rates.bytes)
    return {
        "op": form.op.name,
        "case": form.case.name,
        "implementation": form.implementation,
        "ms": harness.rounded(seconds * 1e3),
        "call_ms": harness.rounded(call_s * 1e3),
        "tflops": harness.rounded(flops / seconds / 1e12),
        "gb_per_s": harness.rounded(size / seconds / 1e9),
        "share_of_least_time": harness.rounded(least_s / seconds, 3),
    }


def busy_s(call: Callable[[], Any]) -> float:
    """Seconds of a call in which the device is busy."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(TRACED_CALLS)])
        events = profiling.read_events(Path(folder))
    return profiling.summarize(events, [], 0.0).busy_ns / 1e9 / TRACED_CALLS


def measure(quick: bool, quiet: Quiet) -> Measured:
    on_gpu = jax.default_backend() == "gpu"
    if not quick and not on_gpu:
        raise Missing(
            f"needs a GPU; jax found {jax.default_backend()} (--quick tries a few small cases on it)"
        )
    wanted = forms(quick, on_gpu)
    compared = [check for check in checks() if "ci" in check.case.tags][:4] if quick else checks()
    with ThreadPoolExecutor(THREADS) as pool:
        of_checks, of_forms = pool.map(Check.compiled, compared), pool.map(compiled, wanted)
        rows = [checked(*pair) for pair in zip(compared, of_checks, strict=True)]
        ready = [(form, run) for form, run in zip(wanted, of_forms, strict=True) if run is not None]
    rates = roofline.rates(on_gpu)
    rows += [timed(form, run, rates) for form, run in ready]
    rows.append(
        {
            "device": jax.devices()[0].device_kind,
            "tflops_of_matmul": harness.rounded(rates.flops / 1e12),
            "gb_per_s_of_copy": harness.rounded(rates.bytes / 1e9),
        }
    )
    return Measured([] if quick else claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """That all is right, and that no kernel is slower than what XLA makes of the formula."""
    shares = [row["share_of_limit"] for row in rows if "share_of_limit" in row]
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "ms" in row and row["op"] not in SAVES_MEMORY:
            times.setdefault((row["op"], row["case"]), {})[row["implementation"]] = row["ms"]
    over = []
    for of_form in times.values():
        ours = [ms for name, ms in of_form.items() if name in ("pallas", "cudnn")]
        others = [ms for name, ms in of_form.items() if name in ("xla", "reference")]
        over += [min(ours) / min(others)] if ours and others else []
    return [
        Claim("h200-kernels-checked", len(shares), "", "higher", len(checks())),
        Claim("h200-kernels-largest-distance-over-limit", max(shares), "", "lower", 1.0),
        Claim("h200-kernels-slowest-over-xla", harness.rounded(max(over)), "x", "lower", 1.0),
    ]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="h200_kernels",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
            device="h200",
        )
    )
