# SPDX-License-Identifier: Apache-2.0
"""The file is ready to run: the same code measures a tiny model here, and without a GPU it claims nothing."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from benchmarks import h200_serving as bench
from benchmarks.harness import ROOT, Missing
from jgr.evaluation.machine import CpuTimes, Quiet

QUIET = Quiet(1.0, sample=lambda: CpuTimes(0.0, 0.0, 0.0), sleep=lambda seconds: None)


@pytest.mark.slow
def test_the_tiny_model_goes_through_everything_and_claims_nothing() -> None:
    measured = bench.measure(True, QUIET)
    assert measured.claims == []
    point, about = measured.rows
    assert (point["prompt_tokens"], point["batch"], point["published_ms"]) == (24, 2, None)
    assert point["time_ms"]["runs"] == 1
    assert 0 < point["share_of_floor"]
    assert about["device"] == jax.devices()[0].device_kind
    assert about["score_difference_from_rank"] <= bench.MAX_SCORE_DIFFERENCE["float32"]


def test_without_a_gpu_there_is_no_result() -> None:
    with pytest.raises(Missing, match="needs a GPU; jax found cpu"):
        bench.measure(False, QUIET)


def test_it_needs_no_package_of_a_server_or_of_training() -> None:
    """An image that runs it has jax, numpy and absl-py: nothing else may be imported, at once or later."""
    absent = (
        "msgspec", "starlette", "uvicorn", "redis", "grain", "h11", "orbax", "optax", "safetensors", "tokenizers",
        "ray", "torch", "matplotlib", "psutil", "prometheus_client",
    )  # fmt: skip
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent}); from benchmarks import h200_serving as bench;"
        "tree, levels = bench.make_catalog(bench.QUICK); assert tree.n_leaves > 1000;"
        "from jgr.models import generators, beam; print(*sorted(m for m in sys.modules if m.startswith('jgr.serving')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""  # nothing of the server either


def test_rows_divide_by_the_rates_of_the_same_run() -> None:
    setting = bench.full()
    times = {f"{tokens} {batch}": [10.0, 12.0, 11.0] for tokens, batch in setting.points}
    times |= {"matmul": [2e3 * 8192**3 / 8e14] * 3, "copy": [2e3 * (1 << 31) / 4e12] * 3}
    rows = bench.make_rows(setting, times)
    assert [row["published_ms"] for row in rows] == [17.6, 93.2, 42.3, 307.9]
    assert (rows[0]["tflops_of_matmul"], rows[0]["gb_per_s_of_copy"]) == (800.0, 4000.0)
    least = bench.least_work(setting, 1000, 1)
    assert 4e12 < least.flops < 6e12  # 1.4 G weights and 1512 tokens
    assert rows[0]["flop_floor_ms"] == pytest.approx(least.flops / 8e11, rel=1e-3)
    assert rows[0]["share_of_floor"] == pytest.approx(
        max(least.flops / 8e11, least.bytes / 4e9) / 11.0, rel=1e-2
    )
    found = bench.claims(rows, 0.01, setting)
    assert [(c.value, c.target, c.better) for c in found[1:]] == [
        (11.0, 17.6, "lower"), (11.0, 93.2, "lower"), (11.0, 42.3, "lower"), (11.0, 307.9, "lower")
    ]  # fmt: skip
