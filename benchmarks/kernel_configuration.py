# SPDX-License-Identifier: Apache-2.0
"""What it costs to choose an op's configuration by rule instead of by trial (XGR-6), for attention on this device.

A sweep times every block size of 64 drawn shapes twice; a decision tree is fitted on three quarters of them. Regret is
the time lost on the others: against the fastest of the first round, in the second (see tools/tune.py). A tree that does
not beat the heuristic is not shipped.

    pip install scikit-learn && python -m benchmarks.kernel_configuration [--quick]
"""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import jax

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet
from tools import tune

OP = "segment_attention"
THREADS, SHAPES, QUICK_SHAPES = 2, 64, 8


def measure(quick: bool, quiet: Quiet) -> Measured:
    if find_spec("sklearn") is None:
        raise Missing("needs scikit-learn: pip install scikit-learn")
    quiet.wait()
    found = tune.sweep(OP, QUICK_SHAPES if quick else SHAPES)
    lost = tune.regrets(found, tune.fit(found))
    _, held_out = tune.split(found["rows"])
    row = {
        "op": OP,
        "shapes": len(found["rows"]),
        "held_out": len(held_out),
        "candidates": sum(len(row["seconds"]) for row in found["rows"]),
        "regret": {name: asdict(regret) for name, regret in lost.items()},
    }
    claims = [
        Claim(f"regret-of-the-{name}-on-held-out-shapes", harness.rounded(regret.mean, 3), "", "lower", 0.05)
        for name, regret in lost.items()
    ]
    claims += [
        Claim(f"largest-regret-of-the-{name}", harness.rounded(regret.largest, 3), "", "lower", 0.05)
        for name, regret in lost.items()
    ]
    return Measured(claims, [row])


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="kernel_configuration",
            measure=measure,
            packages=("jax", "jaxlib", "numpy", "scikit-learn"),
            sources=(Path(__file__), Path(tune.__file__)),
            device=jax.default_backend(),
        )
    )
