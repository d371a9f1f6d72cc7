# SPDX-License-Identifier: Apache-2.0
"""Tables as text: cells in columns, in parts where a terminal's line is too short for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

GAP = 2
"""Blanks between two columns."""

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, right: bool = True) -> list[str]:
    """Lines of columns as wide as their widest cell; the first one flush left, and where not `right` the others too."""
    widths = _widths(rows)
    return [
        (" " * GAP)
        .join(
            cell.rjust(width) if at and right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]


def parts(rows: Rows, width: int | None) -> Iterator[Rows]:
    """The table in tables of so many characters a line, each with the first column and as many others as fit, at least
    one; None: the whole table."""
    if width is None:
        yield rows
        return
    first, *others = _widths(rows)
    columns: list[int] = []
    taken = first
    for at, other in enumerate(others, 1):
        if columns and taken + GAP + other > width:
            yield _with(rows, columns)
            columns, taken = [], first
        columns.append(at)
        taken += GAP + other
    yield _with(rows, columns)


def _with(rows: Rows, columns: Sequence[int]) -> Rows:
    return [[row[0], *(row[at] for at in columns)] for row in rows]


def _widths(rows: Rows) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
