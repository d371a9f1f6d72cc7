# SPDX-License-Identifier: Apache-2.0
"""The datasets that a configuration can name: a catalog and its users' interactions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jgr.catalog import Catalog, load_catalog
from jgr.config import DataConfig
from jgr.data.interactions import DataError, Interactions, leave_one_out, load_minionerec
from jgr.data.shop import make_shop


@dataclass(frozen=True, eq=False)
class Dataset:
    """A catalog and what its users did."""

    catalog: Catalog
    interactions: Interactions


def load_dataset(config: DataConfig) -> Dataset:
    """Read or make the dataset that `config` names. CatalogError or DataError names the file and line."""
    if config.kind == "shop":
        shop = make_shop()
        return Dataset(shop.catalog, leave_one_out(shop.sequences, shop.names))
    if not config.path:
        raise DataError("data.path: the folder of the dataset is not set")
    folder = Path(config.path)
    index = next(
        (folder / name for name in ("index.json", "index.json.gz") if (folder / name).exists()), None
    )
    if index is None:
        raise DataError(f"{folder}: has no index.json or index.json.gz (data.path)")
    catalog = load_catalog(index)
    return Dataset(catalog, load_minionerec(folder, catalog))
