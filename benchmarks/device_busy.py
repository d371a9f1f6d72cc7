# SPDX-License-Identifier: Apache-2.0
"""How busy a device is kept at saturation, by batches in flight: the real engine, threads and policy, in real time.

The device is one with a clock of its own: a run begins when it was launched and the one before it has ended, and takes
2 or 10 ms whatever is in it. `collect` returns when it has ended. Busy is the union of the runs' intervals. 96 clients
of the same process, so that HTTP is not measured, ask for recommendations after 10 items; batches have eight rows.

The other part is padding: requests of two lengths in one queue, each in rows of the shape that its batch has, and
what share of the computed tokens was asked for, where batches are grouped by cost and where they are not (fifo).

    python -m benchmarks.device_busy [--quick]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, override
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.api import RecommendRequest
from jgr.serving.decoders.null import NullExecutor, null_catalog
from jgr.serving.decoders.serve import ServedDecoder, decoder_engine
from jgr.serving.decoders.work import Work
from jgr.serving.engine.engine import Engine
from jgr.serving.policies.batching import Batcher, make_profiles
from jgr.serving.policies.jobs import Job, Profile, Start
from jgr.serving.policies.ordering import Order, Ordering
from jgr.serving.policies.run_costs import RunCosts
from jgr.simulation.serving import simulate

CLIENTS = 96
N_ITEMS = 10_000
EDGE = 20
"""Runs at the beginning and at the end that are not counted."""


class Device(NullExecutor):
    """Computes nothing, for so many seconds a run."""

    def __init__(self, profiles: tuple[Profile, ...], n_leaves: int, in_flight: int, run_s: float) -> None:
        super().__init__(profiles, n_leaves, in_flight)
        self.costs = dict.fromkeys(profiles, run_s)
        self.spans: list[tuple[float, float]] = []
        self._run_s, self._free_s = run_s, 0.0

    def launch(self, start: Start, work: Sequence[Work]) -> Any:
        outcomes = super().launch(start, work)
        begin_s = max(time.perf_counter(), self._free_s)
        self._free_s = begin_s + self._run_s
        self.spans.append((begin_s, self._free_s))
        return outcomes, self._free_s

    def collect(self, start: Start, pending: Any) -> Any:
        outcomes, end_s = pending
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return outcomes


def make(run_ms: int, in_flight: int) -> tuple[Engine[ServedDecoder], Device]:
    config = override(
        Config(),
        "profiles.batch=8",
        "profiles.tokens=64",
        "prompt.max_items=12",
        f"batching.in_flight={in_flight}",
    )
    catalog = null_catalog(N_ITEMS)
    tree = PrefixTree.build(catalog.codes)
    prompts = PromptBuilder(config.prompt, semantic_id_tokenizer(catalog), catalog)
    device = Device(make_profiles(config.profiles), tree.n_leaves, in_flight, run_ms / 1e3)
    return decoder_engine("jgr", catalog, tree, prompts, device, config), device


async def saturate(engine: Engine[ServedDecoder], seconds: float) -> None:
    rng = np.random.default_rng(0)
    requests = [
        RecommendRequest(history=list(map(str, rng.integers(0, N_ITEMS, 10))), top_k=10) for _ in range(64)
    ]
    await engine.start()
    stop_s = time.perf_counter() + seconds

    async def client(number: int) -> None:
        while time.perf_counter() < stop_s:
            await engine.answer(requests[number % len(requests)])
            number += 1

    await asyncio.gather(*map(client, range(CLIENTS)))
    await engine.drain(10.0)


def busy(run_ms: int, in_flight: int, seconds: float) -> float:
    engine, device = make(run_ms, in_flight)
    asyncio.run(saturate(engine, seconds))
    spans = device.spans[EDGE:-EDGE]
    return sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0])


def filled(order: Order) -> float:
    """The share of computed prompt tokens that were asked for: two of three prompts are short, all wait at once."""
    profiles = [Profile("recommend", rows, tokens, 32) for tokens in (64, 256) for rows in (1, 8)]
    costs = {p: (4 + p.batch * p.tokens / 64) / 1e3 for p in profiles}
    rng = np.random.default_rng(1)
    long = rng.random(600) < 1 / 3
    tokens = np.where(long, rng.integers(200, 257, 600), rng.integers(48, 65, 600))
    jobs = [Job(i, "recommend", int(t), 32, 0, None) for i, t in enumerate(tokens)]
    batcher = Batcher(
        profiles,
        max_tokens=10**9,
        max_wait_ns=0,
        max_queue=1000,
        ordering=Ordering(order),
        costs=RunCosts(costs if order == "deadline" else {}),
    )
    out = simulate(batcher, jobs, lambda start: round(costs[_profile(start)] * 1e9))
    computed = sum(_profile(start).batch * _profile(start).tokens for start, _, _ in out.runs)
    return float(tokens.sum()) / computed


def _profile(start: Start) -> Profile:
    assert isinstance(start.shape, Profile)
    return start.shape


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on the busy share with two batches in flight and on padding; rows of one, two and three in flight."""
    rounds, seconds = (1, 2.0) if quick else (5, 4.0)
    variants = {
        (run_ms, in_flight): lambda run_ms=run_ms, in_flight=in_flight: busy(run_ms, in_flight, seconds)
        for run_ms in (2, 10)
        for in_flight in (1, 2, 3)
    }
    found = harness.interleave({str(k): v for k, v in variants.items()}, rounds, quiet)
    rows: list[Row] = [
        {
            "run_ms": run_ms,
            "in_flight": in_flight,
            "busy_share": harness.spread(found[str((run_ms, in_flight))]),
        }
        for run_ms, in_flight in variants
    ]
    shares = {"deadline": filled("deadline"), "fifo": filled("fifo")}
    rows.append({"real_over_padded_tokens": {order: rounded(share) for order, share in shares.items()}})
    least = {key: min(found[str(key)]) for key in variants}
    return Measured(
        [
            Claim("device-busy-at-2-ms-a-batch", rounded(least[2, 2]), "", "higher", 0.97),
            Claim("device-busy-at-10-ms-a-batch", rounded(least[10, 2]), "", "higher", 0.99),
            Claim("real-over-padded-tokens-in-a-mixed-queue", rounded(shares["deadline"]), "", "higher", 0.8),
        ],
        rows,
    )


if __name__ == "__main__":
    harness.main(Benchmark("device_busy", measure, ("numpy",), (Path(__file__),)))
