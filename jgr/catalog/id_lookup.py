# SPDX-License-Identifier: Apache-2.0
"""How the item ids of a request become rows: hundreds of them a request, on the event loop.

Three ways, the first that a catalog allows:

- ids that are all plain numbers, and not much larger than there are items, are read as numbers by one built-in call
  and are places in an array: no look-up waits for memory, as each one in a dictionary does;
- ids of a catalog in arrays are found by their hashes (jgr.catalog.text_table);
- others are looked up in a dictionary, and many at once in a large catalog by their hashes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jgr.catalog.text_table import ItemIds, RowOf, TextTable

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Find = Callable[[Sequence[str]], Int32]

FEW_IDS, FEW_ITEMS = 128, 1 << 15
"""So many ids, and any number in so small a catalog, are looked up in a dictionary, which waits for memory id by id."""
SPARSE = 16
"""Numbers that are at most so many times as large as there are items, or below FEW_ITEMS, are places in an array."""
DIGITS = 18
"""The longest numbers, of which an int64 holds all."""
ONE_BY_ONE = 8
"""So few ids are read one by one."""
_POWERS = 10 ** np.arange(1, DIGITS + 1, dtype=np.int64)


def finder(item_ids: Sequence[str]) -> Find:
    """The function from item ids to their rows, int32, -1 for an unknown id. item_ids: distinct, of all rows."""
    if isinstance(item_ids, ItemIds):
        return item_ids.find
    numbered = Numbers.of(item_ids)
    if numbered is not None:
        return numbered.find
    row_of = RowOf(zip(item_ids, range(len(item_ids)), strict=True))

    def look_up(asked: Sequence[str]) -> Int32:
        return np.fromiter(map(row_of.__getitem__, asked), np.int32, len(asked))

    if len(item_ids) <= FEW_ITEMS:
        return look_up
    arrays = in_arrays(item_ids)
    return lambda asked: arrays.find(asked) if len(asked) > FEW_IDS else look_up(asked)


def in_arrays(item_ids: Sequence[str]) -> ItemIds:
    """The ids as arrays."""
    return ItemIds(TextTable.of([item_id.encode("utf-8", "surrogatepass") for item_id in item_ids]))


class Numbers:
    """Item ids that are plain numbers. rows: [largest + 2] int32, the row of each number or -1, and -1 at the end."""

    def __init__(self, rows: Int32) -> None:
        self._rows, self._end = rows, len(rows) - 1

    @classmethod
    def of(cls, item_ids: Sequence[str]) -> Numbers | None:
        """None where an id is no plain number, or is too large."""
        numbers = plain_numbers(item_ids)
        if numbers is None or not len(numbers):
            return None
        end = int(numbers.max()) + 1
        if end > max(FEW_ITEMS, SPARSE * len(numbers)):
            return None
        rows = np.full(end + 1, -1, np.int32)
        rows[numbers] = np.arange(len(numbers), dtype=np.int32)
        return cls(rows)

    def find(self, asked: Sequence[str]) -> Int32:
        """The rows of the ids, [len(asked)] int32; -1 for an unknown id."""
        numbers = plain_numbers(asked) if len(asked) > ONE_BY_ONE else None
        if numbers is None:
            numbers = np.fromiter(map(self._number, asked), np.int64, len(asked))
        found: Int32 = self._rows.take(np.minimum(numbers, self._end))
        return found

    def _number(self, item_id: str) -> int:
        """The number that the text is; of a text that is none, the end."""
        plain = len(item_id) <= DIGITS and item_id.isascii() and item_id.isdigit()
        return int(item_id) if plain and (item_id[0] != "0" or item_id == "0") else self._end


def plain_numbers(texts: Sequence[str]) -> Int64 | None:
    """The numbers that texts are, [len(texts)] int64; None where one is no number of at most 18 ASCII digits that does
    not begin with a needless zero."""
    if not texts:
        return np.zeros(0, np.int64)
    joined = ",".join(texts)
    if not (joined.isascii() and all(texts)):
        return None
    digits = joined.encode().translate(None, b",")  # of bytes, `isdigit` is quicker
    if len(digits) + len(texts) - 1 != len(joined) or not digits.isdigit():  # or a text has a comma
        return None
    numbers = np.fromstring(joined, np.int64, sep=",")
    if int(numbers.max()) >= _POWERS[-1]:
        return None
    # A number with needless zeros has more digits than it needs.
    needed = len(numbers) + int(_POWERS.searchsorted(numbers, side="right").sum())
    return numbers if needed == len(digits) else None
