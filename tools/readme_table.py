# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README and docs/benchmarks.md from benchmarks/results, so that no figure is typed by hand.

    python -m tools.readme_table

README has the claims of `HEADLINES`, how many others there are and how many of all were missed, and the best of each
kind of recommender (tools/quality_table.py); docs/benchmarks.md has all, those of a second machine, why targets are
missed (benchmarks/misses.py), every recommender, and what the order of a prompt costs;
docs/fleet.md has what clients saw of each fault. Claims that are stale (tools/claims.py) are marked. Each table stands
between two marker comments; a test fails when it differs from what the result files and the code say.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import read_result
from benchmarks.misses import MISSES, missed_by
from benchmarks.titles import shown, unit
from tools import markdown, quality_table
from tools.claims import ELSEWHERE, RESULTS, STALE, stale
from tools.markdown import MarkerError, replace_table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EVERY_CLAIM = ROOT / "docs" / "benchmarks.md"
FLEET = ROOT / "docs" / "fleet.md"
BEGIN = "<!-- measured: written by python -m tools.readme_table -->"
END = "<!-- end of measured -->"
QUALITY_BEGIN = "<!-- quality: written by python -m tools.readme_table -->"
QUALITY_END = "<!-- end of quality -->"
ORDER_BEGIN = "<!-- order: written by python -m tools.readme_table -->"
ORDER_END = "<!-- end of order -->"
FAULTS_BEGIN = "<!-- faults: written by python -m tools.readme_table -->"
FAULTS_END = "<!-- end of faults -->"
MISSES_BEGIN = "<!-- misses: written by python -m tools.readme_table -->"
MISSES_END = "<!-- end of misses -->"
ORDER_METRICS = ("recall@5", "mrr@5", "ndcg@5", "recall@10", "mrr@10", "ndcg@10")
HEADLINES = (
    "least-time-of-any-peer-over-jgr",
    "time-of-vllm-over-jgr-unconstrained-prompt-512-beam-128",
    "rate-over-vllm-at-least-common-p99-limit-beam-32",
    "prefill-time-over-best-peer-prompt-1024-batch-8",
    "h200-constrained-beam-256-prompt-5000-batch-8",
    "h200-pytorch-time-over-jgr-beam-256-prompt-5000-batch-8",
    "time-constrained-over-unconstrained-at-every-catalog-size",
    "goodput-share-of-industrial-over-http",
    "null-engine-rank-p50-overhead-1-connection",
    "memory-of-a-4b-model-prompt-1024-beam-512",
    "seconds-to-the-first-answer-cold-generator",
    "informed-industrial-test-hr@10-above-sequential-rules",
)
"""What a user asks first: time and rate beside other engines, what a catalog costs, goodput, memory, start, quality
beside counting. At most twelve, chosen whether they hold or not."""

Result = Mapping[str, Any]


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The result files, in order of their names."""
    return [read_result(path) for path in sorted(folder.glob("*.json"))]


def table(results: Sequence[Result], only: Sequence[str] | None = None) -> str:
    """A Markdown table, a row for each claim, or for those of `only`; benchmarks/titles.py has their words.

    That nothing was wrong is a row only where it does not hold. A stale claim is marked.
    """
    rows = [("what was measured", "measured", "better", "target", "machine, commit", "command")]
    for result in results:
        machine, measured_commit = result["machine"], result["measured_commit"]
        named = (machine["cpu"], machine.get("instructions"), f"{machine['cores']} cores")
        where = ", ".join(filter(None, (*named, measured_commit[:8] if measured_commit else "not committed")))
        where += f", {STALE}" if stale(result) else ""
        for claim in result["claims"]:
            if _is_clean(claim) or (only is not None and claim["id"] not in only):
                continue
            target = _target(claim)
            rows.append(
                (
                    shown(claim),
                    _value(claim),
                    claim["better"],
                    target if claim["holds"] else f"{target}, **missed**",
                    where,
                    f"`{result['command']}`",
                )
            )
    return markdown.table(rows)


def order_table(results: Sequence[Result]) -> str:
    """What benchmarks/bat_accuracy.py found: a row for each dataset and way of ranking."""
    rows = [("test split", "ranked by: training, prompt", *ORDER_METRICS, "tokens computed")]
    for result in results:
        for row in result["rows"] if result.get("benchmark") == "bat_accuracy" else ():
            if "computed_tokens_share" in row or row.get("method") == "retriever":
                computed = row.get("computed_tokens_share")
                figures = [f"{row[metric]:.4f}".removeprefix("0") for metric in ORDER_METRICS]
                rows.append(
                    (row["of"], row["method"], *figures, "" if computed is None else f"{computed:.0%}")
                )
    return markdown.table(rows)


def faults_table(results: Sequence[Result]) -> str:
    """What benchmarks/fleet_faults.py saw: a row for each fault, and why one has not run."""
    rows = [
        ("fault", "requests", "lost", "late", "refused", "wrong", "not in time from 2 s on", "whole after")
    ]
    for result in results:
        for row in result["rows"] if result.get("benchmark") == "fleet_faults" else ():
            if not row["ran"]:
                rows.append((row["fault"], f"not run: {row['why']}", *[""] * 6))
                continue
            whole_s = row["whole_s"]
            figures = [
                str(row[name]) for name in ("sent", "lost", "late", "refused", "wrong", "missed_later")
            ]
            whole = "never" if whole_s is None else f"{whole_s:.1f} s"
            rows.append((row["fault"] + (f"; {row['seen']}" if "seen" in row else ""), *figures, whole))
    return markdown.table(rows)


def misses(results: Sequence[Result]) -> str:
    """A Markdown list of the targets that are missed: the figures of each, and the reason."""
    lines = []
    for miss in MISSES:
        figures = [
            f"`{result['benchmark']}`: "
            + ", ".join(f"{claim['value']:,.4g} of {_target(claim)}" for claim in claims)
            for result in results
            if (claims := missed_by(miss, result["claims"]))
        ]
        if figures:
            lines.append(f"- **{miss.what}** ({'; '.join(figures)}). {miss.why}")
    return "\n".join(
        textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines
    )


def _is_clean(claim: Mapping[str, Any]) -> bool:
    """Whether a claim counts what is wrong, and nothing was."""
    return bool(claim["target"] == 0 and claim["holds"])


def _target(claim: Mapping[str, Any]) -> str:
    return f"{'≥' if claim['better'] == 'higher' else '≤'} {claim['target']:,.4g}"


def _value(claim: Mapping[str, Any]) -> str:
    interval = claim.get("interval")
    between = f" ({interval[0]:,.4g} to {interval[1]:,.4g})" if interval else ""
    return f"{claim['value']:,.4g}{between} {unit(claim)}".rstrip()


def readme(text: str, results: Sequence[Result]) -> str:
    """README's text with both tables as the results have them. Raises MarkerError."""
    claims = [claim for result in results for claim in result["claims"]]
    missed = sum(not claim["holds"] for claim in claims)
    old = [claim for result in results if stale(result) for claim in result["claims"]]
    summary = (
        "Where a value has an interval, all of it must reach the target. "
        "Rows marked stale were measured before some of the code that they depend on changed. "
        f"Of all {len(claims)} claims {missed} are missed and {len(old)} stale. `docs/benchmarks.md` has them, but for "
        f"the {sum(map(_is_clean, claims))} that count errors and found none, and others of more processors; "
        "`make claims` lists what is to be measured again, the cheapest first."
    )
    text = replace_table(text, f"{table(results, HEADLINES)}\n\n{textwrap.fill(summary, 120)}", BEGIN, END)
    return replace_table(text, quality_table.summary(results), QUALITY_BEGIN, QUALITY_END)


def every_claim(text: str, results: Sequence[Result]) -> str:
    """The text of docs/benchmarks.md with its tables. Raises MarkerError."""
    text = replace_table(text, table(results), BEGIN, END)
    for name, folder in ELSEWHERE.items():
        begin, end = f"<!-- {name}: written by python -m tools.readme_table -->", f"<!-- end of {name} -->"
        text = replace_table(text, table(load_results(folder)), begin, end)
    text = replace_table(text, misses(results), MISSES_BEGIN, MISSES_END)
    text = replace_table(text, quality_table.whole(results), QUALITY_BEGIN, QUALITY_END)
    return replace_table(text, order_table(results), ORDER_BEGIN, ORDER_END)


def fleet(text: str, results: Sequence[Result]) -> str:
    """The text of docs/fleet.md with its table. Raises MarkerError."""
    return replace_table(text, faults_table(results), FAULTS_BEGIN, FAULTS_END)


WRITTEN = ((README, readme), (EVERY_CLAIM, every_claim), (FLEET, fleet))


def main() -> int:
    for path, fill in WRITTEN:
        try:
            path.write_text(fill(path.read_text(), load_results()))
        except (OSError, MarkerError) as error:
            print(f"readme_table: {path.name}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
