# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/ablations.md from jgr/ablation/mechanisms.py, the only place that knows them.

    python -m tools.ablation_table

It stands between two marker comments; a test fails when it differs from what the table in the code says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jgr.ablation.report import markdown
from tools.markdown import MarkerError, replace_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ablations.md"
BEGIN = "<!-- mechanisms: written by python -m tools.ablation_table -->"
END = "<!-- end of mechanisms -->"


def page(text: str) -> str:
    """The page's text with every mechanism as the code has it. MarkerError."""
    return replace_table(text, markdown(), BEGIN, END)


def main() -> int:
    try:
        PAGE.write_text(page(PAGE.read_text()))
    except (OSError, MarkerError) as error:
        print(f"ablation_table: {PAGE.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
