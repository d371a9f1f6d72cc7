# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README and docs/benchmarks.md from benchmarks/results, so that no figure is typed by hand.

    python -m tools.readme_table

README has the claims of `HEADLINES`, how many others there are and how many of all were missed; docs/benchmarks.md has
all, those of a second machine, why targets are missed (benchmarks/misses.py), and what the order of a prompt costs;
docs/fleet.md has what clients saw of each fault. Claims that are stale (tools/claims.py) are marked. Each table stands
between two marker comments; a test fails when it differs from what the result files and the code say.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import read_result
from benchmarks.misses import MISSES, missed_by
from benchmarks.titles import shown, unit
from tools.claims import ELSEWHERE, RESULTS, STALE, stale

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
RULES, OURS = "sequential rules", "jgr"
FUSION = f"{OURS} + {RULES}"
COUNTING = (RULES, "sequence-kNN", "item-kNN")
GENERATOR, SCORER = "generator", "scorer"
EARLIER = "†"
"""Behind a figure of the quality table that is stale."""


class Model(NamedTuple):
    """What the rows of a quality result are of. kind: GENERATOR or SCORER. name: empty where the kind says it."""

    data: str
    kind: str
    name: str = ""


MODELS: Mapping[str, Model] = {
    "beauty": Model("Amazon Beauty", GENERATOR),
    "beauty-given-ids": Model("Amazon Beauty", GENERATOR, "published ids"),
    "hstu-counting-beauty": Model("Amazon Beauty", SCORER, "HSTU"),
    "informed-beauty": Model("Amazon Beauty", SCORER, "HSTU with texts"),
    "informed-beauty_repeats": Model("Amazon Beauty", SCORER, "HSTU with texts and weights for the history"),
    "industrial": Model("Amazon Industrial", GENERATOR),
    "hstu-industrial": Model("Amazon Industrial", SCORER, "HSTU, tuned"),
    "hstu-counting-industrial": Model("Amazon Industrial", SCORER, "HSTU"),
    "informed-industrial": Model("Amazon Industrial", SCORER, "HSTU with texts"),
    "informed-industrial_repeats": Model(
        "Amazon Industrial", SCORER, "HSTU with texts and weights for the history"
    ),
    "beauty-own-code": Model("Amazon Beauty", GENERATOR, "a code for each item, with texts"),
    "beauty-text": Model("Amazon Beauty", GENERATOR, "with texts"),
    "industrial-own-code": Model("Amazon Industrial", GENERATOR, "a code for each item, with texts"),
    "industrial-text": Model("Amazon Industrial", GENERATOR, "with texts"),
    "sports-own-code": Model("Amazon Sports", GENERATOR, "a code for each item, with texts"),
    "hstu-counting-sports": Model("Amazon Sports", SCORER, "HSTU"),
    "informed-sports": Model("Amazon Sports", SCORER, "HSTU with texts"),
    "informed-sports_repeats": Model("Amazon Sports", SCORER, "HSTU with texts and weights for the history"),
    "informed-sports_near": Model("Amazon Sports", SCORER, "HSTU with texts and co-occurrence"),
    "hstu-counting-instruments": Model("Amazon Instruments", SCORER, "HSTU"),
    "hstu-counting-instruments_repeats": Model(
        "Amazon Instruments", SCORER, "HSTU with weights for the history"
    ),
    "ml1m": Model("MovieLens 1M", GENERATOR),
    "hstu-ml1m": Model("MovieLens 1M", SCORER, "HSTU"),
    "hstu-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU"),
    "hstu-wide-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU, wide"),
    "hstu-large-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU-large"),
    "hstu-large-long-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU-large, trained longer"),
    "hstu-ml1m-half": Model("MovieLens 1M, users with times", SCORER, "HSTU"),
    "hstu-ml1m-half-times": Model("MovieLens 1M, users with times", SCORER, "HSTU with times"),
}
"""What the names in quality results stand for."""
OTHER_CHOICE = ("-history-kept", "-history-left-out")

Result = Mapping[str, Any]


class MarkerError(ValueError):
    """A text that does not hold the two markers once each, in order."""


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
            if (claim["target"] == 0 and claim["holds"]) or (only is not None and claim["id"] not in only):
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
    return _markdown(rows)


def quality_table(results: Sequence[Result]) -> str:
    """HR@10 / NDCG@10 of every quality result: two rows for each dataset, with the history's items left out and not.

    Counting, SASRec as we train it, jgr's generators and scorers, the fusion of a scorer with rules, and what others
    have published with the same choice. Below the table stands where rules that only count are better than every model.
    """
    cells: dict[tuple[str, bool], dict[str, dict[str, str]]] = {}
    figures: dict[tuple[str, bool], dict[str, list[tuple[float, float]]]] = {}

    def add(at: tuple[str, bool], column: str, name: str, pair: Sequence[float], old: bool) -> None:
        text = _pair(pair) + (EARLIER if old else "")
        known = cells.setdefault(at, {}).setdefault(column, {})
        if name not in known or known[name].endswith(EARLIER):
            known[name] = text
        figures.setdefault(at, {}).setdefault(column, []).append((pair[0], pair[1]))

    quality = [result for result in results if str(result.get("benchmark")).startswith("quality")]
    chosen: dict[str, bool] = {}
    for result in quality:
        for row in result["rows"]:
            if "of" in row and "exclude_history" in row:
                if chosen.setdefault(row["of"], row["exclude_history"]) != row["exclude_history"]:
                    raise ValueError(
                        f"{row['of']}: the results do not agree whether the history's items are left out"
                    )
    for result in quality:
        old = stale(result)
        for row in result["rows"]:
            name = str(row.get("of"))
            for end in OTHER_CHOICE:
                name = name.removesuffix(end)
            if name not in MODELS or row["of"] not in chosen:
                continue
            model, at = MODELS[name], (MODELS[name].data, chosen[row["of"]])
            for who, pair in row.get("published", {}).items():
                add(at, "published", who, pair, False)
            if "hr@10" not in row:
                continue
            pair = row["hr@10"], row["ndcg@10"]
            method = row["method"]
            if method == OURS:
                add(at, model.kind, model.name, pair, old)
            elif method == FUSION:
                add(at, FUSION, model.name, pair, old)
            elif method in (*COUNTING, "SASRec"):
                add(at, method, "", pair, old)
            if "other_convention" in row and method in COUNTING:
                other = row["other_convention"]
                add((at[0], not at[1]), method, "", (other["hr@10"], other["ndcg@10"]), old)
    shown = (*COUNTING, "SASRec", GENERATOR, SCORER, FUSION, "published")
    words = {"SASRec": "SASRec, trained here", GENERATOR: "jgr: generator", SCORER: "jgr: scorer"}
    words[FUSION] = "jgr: scorer + rules"
    rows = [("dataset", "items of the history", *(words.get(column, column) for column in shown))]
    below = []
    for data, left_out in sorted(cells, key=lambda at: (at[0], not at[1])):
        found = cells[data, left_out]
        told = ("; ".join(f"{who} {text}".strip() for who, text in found.get(c, {}).items()) for c in shown)
        rows.append((data, "left out" if left_out else "allowed", *told))
        numbers = figures[data, left_out]
        models = [pair for kind in (GENERATOR, SCORER) for pair in numbers.get(kind, [])]
        if models and any(
            best > max(pair[i] for pair in models)
            for i, best in enumerate(numbers.get(RULES, [(0.0, 0.0)])[-1])
        ):
            below.append(f"{data} with the history's items {'left out' if left_out else 'allowed'}")
    noted = f"Sequential rules, which only count, beat every model of jgr in HR@10 or NDCG@10 on: {'; '.join(below)}."
    notes = [textwrap.fill(noted, 120)] if below else []
    if any(
        EARLIER in text for found in cells.values() for column in found.values() for text in column.values()
    ):
        notes.append(f"{EARLIER} measured on earlier code (`make claims`).")
    return "\n\n".join([_markdown(rows), *notes])


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


def _target(claim: Mapping[str, Any]) -> str:
    return f"{'≥' if claim['better'] == 'higher' else '≤'} {claim['target']:,.4g}"


def _value(claim: Mapping[str, Any]) -> str:
    return f"{claim['value']:,.4g} {unit(claim)}".rstrip()


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
    old = [claim for result in results if stale(result) for claim in result["claims"]]
    summary = (
        "Rows marked stale were measured before some of the code that they depend on changed. "
        f"All {len(claims)} claims, {missed} of them missed and {len(old)} stale: `docs/benchmarks.md`; "
        "`make claims` lists what is to be measured again, the cheapest first."
    )
    text = replace_table(text, f"{table(results, HEADLINES)}\n\n{textwrap.fill(summary, 120)}")
    return replace_table(text, quality_table(results), QUALITY_BEGIN, QUALITY_END)


def every_claim(text: str, results: Sequence[Result]) -> str:
    """The text of docs/benchmarks.md with its table. MarkerError."""
    text = replace_table(text, table(results))
    for name, folder in ELSEWHERE.items():
        begin, end = f"<!-- {name}: written by python -m tools.readme_table -->", f"<!-- end of {name} -->"
        text = replace_table(text, table(load_results(folder)), begin, end)
    text = replace_table(text, misses(results), MISSES_BEGIN, MISSES_END)
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
