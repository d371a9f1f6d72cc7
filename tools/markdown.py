# SPDX-License-Identifier: Apache-2.0
"""Markdown that programs write: tables, and texts of which a part between two marker comments is written anew."""

from __future__ import annotations

from collections.abc import Sequence


class MarkerError(ValueError):
    """A text that does not hold the two markers once each, in order."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of these rows, the first of which is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def replace_table(text: str, new: str, begin: str, end: str) -> str:
    """`text` with `new` between two markers. MarkerError where they are not there."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in before + after:
        raise MarkerError(f"must hold {begin!r} and {end!r}, once each and in this order")
    return f"{before}{begin}\n{new}\n{end}{after}"
