# SPDX-License-Identifier: Apache-2.0
"""Writes README's table of measurements from benchmarks/results, so that no figure is typed by hand.

    python -m tools.readme_table

The table stands between two marker comments; a test fails when it differs from what the result files say.
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

Result = Mapping[str, Any]


class MarkerError(ValueError):
    """A text that does not hold the two markers once each, in order."""


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The result files, in order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(results: Sequence[Result]) -> str:
    """A Markdown table, a row for each claim."""
    rows = [("what", "measured", "target", "machine, commit", "command")]
    for result in results:
        machine, measured_commit = result["machine"], result["measured_commit"]
        where = f"{machine['cpu']}, {machine['cores']} cores, " + (
            measured_commit[:8] if measured_commit else "not committed"
        )
        for claim in result["claims"]:
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
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def replace_table(text: str, new: str) -> str:
    """`text` with `new` between its markers. MarkerError where they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise MarkerError(f"must hold {BEGIN!r} and {END!r}, once each and in this order")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def main() -> int:
    try:
        text = README.read_text()
        README.write_text(replace_table(text, table(load_results())))
    except (OSError, MarkerError) as error:
        print(f"readme_table: {README.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
