# SPDX-License-Identifier: Apache-2.0
"""Which claims are stale: their benchmark's code has changed since they were measured (benchmarks/sources.py).

    python -m tools.claims             lists the stale ones, those that take the shortest time first
    python -m tools.claims --record    writes benchmarks/sources.json: after a change of what counts as a source

A result holds the digest of its sources, by what counted as one when it was measured. benchmarks/sources.json holds
that of the same commit by today's count, computed from git; where it has none, the result's own is what is compared.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import sources
from benchmarks.harness import read_result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ELSEWHERE = {name: RESULTS / name for name in ("avx2", "amx")}
"""Results of machines whose processors have no wider vectors than AVX2, and of those that have AMX."""
FOLDERS = RESULTS, *ELSEWHERE.values()
OLDER = ROOT / "benchmarks" / "sources.json"
STALE = "**stale**"
CHANGED_SHOWN = 3

Result = Mapping[str, Any]


class Minutes(NamedTuple):
    """How long a benchmark takes. at_most: whether that is known as a bound alone. minutes: None: not known at all."""

    minutes: float | None
    at_most: bool

    def __str__(self) -> str:
        if self.minutes is None:
            return "?"
        return f"{'<= ' if self.at_most else ''}{self.minutes:.0f}"


def source(result: Result) -> str:
    """The benchmark's file, from the root of the project."""
    return f"benchmarks/{result['benchmark']}.py"


@functools.lru_cache(maxsize=1)
def _now() -> sources.Code:
    return sources.checked_out()


@functools.lru_cache(maxsize=1)
def _older() -> Mapping[str, str]:
    found: dict[str, str] = json.loads(OLDER.read_text(encoding="utf-8")) if OLDER.exists() else {}
    return found


@functools.cache
def _digest_now(path: str) -> str:
    return _now().digest(path)


def stale(result: Result) -> bool:
    """Whether the code has changed since, or files differed from their commit when the result was measured."""
    if "benchmark" not in result:
        return False
    key = f"{result['benchmark']} {result['measured_commit']}"
    known = _older().get(key) or result.get("sources")
    return bool(result.get("dirty")) or known != _digest_now(source(result))


def minutes(result: Result, results: Sequence[Result]) -> Minutes:
    """What measuring it took. Of results without that: at most the time since the one before it on the same commit."""
    if "seconds" in result:
        return Minutes(result["seconds"] / 60, False)
    at = datetime.fromisoformat(result["date"])
    same = [r for r in results if r["measured_commit"] == result["measured_commit"]]
    before = [found for r in same if (found := datetime.fromisoformat(r["date"])) < at]
    return Minutes((at - max(before)).total_seconds() / 60, True) if before else Minutes(None, False)


def changed(result: Result) -> str:
    """What of the code it may run has changed, in a few words; empty where git does not have its commit."""
    try:
        before = sources.at_commit(result["measured_commit"]).contents(source(result))
    except (subprocess.CalledProcessError, OSError):
        return ""
    now = _now().contents(source(result))
    paths = sorted({now[digest] for digest in now.keys() - before.keys()})
    paths = paths or sorted({before[digest] for digest in before.keys() - now.keys()})
    more = len(paths) - CHANGED_SHOWN
    return ", ".join(paths[:CHANGED_SHOWN]) + (f" and {more} more" if more > 0 else "")


def listing(results: Sequence[Result]) -> list[str]:
    """Lines of text: how many are stale, and each stale result with its minutes, claims, command and what changed."""
    found = [result for result in results if stale(result)]
    claims = sum(len(result["claims"]) for result in found)
    of_all = sum(len(result["claims"]) for result in results)
    lines = [f"{len(found)} of {len(results)} results are stale, with {claims} of {of_all} claims"]
    timed = [(minutes(result, results), result) for result in found]
    timed.sort(key=lambda pair: (pair[0].minutes is None, pair[0].minutes or 0.0, pair[1]["benchmark"]))
    if timed:
        lines.append(f"{'minutes':>8}  {'claims':>6}  {'missed':>6}  command")
    for took, result in timed:
        missed = sum(not claim["holds"] for claim in result["claims"])
        why = "files differed from the commit" if result.get("dirty") else changed(result)
        lines.append(
            f"{took!s:>8}  {len(result['claims']):>6}  {missed:>6}  {result['command']}"
            + (f"  ({why})" if why else "")
        )
    return lines


def record(results: Sequence[Result]) -> dict[str, str]:
    """The digest of the sources of each result whose commit git has."""
    found = {}
    for result in results:
        if "benchmark" not in result:
            continue
        try:
            code = sources.at_commit(result["measured_commit"])
        except subprocess.CalledProcessError:
            continue
        found[f"{result['benchmark']} {result['measured_commit']}"] = code.digest(source(result))
    return found


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["--record"]):
        print("claims: usage: python -m tools.claims [--record]", file=sys.stderr)
        return 2
    results = [read_result(path) for folder in FOLDERS for path in sorted(folder.glob("*.json"))]
    if arguments:
        OLDER.write_text(json.dumps(record(results), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    print("\n".join(listing(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
