# SPDX-License-Identifier: Apache-2.0
"""The datasets that a configuration can name: a catalog and its users' interactions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.config import DataConfig
from jgr.data.interactions import DataError, Interactions, leave_one_out, load_minionerec
from jgr.data.prepared import CATALOG, load_prepared
from jgr.data.shop import make_shop


@dataclass(frozen=True, eq=False)
class Dataset:
    """A catalog, and the interactions of users with its items."""

    catalog: Catalog
    interactions: Interactions


def load_dataset(config: DataConfig) -> Dataset:
    """Read or make the dataset that `config` names. Raises CatalogError or DataError, naming file and line."""
    if config.kind == "shop":
        shop = make_shop()
        return Dataset(shop.catalog, leave_one_out(shop.sequences, shop.names))
    if not config.path:
        raise DataError("data.path: the folder of the dataset is not set")
    folder = Path(config.path)
    if config.kind == "prepared":
        return _load_prepared(folder)
    index = next(
        (folder / name for name in ("index.json", "index.json.gz") if (folder / name).exists()), None
    )
    if index is None:
        raise DataError(f"{folder}: has no index.json or index.json.gz (data.path)")
    catalog = load_catalog(index)
    return Dataset(catalog, load_minionerec(folder, catalog))


def _load_prepared(folder: Path) -> Dataset:
    prepared = load_prepared(folder)
    path = folder / CATALOG
    if not path.exists():
        raise DataError(f"{folder}: its items have no semantic ids yet: run jgr ids")
    catalog = load_catalog(path)
    if catalog.item_ids != prepared.item_ids:
        raise DataError(f"{path}: holds other items than the dataset, or in another order; run jgr ids again")
    return Dataset(catalog, prepared.interactions)
