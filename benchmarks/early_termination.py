# SPDX-License-Identifier: Apache-2.0
"""Choosing the best W of W beams' candidates: how many are looked at, and how long it takes (XGR-10).

A score is the log-probability of one of V columns, drawn from a Dirichlet distribution (small alpha: peaked), plus the
score of its beam. All forms take the same W x V scores, and give the best W in order; none of them sorts the rest.

- blocks: what jgr's beam step does on a device (jgr.ops.constrained_topk.select): it ranks the maxima of blocks of 128,
  then the candidates of the W best blocks. Visited are the maxima and candidates that are ranked; the streaming pass
  that takes the maxima is part of the time.
- top_k: the compiler's own top-k. torch: torch.topk, where PyTorch is installed. argpartition: NumPy's selection of the
  best W, and a sort of these.

The paper's heap is no row, since no part of serving uses it (jgr.ops.constrained_topk.heap is its reference). For jgr
speaks that the others are called by themselves; for them, that their scores are where they need them already, while in
a compiled beam step only blocks and top_k can stay on the device.

    python -m benchmarks.early_termination [--quick]
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.ops.constrained_topk import select
from jgr.ops.roofline import seconds_per_call

THREADS = 2
COLUMNS = 8192
ALPHAS = (0.01, 0.3, 10.0)


def draw(width: int, alpha: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Scores of beams plus log-probabilities: [width, COLUMNS]."""
    rng = np.random.default_rng(seed)
    gamma = np.maximum(rng.standard_gamma(alpha, (width, COLUMNS)), 1e-30)
    log_probabilities = np.log(gamma / gamma.sum(axis=1, keepdims=True))
    beams = np.log(rng.dirichlet(np.ones(width)))
    scores: npt.NDArray[np.float32] = (beams[:, None] + log_probabilities).astype(np.float32)
    return scores


def argpartition(scores: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.int64]:
    """The indices of the best `width` of scores [N], best first, by NumPy's selection."""
    best = np.argpartition(scores, len(scores) - width)[-width:]
    return best[np.argsort(-scores[best], kind="stable")]


def forms(scores: npt.NDArray[np.float32], width: int) -> dict[str, Callable[[], Any]]:
    """The forms by name: each gives the indices of the best `width` of scores [N], best first."""
    on_device = jnp.asarray(scores[None])
    blocks = jax.jit(functools.partial(select.top_k, k=width))
    top_k = jax.jit(functools.partial(jax.lax.top_k, k=width))
    found: dict[str, Callable[[], Any]] = {
        "blocks": lambda: blocks(on_device)[1][0],
        "top_k": lambda: top_k(on_device)[1][0],
        "argpartition": lambda: argpartition(scores, width),
    }
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(THREADS)
        tensor = torch.from_numpy(scores)
        found["torch"] = lambda: torch.topk(tensor, width).indices.numpy()
    return found


def visited_by_blocks(width: int) -> int:
    blocks = width * COLUMNS // select.BLOCK
    return blocks + min(width, blocks) * select.BLOCK


def measure(quick: bool, quiet: Quiet) -> Measured:
    widths, alphas, rounds = ((128,), (0.3,), 1) if quick else ((128, 256, 512), ALPHAS, 5)
    rows = []
    for width in widths:
        for alpha in alphas:
            scores = draw(width, alpha).ravel()
            each = forms(scores, width)
            want = np.sort(scores)[::-1][:width]
            agree = all(np.array_equal(scores[np.asarray(run())], want) for run in each.values())
            runs = {name: functools.partial(seconds_per_call, run) for name, run in each.items()}
            times = harness.interleave(runs, rounds, quiet)
            rows.append(make_row(width, alpha, times, agree))
    return Measured(claims(rows), rows)


def make_row(width: int, alpha: float, times: Mapping[str, Sequence[float]], agree: bool) -> Row:
    spreads = {name: harness.spread(s * 1e3 for s in runs) for name, runs in times.items()}
    median = {name: spread["median"] for name, spread in spreads.items()}
    candidates = width * COLUMNS
    return {
        "beam_width": width,
        "alpha": alpha,
        "candidates": candidates,
        "visited": visited_by_blocks(width),
        "visited_share": harness.rounded(visited_by_blocks(width) / candidates, 3),
        "time_ms": spreads,
        "over_blocks": {
            name: harness.rounded(time / median["blocks"], 3)
            for name, time in median.items()
            if name != "blocks"
        },
        "all_agree": agree,
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Claims, each on the worst row."""
    same = float(all(row["all_agree"] for row in rows))
    visited = max(row["visited_share"] for row in rows)
    found = [
        Claim("selections-agree", same, "", "higher", 1.0),
        Claim("share-of-candidates-ranked-on-the-device", visited, "", "lower", 0.15),
        Claim(
            "time-of-the-fastest-other-selection-over-jgrs",
            min(min(row["over_blocks"].values()) for row in rows),
            "x",
            "higher",
            1.0,
        ),
    ]
    names = rows[0]["over_blocks"]
    return found + [
        Claim(
            f"time-of-{name}-over-jgrs-selection",
            min(row["over_blocks"][name] for row in rows),
            "x",
            "higher",
            1.0,
        )
        for name in names
    ]


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="early_termination",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
            device=jax.default_backend(),
        )
    )
