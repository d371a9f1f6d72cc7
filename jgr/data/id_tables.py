# SPDX-License-Identifier: Apache-2.0
"""Reads published semantic ids from a table: a line for each item, a column for each way to make ids.

item_id<TAB>rqvae<TAB>letter
1<TAB>114-32-79-183<TAB>171-42-207-0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jgr.config import UserError
from jgr.files import read_lines

MAX_CODE = 1 << 24
_CODES = re.compile(r"[0-9]{1,8}(-[0-9]{1,8})*")


class IdTableError(UserError):
    """A table of semantic ids that cannot be used; the message names the file and the line."""


def read_id_table(path: Path, column: str, item_ids: Sequence[str]) -> npt.NDArray[np.int32]:
    """Read the codes of every item, [n, depth] int32, in the order of item_ids. column: the name of the ids' column.

    Lines of items that are not in item_ids are skipped. Raises IdTableError for a missing column, a malformed line, and
    an item that occurs twice, has no id, or has an id of another depth.
    """
    rows = {item_id: row for row, item_id in enumerate(item_ids)}
    codes: list[tuple[int, ...] | None] = [None] * len(item_ids)
    at, width, depth = 0, 0, 0
    for number, line in read_lines(path, IdTableError):
        try:
            fields = line.decode("utf-8").split("\t")
        except UnicodeDecodeError:
            raise IdTableError(f"{path}:{number}: is not UTF-8") from None
        if number == 1:
            at, width = _column(path, fields, column), len(fields)
            continue
        if len(fields) != width:
            raise IdTableError(f"{path}:{number}: has {len(fields)} fields, the header has {width}")
        row, text = rows.get(fields[0]), fields[at]
        if row is None:
            continue
        if codes[row] is not None:
            raise IdTableError(f"{path}:{number}: item {fields[0]!r} stands there twice")
        found = tuple(map(int, text.split("-"))) if _CODES.fullmatch(text) else ()
        depth = depth or len(found)
        if not found or len(found) != depth or max(found) >= MAX_CODE:
            raise IdTableError(
                f"{path}:{number}: {column} must be {depth or 'some'} codes as in 12-7-200, found {text!r}"
            )
        codes[row] = found
    missing = [item_id for item_id, code in zip(item_ids, codes, strict=True) if code is None]
    if missing:
        raise IdTableError(
            f"{path}: has no id for {len(missing)} items of the dataset, {missing[0]!r} among them"
        )
    return np.array(codes, np.int32)


def _column(path: Path, header: list[str], column: str) -> int:
    if header[0] != "item_id":
        raise IdTableError(f"{path}:1: the first column must be item_id, not {header[0]!r}")
    if column not in header[1:]:
        raise IdTableError(f"{path}: has no column {column!r}; it has {', '.join(header[1:])}")
    return header.index(column)
