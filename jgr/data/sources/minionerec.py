# SPDX-License-Identifier: Apache-2.0
"""Reads MiniOneRec's format: `index.json` with semantic ids, `item.json` with metadata, and rows of history and target
in `train.inter`, `valid.inter`, `test.inter`. The rows are the examples, so histories stay as long as they are given.
"""

from __future__ import annotations

from pathlib import Path

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.data.interactions import Interactions, load_minionerec
from jgr.data.sources.records import Counts, ReadyDataset, Source, find, find_optional


def _open(folder: Path) -> ReadyDataset:
    index, item = find(folder, "index.json"), find_optional(folder, "item.json")
    rows = [find(folder, f"{split}.inter") for split in ("train", "valid", "test")]

    def load() -> tuple[Catalog, Interactions]:
        catalog = load_catalog(index)
        return catalog, load_minionerec(folder, catalog)

    return ReadyDataset((index, *([item] if item else []), *rows), load)


SOURCES = {
    "minionerec": Source(_open, splits=("given",)),
    "amazon-industrial": Source(_open, splits=("given",), raw=Counts(7_694, 3_686, 53_018)),
}
