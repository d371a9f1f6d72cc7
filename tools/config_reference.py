# SPDX-License-Identifier: Apache-2.0
"""Writes the reference of docs/configuration.md from the comments beside the fields, so that there is no second text.

    python -m tools.config_reference

It stands between two marker comments; a test fails when it differs from what the sources say.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jgr.config import Config
from jgr.config.reference import markdown, reference
from tools.markdown import MarkerError, replace_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- fields: written by python -m tools.config_reference -->"
END = "<!-- end of fields -->"


def page(text: str) -> str:
    """The page's text with every field as the sources have it. MarkerError."""
    return replace_table(text, markdown(reference(Config)), BEGIN, END)


def main() -> int:
    try:
        PAGE.write_text(page(PAGE.read_text()))
    except (OSError, MarkerError) as error:
        print(f"config_reference: {PAGE.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
