# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README and docs/benchmarks.md from benchmarks/results, so that no figure is typed by hand.

    python -m tools.readme_table

README has the claims of `HEADLINES`, how many others there are and how many of all were missed; docs/benchmarks.md
has all, and what the order of a prompt costs; docs/fleet.md has what clients saw of each fault. Each table stands
between two marker comments; a test fails when it differs from what the result files say.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.titles import shown, unit

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EVERY_CLAIM = ROOT / "docs" / "benchmarks.md"
FLEET = ROOT / "docs" / "fleet.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- measured: written by python -m tools.readme_table -->"
END = "<!-- end of measured -->"
QUALITY_BEGIN = "<!-- quality: written by python -m tools.readme_table -->"
QUALITY_END = "<!-- end of quality -->"
ORDER_BEGIN = "<!-- order: written by python -m tools.readme_table -->"
ORDER_END = "<!-- end of order -->"
FAULTS_BEGIN = "<!-- faults: written by python -m tools.readme_table -->"
FAULTS_END = "<!-- end of faults -->"
ORDER_METRICS = ("recall@5", "mrr@5", "ndcg@5", "recall@10", "mrr@10", "ndcg@10")
HEADLINES = (
    "time-of-transformers-over-jgr-unconstrained-prompt-512-beam-128",
    "time-of-vllm-over-jgr-unconstrained-prompt-512-beam-128",
    "least-time-of-any-peer-over-jgr",
    "time-of-beams-as-sequences-over-staged-beam-512-prompt-1024",
    "time-constrained-over-unconstrained-at-every-catalog-size",
    "prefill-time-over-best-peer-prompt-1024-batch-1",
    "prefill-time-over-best-peer-prompt-1024-batch-8",
    "null-engine-rank-throughput-16-connections",
    "null-engine-rank-p50-overhead-1-connection",
)
RULES, OURS = "sequential rules", "jgr"
METHODS = ("popularity", "item-kNN", "Markov chain", RULES, "sequence-kNN", "SASRec", OURS)
FUSION = f"{OURS} + {RULES}"

Result = Mapping[str, Any]


class MarkerError(ValueError):
    """A text that does not hold the two markers once each, in order."""


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The result files, in order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(results: Sequence[Result], only: Sequence[str] | None = None) -> str:
    """A Markdown table, a row for each claim, or for those of `only`; benchmarks/titles.py has their words.

    That nothing was wrong is a row only where it does not hold.
    """
    rows = [("what was measured", "measured", "better", "target", "machine, commit", "command")]
    for result in results:
        machine, measured_commit = result["machine"], result["measured_commit"]
        where = f"{machine['cpu']}, {machine['cores']} cores, " + (
            measured_commit[:8] if measured_commit else "not committed"
        )
        for claim in result["claims"]:
            if (claim["target"] == 0 and claim["holds"]) or (only is not None and claim["id"] not in only):
                continue
            target = f"{'≥' if claim['better'] == 'higher' else '≤'} {claim['target']:,.4g}"
            rows.append(
                (
                    shown(claim),
                    f"{claim['value']:,.4g} {unit(claim)}".rstrip(),
                    claim["better"],
                    target if claim["holds"] else f"{target}, **missed**",
                    where,
                    f"`{result['command']}`",
                )
            )
    return _markdown(rows)


def quality_table(results: Sequence[Result]) -> str:
    """HR@10 / NDCG@10 of every quality result: a row for each dataset, our methods, and what others have published.

    A row says whether the items of the history are left out of all its rankings. Below the table stands where rules
    that only count are better than the model.
    """
    left_out = "history's items left out"
    rows = [
        ("test split", left_out, *(f"{method}, ours" for method in METHODS[:-1]), OURS, FUSION, "published")
    ]
    below: list[str] = []
    for name, parts in _quality_rows(results).items():
        ours = {part["method"]: (part["hr@10"], part["ndcg@10"]) for part in parts if "hr@10" in part}
        published = next(part["published"] for part in parts if "published" in part)
        others = "; ".join(f"{method} {_pair(figures)}" for method, figures in published.items())
        excluded = {part["exclude_history"] for part in parts if "exclude_history" in part}
        if len(excluded) != 1:
            raise ValueError(f"{name}: the results do not agree whether the history's items are left out")
        found = (_pair(ours[method]) if method in ours else "" for method in (*METHODS, FUSION))
        words = name.replace("-", " ")
        rows.append((words, "yes" if excluded.pop() else "no", *found, others))
        if RULES in ours and any(a > b for a, b in zip(ours[RULES], ours[OURS], strict=True)):
            below.append(words)
    noted = f"Sequential rules, which only count, beat jgr in HR@10 or NDCG@10 on: {', '.join(below)}."
    return "\n\n".join([_markdown(rows), *([textwrap.fill(noted, 120)] if below else [])])


def _quality_rows(results: Sequence[Result]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each quality result by what they are of, with those that other quality results have of it."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        for row in result["rows"] if str(result.get("benchmark")).startswith("quality") else ():
            if "of" in row:
                by_name.setdefault(row["of"], []).append(row)
    return {name: rows for name, rows in by_name.items() if any("published" in row for row in rows)}


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
    return _markdown(rows)


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
    return _markdown(rows)


def _pair(figures: Sequence[float]) -> str:
    return " / ".join(f"{figure:.4f}".removeprefix("0") for figure in figures)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def replace_table(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with `new` between two markers. MarkerError where they are not there."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in before + after:
        raise MarkerError(f"must hold {begin!r} and {end!r}, once each and in this order")
    return f"{before}{begin}\n{new}\n{end}{after}"


def readme(text: str, results: Sequence[Result]) -> str:
    """README's text with both tables as the results have them. MarkerError."""
    claims = [claim for result in results for claim in result["claims"]]
    missed = sum(not claim["holds"] for claim in claims)
    summary = f"All {len(claims)} claims, {missed} of them missed: `docs/benchmarks.md`."
    text = replace_table(text, f"{table(results, HEADLINES)}\n\n{summary}")
    return replace_table(text, quality_table(results), QUALITY_BEGIN, QUALITY_END)


def every_claim(text: str, results: Sequence[Result]) -> str:
    """The text of docs/benchmarks.md with its table. MarkerError."""
    text = replace_table(text, table(results))
    return replace_table(text, order_table(results), ORDER_BEGIN, ORDER_END)


def fleet(text: str, results: Sequence[Result]) -> str:
    """The text of docs/fleet.md with its table. MarkerError."""
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
