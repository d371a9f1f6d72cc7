# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of every file in benchmarks/results, and shows them in docs/pictures.md.

    python -m tools.pictures          draws what is missing or stale
    python -m tools.pictures --all    draws every one

A picture carries a digest of what it was drawn from (benchmarks/pictures.py); a test fails where one is missing, stale
or too large.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pictures
from benchmarks.harness import read_result
from tools.markdown import MarkerError, replace_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "pictures.md"
BEGIN = "<!-- pictures: written by python -m tools.pictures -->"
END = "<!-- end of pictures -->"


def stale(folder: Path = RESULTS) -> list[Path]:
    """The result files whose picture is missing, or of another result, in order of their names."""
    found = []
    for path in sorted(folder.glob("*.json")):
        picture = path.with_suffix(".png")
        wanted = pictures.digest(json.loads(path.read_text()))
        if not picture.exists() or pictures.drawn_from(picture) != wanted:
            found.append(path)
    return found


def page(text: str, folder: Path = RESULTS) -> str:
    """The page's text with a section for each result file. MarkerError."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        result = read_result(path)
        missed = sum(not claim["holds"] for claim in result["claims"])
        told = f"{len(result['claims'])} claims, {missed} missed" if result["claims"] else "no claims"
        parts += [
            f"## {result['benchmark']}",
            f"`{result['command']}`: {told}; {result['machine']['cpu']}, {result['machine']['cores']} cores.",
            f"![{result['benchmark']}](../benchmarks/results/{path.stem}.png)",
        ]
    return replace_table(text, "\n\n".join(["", *parts, ""]), BEGIN, END)


def main(arguments: Sequence[str]) -> int:
    every = sorted(RESULTS.glob("*.json"))
    if arguments not in ([], ["--all"]):
        print("pictures: usage: python -m tools.pictures [--all]", file=sys.stderr)
        return 2
    for path in every if arguments else stale():
        result = json.loads(path.read_text())
        picture = path.with_suffix(".png")
        pictures.draw(result, picture, pictures.own_plot(result["benchmark"]))
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")
    try:
        PAGE.write_text(page(PAGE.read_text()))
    except (OSError, MarkerError) as error:
        print(f"pictures: {PAGE.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
