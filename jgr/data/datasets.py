# SPDX-License-Identifier: Apache-2.0
"""The datasets that a configuration can name: a catalog and its users' interactions."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.config import DataConfig
from jgr.data.interactions import DataError, Interactions, leave_one_out, load_minionerec
from jgr.data.prepared import ITEMS, catalog_names, catalog_path, load_prepared
from jgr.data.shop import make_shop

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A catalog, and the interactions of users with its items."""

    catalog: Catalog
    interactions: Interactions

    def digest(self) -> str:
        """The first 16 hex digits of a sha256 over all that is learnt and validated on: equal data have equal ones."""
        data = self.interactions
        found = hashlib.sha256(f"{self.catalog.version} {data.actions}".encode())
        arrays = list(vars(data.sequences).values())
        for split in (data.train, data.valid, data.test):
            arrays += [*vars(split.histories).values(), split.targets, split.users, split.target_times]
        for array in arrays:
            if array is None:
                found.update(b"none")
            else:
                found.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:16]


def load_dataset(config: DataConfig, own: Catalog | None = None) -> Dataset:
    """Read or make the dataset that `config` names. Raises CatalogError or DataError, naming file and line.

    own: the catalog of a model, which takes the place of a prepared dataset's where it holds the same items.
    """
    if config.kind == "shop":
        if config.path:
            raise DataError("data.path is set, which data.kind=shop does not read; take data.kind=prepared")
        shop = make_shop()
        return Dataset(shop.catalog, leave_one_out(shop.sequences, shop.names))
    if not config.path:
        raise DataError("data.path: the folder of the dataset is not set")
    folder = Path(config.path)
    if config.kind == "prepared":
        return _load_prepared(folder, config.catalog, own)
    index = next(
        (folder / name for name in ("index.json", "index.json.gz") if (folder / name).exists()), None
    )
    if index is None:
        raise DataError(f"{folder}: has no index.json or index.json.gz (data.path)")
    catalog = load_catalog(index)
    return Dataset(catalog, load_minionerec(folder, catalog))


def _load_prepared(folder: Path, name: str, own: Catalog | None) -> Dataset:
    prepared = load_prepared(folder)
    if own is not None and own.item_ids == prepared.item_ids:
        return Dataset(own, prepared.interactions)
    path = catalog_path(folder, name)
    if not path.exists():
        raise DataError(_no_catalog(folder, name))
    catalog = load_catalog(path)
    if catalog.item_ids != prepared.item_ids:
        raise DataError(f"{path}: holds other items than the dataset, or in another order; run jgr ids again")
    if any(ours != theirs for ours, theirs in zip(catalog.metadata, prepared.metadata, strict=True)):
        _log.warning(
            "%s: describes items otherwise than %s; run jgr ids again to take what is new",
            path,
            folder / ITEMS,
        )
    return Dataset(catalog, prepared.interactions)


def _no_catalog(folder: Path, name: str) -> str:
    others = catalog_names(folder)
    if not others:
        return f"{folder}: its items have no semantic ids yet: run jgr ids"
    known = ", ".join(other or "one without a name" for other in others)
    wanted = f"named {name}" if name else "without a name"
    return f"{folder}: has no catalog {wanted} (data.catalog); it has {known}"
