# SPDX-License-Identifier: Apache-2.0
"""The file is ready to run: the same code measures a tiny model here, and without a GPU it claims nothing."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import h200_serving as bench
from benchmarks.harness import ROOT, Missing
from benchmarks.titles import title
from jgr.evaluation.machine import CpuTimes, Quiet

QUIET = Quiet(1.0, sample=lambda: CpuTimes(0.0, 0.0, 0.0), sleep=lambda seconds: None)


@pytest.mark.slow
def test_the_tiny_model_goes_through_everything_and_claims_nothing() -> None:
    measured = bench.measure(True, QUIET)
    assert measured.claims == []
    point, stages, about = measured.rows
    assert (stages["prompt_tokens"], stages["batch"]) == (24, 2)
    assert stages["busy_ms"] > 0
    assert {"prefill/attention", "decode/mlp", "beam step"} <= set(stages["stages_ms"])
    assert (point["prompt_tokens"], point["batch"], point["published_ms"]) == (24, 2, None)
    assert point["time_ms"]["runs"] == 1
    assert 0 < point["share_of_least_time"]
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
    times = {f"jgr {tokens} {batch}": [10.0, 12.0, 11.0] for tokens, batch in setting.points}
    times |= {"matmul": [2e3 * 8192**3 / 8e14] * 3, "copy": [2e3 * (1 << 31) / 4e12] * 3}
    rows = bench.make_rows(setting, times)
    assert [row["published_ms"] for row in rows] == [17.6, 93.2, 42.3, 307.9]
    assert (rows[0]["tflops_of_matmul"], rows[0]["gb_per_s_of_copy"]) == (800.0, 4000.0)
    assert all("pytorch_ms" not in row for row in rows)
    least = bench.least_work(setting, 1000, 1)
    assert 4e12 < least.flops < 6e12  # 1.4 G weights and 1512 tokens
    assert rows[0]["flop_floor_ms"] == pytest.approx(least.flops / 8e11, rel=1e-3)
    assert rows[0]["share_of_least_time"] == pytest.approx(
        max(least.flops / 8e11, least.bytes / 4e9) / 11.0, rel=1e-2
    )
    found = bench.claims(rows, 0.01, setting)
    assert [(c.value, c.target, c.better) for c in found if c.unit == "ms"] == [
        (11.0, 17.6, "lower"), (11.0, 93.2, "lower"), (11.0, 42.3, "lower"), (11.0, 307.9, "lower")
    ]  # fmt: skip


def test_a_peer_is_compared_round_by_round() -> None:
    setting = bench.full()
    times = {f"jgr {tokens} {batch}": [10.0, 20.0, 40.0] for tokens, batch in setting.points}
    times |= {f"pytorch {tokens} {batch}": [20.0, 30.0, 80.0] for tokens, batch in setting.points}
    times |= {"compiled 1000 1": [10.0, 35.0, 36.0], "compiled 1000 8": [10.0, 15.0, 16.0]}
    times |= {"matmul": [2e3 * 8192**3 / 8e14] * 3, "copy": [2e3 * (1 << 31) / 4e12] * 3}
    rows = bench.make_rows(setting, times)
    assert rows[0]["pytorch_over_jgr"] == {"median": 2.0, "interval": [1.5, 2.0]}
    assert (rows[0]["fastest"], rows[1]["fastest"], rows[2]["fastest"]) == ("pytorch", "compiled", "pytorch")
    assert (
        rows[1]["pytorch_over_jgr"]["median"] == 0.75
    )  # the faster form, where it is slow in some rounds too
    rows[0] |= {"items_shared_with_pytorch": 0.8}
    found = {claim.id: claim for claim in bench.claims(rows, 0.01, setting)}
    assert not found["h200-items-shared-with-pytorch"].holds
    assert found["h200-pytorch-time-over-jgr-beam-256-prompt-1000-batch-1"].holds
    assert not found["h200-constrained-beam-256-prompt-1000-batch-1"].holds  # 20 of 17.6 ms
    assert found["h200-time-over-least-beam-256-prompt-5000-batch-8"].value == pytest.approx(
        1 / rows[3]["share_of_least_time"], rel=0.01
    )
    assert all(title(claim.to_json()) for claim in found.values())


def test_agreement_counts_items_and_compares_their_scores() -> None:
    ours = np.array([[1, 2, 3, 4]]), np.array([[-1.0, -2.0, -3.0, -4.0]])
    theirs = np.array([[2, 1, 9, 4]]), np.array([[-2.5, -1.0, -3.0, -4.0]])
    assert bench.agreement(ours, theirs) == (0.75, 0.5)
