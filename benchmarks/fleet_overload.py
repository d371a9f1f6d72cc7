# SPDX-License-Identifier: Apache-2.0
"""What a fleet answers in time where more is asked of it than its processes can.

Two replicas of two small models on a real Ray, and callers in a closed loop, each with a connection of its own; the
models are so small that proxy and front are what is full first. A request has 300 ms. Who is refused asks again after
50 ms, whatever Retry-After says. Four callers are what the fleet serves in time; forty are too many. Both levels run by
turns, all on the same cores as the fleet. Each answer is compared with one engine's.

    python -m benchmarks.fleet_overload [--quick]
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

import jgr
from benchmarks import fault_world, harness
from benchmarks.fault_world import Call, Fleet, Models, Reference
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, interval_of_median, rounded
from benchmarks.soak_world import drawn

FEW, MANY = 4, 40
SECONDS, ROUNDS = 10.0, 5
DEADLINE_MS = 300.0
AGAIN_S = 0.05
WARM_S = 3.0
"""Calls before this are not counted: connections are made, and the fleet finds out how many it serves."""


def ask(url: str, callers: int, seconds: float, seed: int) -> list[Call]:
    """So many callers ask for so long. at_s: since the beginning."""
    begun_s, calls = time.monotonic(), list[Call]()

    def go(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        with jgr.Client(url, timeout_s=30.0, retries=0) as client:
            while (at_s := time.monotonic() - begun_s) < seconds:
                path, body = drawn(rng)
                body.pop("priority", None)
                body["deadline_ms"] = DEADLINE_MS
                outcome, answer = "ok", {}
                try:
                    answer = client.fetch("POST", path, msgspec.json.encode(body), dict)
                except jgr.Overloaded:
                    outcome = "refused"
                except jgr.DeadlineExceeded:
                    outcome = "late"
                except jgr.RequestFailed as error:
                    outcome, answer = "lost", {"error": str(error)}
                took_s = time.monotonic() - begun_s - at_s
                calls.append(Call(at_s, took_s, outcome, path, body, answer))
                if outcome == "refused":
                    time.sleep(AGAIN_S)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return calls


def row_of(callers: int, calls: Sequence[Call], seconds: float, wrong: int) -> Row:
    """What became of the calls after WARM_S."""
    counted = [call for call in calls if call.at_s >= WARM_S]
    found = Counter(call.outcome for call in counted)
    answered = [call.took_s for call in counted if call.outcome == "ok"]
    in_time = [took_s for took_s in answered if took_s <= DEADLINE_MS / 1e3]
    refused = sorted(call.took_s for call in counted if call.outcome == "refused")
    row: Row = {
        "callers": callers,
        "answered": len(answered),
        "answered_late": len(answered) - len(in_time),
        "refused": found["refused"],
        "deadline_exceeded": found["late"],
        "lost": found["lost"],
        "wrong": wrong,
        "in_time_per_s": rounded(len(in_time) / (seconds - WARM_S), 4),
        "refused_p99_ms": rounded(1e3 * refused[int(0.99 * len(refused))], 3) if refused else None,
    }
    print(row, flush=True)
    return row


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on answers that came late, and on how many came in time beside what is served when nobody is refused."""
    harness.require("ray", "2.60.0")
    seconds, rounds = (WARM_S + 2, 1) if quick else (SECONDS + WARM_S, ROUNDS)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-o")))
        models = Models(folder)
        reference = Reference(models)
        stack.callback(reference.close)
        fleet = stack.enter_context(Fleet(models.files, 2, folder / "ray"))
        ask(fleet.url, FEW, seconds, 99)  # what is compiled, read and connected first
        every: list[tuple[int, list[Call]]] = []
        for number in range(rounds):
            for callers in (FEW, MANY):
                quiet.wait()
                every.append((callers, ask(fleet.url, callers, seconds, number)))
        rows += [row_of(callers, calls, seconds, len(reference.wrong(calls))) for callers, calls in every]
    return Measured(claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    few, many = ([row for row in rows if row["callers"] == each] for each in (FEW, MANY))
    shares = [float(b["in_time_per_s"]) / float(a["in_time_per_s"]) for a, b in zip(few, many, strict=True)]
    answered = sum(int(row["answered"]) for row in many)
    late = sum(int(row["answered_late"]) for row in many)
    return [
        Claim(
            "fleet-overload-in-time",
            rounded(statistics.median(shares), 3),
            "",
            "higher",
            0.9,
            interval=tuple(rounded(end, 3) for end in interval_of_median(shares)),  # type: ignore[arg-type]
        ),
        Claim("fleet-overload-late", rounded(late / max(1, answered), 3), "", "lower", 0.01),
        Claim("fleet-overload-wrong", sum(int(row["wrong"]) for row in rows), "answers", "lower", 0.0),
        Claim("fleet-overload-lost", sum(int(row["lost"]) for row in rows), "requests", "lower", 0.0),
    ]


if __name__ == "__main__":
    sources = [Path(__file__), Path(str(fault_world.__file__))]
    harness.main(Benchmark("fleet_overload", measure, ("numpy",), sources))
