# SPDX-License-Identifier: Apache-2.0
"""How much of the copies of blocks from host memory is hidden behind the choice of tokens (RCLLM-13).

RcLLM at r = .3 with all blocks on the device, with most of them in host memory, and the latter once more with the
copies made and waited for before tokens are chosen. The engines, prompts and weights are those of
benchmarks/rcllm_ttft.py; the three take turns, one request at a time.

- copies_ms: the copies of a request alone, until the device has them; nothing else runs meanwhile.
- exposed_ms: what an answer takes longer than with all blocks on the device; exposed_when_first_ms: the same where the
  copies are made first. Both are medians of differences of the same turn, with an interval.
- hidden: the share of copies_ms that is not exposed. A CPU has no engine that copies beside its cores: a copy is work
  for a core that the choice of tokens leaves free, or does not.

Copies that are made first must show in the answers' times. Where they do not, other things move these times more than
the copies do, and nothing is claimed.

    python -m benchmarks.rcllm_copies [--quick]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness, rcllm_ttft
from benchmarks.bat_world import event_loop
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from benchmarks.rcllm_ttft import AT, HOSTED, NARROW, WIDE, Running, Served, Size, World, methods
from jgr.serving.decoders.paged_executor import PagedExecutor

SIZES = (Size(WIDE, 4, 78, 25), Size(WIDE, 8, 78, 20), Size(NARROW, 28, 78, 12))
QUICK = (Size(WIDE, 4, 16, 2),)
HIDDEN = 0.8
"""Of the copies' time so much is to be hidden."""
DEVICE, HOST, FIRST = "on the device", "from the host", "from the host, copies first"


class Copies:
    """Watches the batches of an executor. first: their copies are made, and waited for, before all else; ms: what that
    took, of each such batch."""

    def __init__(self, paged: PagedExecutor) -> None:
        self.first, self.ms = False, list[float]()
        launch = paged.launch

        def watched(*batch: Any) -> Any:
            if self.first:
                begin = time.perf_counter()
                paged.catch_up()
                paged.pool.read(jax.block_until_ready, paged.pool.epoch)
                self.ms.append((time.perf_counter() - begin) * 1e3)
            return launch(*batch)

        setattr(paged, "launch", watched)  # noqa: B010


def paged_of(running: Running) -> PagedExecutor:
    executors: Any = running.engine.served.executors
    paged: PagedExecutor = executors.paged
    return paged


class Exposed(NamedTuple):
    """Milliseconds, with their interval."""

    ms: float
    low: float
    high: float


def exposed(slower: Sequence[Sequence[float]], faster: Sequence[Sequence[float]]) -> Exposed:
    """How much longer one system's requests take than another's, by turns. slower, faster: ms of each turn's."""
    apart = [float(np.mean(a) - np.mean(b)) for a, b in zip(slower, faster, strict=True)]
    return Exposed(rounded(float(np.median(apart))), *harness.interval_of_median(apart))


def summary(size: Size, tokens: int, ms: dict[str, list[list[float]]], copies: Sequence[float]) -> Row:
    """ms: of each system, turn by turn. copies: ms of each request's, alone."""
    behind, first = (exposed(ms[name], ms[DEVICE]) for name in (HOST, FIRST))
    alone = float(np.median(copies))
    return {
        "layers": size.layers,
        "prompt_tokens": tokens,
        "ms": {name: harness.spread([one for turn in turns for one in turn]) for name, turns in ms.items()},
        "copies_ms": harness.spread(copies),
        "exposed_ms": behind.ms,
        "exposed_interval": [behind.low, behind.high],
        "exposed_when_first_ms": first.ms,
        "exposed_when_first_interval": [first.low, first.high],
        "hidden": rounded(1 - behind.ms / alone),
        "hidden_interval": [rounded(1 - behind.high / alone), rounded(1 - behind.low / alone)],
    }


def measure(quick: bool, quiet: Quiet) -> Measured:
    rows: list[Row] = []
    cache = str(harness.ROOT / "runs" / "xla_rcllm")
    with tempfile.TemporaryDirectory(prefix="jgr-rcllm-") as folder, event_loop() as loop:
        for at, size in enumerate(QUICK if quick else SIZES):
            world = World(Path(folder) / str(at), size)
            family = methods(size.span, True)
            here, host = (Running(world, family[name], loop, cache) for name in ("rcllm", "hosted"))
            budgets = family["rcllm"].budgets[AT], family["hosted"].budgets[HOSTED]
            copies = Copies(paged_of(host))

            def first() -> list[Served]:
                copies.first = True  # noqa: B023, called within the round of this loop
                try:
                    return host.turn(budgets[1])  # noqa: B023
                finally:
                    copies.first = False  # noqa: B023

            turns = {
                DEVICE: lambda: here.turn(budgets[0]),  # noqa: B023
                HOST: lambda: host.turn(budgets[1]),  # noqa: B023
                FIRST: first,
            }
            found = harness.interleave(turns, size.rounds, quiet)
            ms = {name: [[one.ms for one in turn] for turn in kept] for name, kept in found.items()}
            rows.append(summary(size, world.tokens, ms, copies.ms[rcllm_ttft.PER_TURN :]))
            for each in (here, host):
                each.stop()
    return Measured(claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        Claim(
            f"rcllm-copies-hidden-{row['layers']}-layers",
            row["hidden"],
            "",
            "higher",
            HIDDEN,
            "Share of the copies of blocks from host memory that is hidden while RcLLM chooses tokens; "
            f"{row['layers']} layers, {row['prompt_tokens']:,} tokens",
            (row["hidden_interval"][0], row["hidden_interval"][1]),
        )
        for row in rows
        if row["exposed_when_first_interval"][0] > 0
    ]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="rcllm_copies",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(rcllm_ttft.__file__)),
            device=jax.default_backend(),
        )
    )
