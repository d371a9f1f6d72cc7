# SPDX-License-Identifier: Apache-2.0
"""Tables in files: what is read is what was written, and what is not the table that is needed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.models import table_file
from jgr.models.table_file import HEADER_BYTES, TableError, TableFile

ROWS = np.random.default_rng(3).standard_normal((50, 8), np.float32)


def write(path: Path, **changed: Any) -> Path:
    given: dict[str, Any] = {"width": 8, "dtype": "float32", "model": "m1"} | changed
    table_file.write(path, "items", [ROWS[:20], ROWS[20:]], **given)
    return path


def test_rows_are_those_that_were_written(tmp_path: Path) -> None:
    table = TableFile(write(tmp_path / "t"), name="items", rows=50, width=8, model="m1")
    np.testing.assert_array_equal(table.rows, ROWS)
    table.verify()
    assert table.header.row_bytes == 32 and table.header.held == 50


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_rows_of_16_bits_are_the_nearest(tmp_path: Path, dtype: str, error: float) -> None:
    rows = TableFile(write(tmp_path / "t", dtype=dtype)).rows.astype(np.float32)
    assert 0 < np.abs(rows / ROWS - 1).max() <= error


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"width": 16}, "is of another row width: 8, and 16 is needed"),
        ({"rows": 51}, "is of another number of rows: 50, and 51 is needed"),
        ({"model": "m2"}, "is of another model: 'm1', and 'm2' is needed"),
        ({"name": "users"}, "is of another table: 'items', and 'users' is needed"),
    ],
)
def test_another_table_is_refused(tmp_path: Path, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message):
        TableFile(write(tmp_path / "t"), **wanted)


def test_damage_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "t")
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "cut short: it has 5695 bytes, its header says 5696"),
        (whole + b"x", "too long"),
        (whole[:100], "is not a table of embeddings that jgr wrote, or is cut short"),
        (b"x" * len(whole), "is not a table of embeddings"),
        (whole[:8] + b"{" * (HEADER_BYTES - 8) + whole[HEADER_BYTES:], "damaged header"),
        (whole.replace(b'"held":50', b'"held":-1'), "damaged header"),
    ):
        path.write_bytes(content)
        with pytest.raises(TableError, match=message):
            TableFile(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TableError, match="its rows are not those that were written"):
        TableFile(path).verify()
    with pytest.raises(TableError, match="cannot be read"):
        TableFile(tmp_path / "none")
    with pytest.raises(ValueError, match="all finite in float16"):
        table_file.write(path, "items", [ROWS * 1e6], width=8, dtype="float16")
