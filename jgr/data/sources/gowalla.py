# SPDX-License-Identifier: Apache-2.0
"""Gowalla-style lists, as NGCF and LightGCN use them: `train.txt`, `valid.txt` and `test.txt`, lines of
`user item item ...`. A user's items are a set: their order means nothing, so only the given split is possible. Where
there is no `valid.txt`, as in LightGCN's own files, some items of `train.txt` must be moved to one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jgr.data.prepared import SPLITS
from jgr.data.sources.records import Counts, Raw, Source, find, user_lines


def _open(folder: Path) -> Raw:
    paths = (find(folder, f"{split}.txt") for split in SPLITS)
    return Raw(tuple((p, partial(user_lines, split=split)) for split, p in enumerate(paths)))


SOURCES = {
    "gowalla": Source(_open, splits=("given",), raw=Counts(29_858, 40_981, 1_027_370), unordered=True),
}
