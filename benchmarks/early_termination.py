# SPDX-License-Identifier: Apache-2.0
"""Choosing the best W of W beams' candidates: how many are looked at, and how long it takes (XGR-10).

A score is the log-probability of one of V columns, drawn from a Dirichlet distribution (small alpha: peaked), plus the
score of its beam.

- blocks: what jgr's beam step does on a device (jgr.ops.constrained_topk.select): it ranks the maxima of blocks of 128,
  then the candidates of the W best blocks. Visited are the maxima and candidates that are ranked; the streaming pass
  that takes the maxima is part of the time.
- top_k: the compiler's own top-k over all W x V scores. sort: a full sort of them. Both run on the same device.
- heap: the paper's form, on the host, after each beam's candidates are sorted; that sort is not part of its time.
  host_sort: a full sort on the host.

    python -m benchmarks.early_termination [--quick]
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.ops.constrained_topk import heap, select
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


def device_forms(width: int) -> Mapping[str, Callable[[jax.Array], Any]]:
    """The forms that run on a device: each gives the best `width` values of scores [1, N] and their indices."""
    return {
        "blocks": functools.partial(select.top_k, k=width),
        "top_k": functools.partial(jax.lax.top_k, k=width),
        "sort": lambda x: jax.lax.sort((-x, jnp.arange(x.shape[1])[None]), num_keys=1)[1][:, :width],
    }


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def visited_by_blocks(width: int) -> int:
    blocks = width * COLUMNS // select.BLOCK
    return blocks + min(width, blocks) * select.BLOCK


def measure(quick: bool, quiet: Quiet) -> Measured:
    widths, alphas, rounds = ((128,), (0.3,), 1) if quick else ((128, 256, 512), ALPHAS, 5)
    rows = []
    for width in widths:
        for alpha in alphas:
            scores = draw(width, alpha)
            flat = jnp.asarray(scores.reshape(1, -1))
            forms = {name: jax.jit(run) for name, run in device_forms(width).items()}
            found = heap.top_k(scores, width)
            want = np.argsort(-scores.ravel(), kind="stable")[:width]
            indices = {"heap": found.indices, "blocks": forms["blocks"](flat)[1][0]}
            agree = all(np.array_equal(np.asarray(index), want) for index in indices.values())
            order = np.argsort(-scores, axis=1, kind="stable")
            runs = {
                name: functools.partial(seconds_per_call, functools.partial(run, flat))
                for name, run in forms.items()
            }
            runs["heap"] = functools.partial(seconds, functools.partial(heap.merge, scores, order, width))
            runs["host_sort"] = functools.partial(
                seconds, functools.partial(np.argsort, -scores.ravel(), kind="stable")
            )
            times = harness.interleave(runs, rounds, quiet)
            rows.append(make_row(width, alpha, times, found.visited, agree))
    return Measured(claims(rows), rows)


def make_row(
    width: int, alpha: float, times: Mapping[str, Sequence[float]], heap_visited: int, agree: bool
) -> Row:
    spreads = {name: harness.spread(s * 1e3 for s in runs) for name, runs in times.items()}
    median = {name: spread["median"] for name, spread in spreads.items()}
    candidates = width * COLUMNS
    return {
        "beam_width": width,
        "alpha": alpha,
        "candidates": candidates,
        "visited": {"heap": heap_visited, "blocks": visited_by_blocks(width)},
        "visited_share": {
            "heap": harness.rounded(heap_visited / candidates, 3),
            "blocks": harness.rounded(visited_by_blocks(width) / candidates, 3),
        },
        "time_ms": spreads,
        "over_blocks": {
            name: harness.rounded(median[name] / median["blocks"], 3) for name in ("top_k", "sort")
        },
        "host_sort_over_heap": harness.rounded(median["host_sort"] / median["heap"], 3),
        "all_agree": agree,
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Claims, each on the worst row."""
    return [
        Claim(
            "early-termination-equals-the-sort", float(all(r["all_agree"] for r in rows)), "", "higher", 1.0
        ),
        Claim(
            "share-of-candidates-visited-by-the-heap",
            max(r["visited_share"]["heap"] for r in rows),
            "",
            "lower",
            0.15,
        ),
        Claim(
            "share-of-candidates-ranked-on-the-device",
            max(r["visited_share"]["blocks"] for r in rows),
            "",
            "lower",
            0.15,
        ),
        Claim(
            "time-of-a-full-sort-over-early-termination-on-the-device",
            min(r["over_blocks"]["sort"] for r in rows),
            "x",
            "higher",
            2.0,
        ),
        Claim(
            "time-of-top-k-over-early-termination-on-the-device",
            min(r["over_blocks"]["top_k"] for r in rows),
            "x",
            "higher",
            1.0,
        ),
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
