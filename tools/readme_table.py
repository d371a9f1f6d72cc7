# SPDX-License-Identifier: Apache-2.0
"""Writes README's tables of measurements and of quality from benchmarks/results, so that no figure is typed by hand.

    python -m tools.readme_table

Each table stands between two marker comments; a test fails when it differs from what the result files say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- measured: written by python -m tools.readme_table -->"
END = "<!-- end of measured -->"
QUALITY_BEGIN = "<!-- quality: written by python -m tools.readme_table -->"
QUALITY_END = "<!-- end of quality -->"
METHODS = ("popularity", "item-kNN", "SASRec", "jgr")

Result = Mapping[str, Any]


class MarkerError(ValueError):
    """A text that does not hold the two markers once each, in order."""


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The result files, in order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(results: Sequence[Result]) -> str:
    """A Markdown table, a row for each claim. That nothing was wrong is a row only where it does not hold."""
    rows = [("what", "measured", "target", "machine, commit", "command")]
    for result in results:
        machine, measured_commit = result["machine"], result["measured_commit"]
        where = f"{machine['cpu']}, {machine['cores']} cores, " + (
            measured_commit[:8] if measured_commit else "not committed"
        )
        for claim in result["claims"]:
            if claim["target"] == 0 and claim["holds"]:
                continue
            target = f"{'≥' if claim['better'] == 'higher' else '≤'} {claim['target']:,.4g}"
            rows.append(
                (
                    claim["id"].replace("-", " "),
                    f"{claim['value']:,.4g} {claim['unit']}".rstrip(),
                    target if claim["holds"] else f"{target}, **missed**",
                    where,
                    f"`{result['command']}`",
                )
            )
    return _markdown(rows)


def quality_table(results: Sequence[Result]) -> str:
    """HR@10 / NDCG@10 of every quality result: a row for each dataset, our methods, and what others have published."""
    rows = [("test split", *(f"{method}, ours" for method in METHODS[:-1]), METHODS[-1], "published")]
    for result in results:
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for row in result["rows"]:
            if "of" in row:  # those of benchmarks/quality.py
                by_name.setdefault(row["of"], []).append(row)
        for name, parts in by_name.items():
            ours = {part["method"]: (part["hr@10"], part["ndcg@10"]) for part in parts if "method" in part}
            published = next(part["published"] for part in parts if "published" in part)
            others = "; ".join(f"{method} {_pair(figures)}" for method, figures in published.items())
            rows.append((name.replace("-", " "), *(_pair(ours[method]) for method in METHODS), others))
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


def written(text: str, results: Sequence[Result]) -> str:
    """README's text with both tables as the results have them. MarkerError."""
    # A quality benchmark's claims are in its own table.
    text = replace_table(text, table([r for r in results if not any("of" in row for row in r["rows"])]))
    return replace_table(text, quality_table(results), QUALITY_BEGIN, QUALITY_END)


def main() -> int:
    try:
        text = README.read_text()
        README.write_text(written(text, load_results()))
    except (OSError, MarkerError) as error:
        print(f"readme_table: {README.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
