# SPDX-License-Identifier: Apache-2.0
"""Gowalla-style lists, as NGCF and LightGCN use them: `train.txt`, `valid.txt` (if there) and `test.txt`, lines of
`user item item ...`. A user's items are a set: their order means nothing, so only the given split is possible.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jgr.data.sources.records import Counts, Raw, Source, find, find_optional, user_lines


def _open(folder: Path) -> Raw:
    paths = (find(folder, "train.txt"), find_optional(folder, "valid.txt"), find(folder, "test.txt"))
    return Raw(tuple((p, partial(user_lines, split=split)) for split, p in enumerate(paths) if p is not None))


SOURCES = {
    "gowalla": Source(_open, splits=("given",), raw=Counts(29_858, 40_981, 1_027_370), unordered=True),
}
