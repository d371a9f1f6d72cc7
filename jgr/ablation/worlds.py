# SPDX-License-Identifier: Apache-2.0
"""What is served in an ablation: a model, its items and its users.

The one idea: without a model of one's own, the items and users are those of the synthetic shop (`jgr demo`), and the
weights are drawn. Counts do not depend on weights, times hardly; the answers of variants are compared with each other,
for which drawn weights do as well as learnt ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import tokenizers

from jgr.ablation.system import System
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, ConfigError, DataConfig, TrainConfig, override
from jgr.data.datasets import Dataset, load_dataset
from jgr.data.interactions import leave_one_out
from jgr.data.shop import make_shop
from jgr.features.addresses import open_store
from jgr.features.extraction import derive, extract
from jgr.features.schema import Schema
from jgr.models import checkpoint, decoder, params, scorers
from jgr.models.climber import ClimberConfig, Feature
from jgr.models.hstu import HstuConfig
from jgr.models.manifest import folder_config, learnt_catalog
from jgr.models.retrievers import items_digest
from jgr.prompt.tokens import Tokenizer, semantic_id_tokenizer
from jgr.serving.versions.loading import is_scorer

SPREAD = 3.0
"""By what drawn weights are multiplied, so that scores differ."""
CATEGORY_ROWS = 512
"""Rows of the table of a feature's categories."""
STORE = "features.sqlite"


@dataclass(frozen=True)
class Size:
    """How large a shop and its model are. users: of the shop. items_per_line: 5 to 24; there are 96 lines.

    model: the widths of its weights.
    """

    users: int
    items_per_line: int
    model: TrainConfig


DEFAULT = Size(
    600, 21, TrainConfig(hidden=96, layers=2, heads=4, kv_heads=2, head_dim=24, mlp=256)
)  # as the demo's model
TINY = Size(60, 5, TrainConfig(hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=16))
"""For a look at the counts, and for tests."""


@dataclass(frozen=True)
class World:
    """What is served. config: the base of all variants, which names the model's folder."""

    config: Config
    dataset: Dataset


def made(system: System, folder: Path, size: Size = DEFAULT) -> World:
    """Write a model with drawn weights to `folder`, which is empty, over the items of a synthetic shop."""
    return _MAKERS[system.shop](system, folder, size)


def given(system: System, model: str, data: DataConfig | None = None) -> World:
    """A model folder of somebody's own, and the dataset that it learnt from, or `data`.

    Raises UserError where the model is of another sort than the system, or the dataset cannot be read.
    """
    config = folder_config(model)
    sort = "scorer" if is_scorer(Path(config.model.path)) else "decoder"
    wanted = "scorer" if system.scores else "decoder"
    if sort != wanted:
        raise ConfigError(f"--model: {model} is a {sort}; {system.name} takes a {wanted}")
    if data is not None:
        return World(config, load_dataset(data, learnt_catalog(config)))
    return World(config, load_dataset(config.data, learnt_catalog(config)))


def _ranker(system: System, folder: Path, size: Size) -> World:
    """Items are words of their titles and a token of their own, which scores them (BAT-1)."""
    shop = make_shop(n_users=size.users, items_per_line=size.items_per_line)
    tokens = [(f"<i_{row}>",) for row in range(shop.catalog.n_items)]
    catalog = Catalog.build(shop.catalog.item_ids, tokens, shop.catalog.metadata)
    _save_decoder(folder, size.model, catalog, _title_tokenizer(catalog))
    config = override(
        Config(),
        f"model.path={folder}",
        *system.base,
    )
    return World(config, Dataset(catalog, leave_one_out(shop.sequences, shop.names)))


def _generator(system: System, folder: Path, size: Size) -> World:
    shop = make_shop(n_users=size.users, items_per_line=size.items_per_line)
    _save_decoder(folder, size.model, shop.catalog, semantic_id_tokenizer(shop.catalog))
    config = override(
        Config(),
        f"model.path={folder}",
        *system.base,
    )
    return World(config, Dataset(shop.catalog, leave_one_out(shop.sequences, shop.names)))


def _scorer(system: System, folder: Path, size: Size) -> World:
    """A small Climber over the items' features, which lie in an SQLite store beside it, with its items' table in a file
    of its own."""
    shop = make_shop(n_users=size.users, items_per_line=size.items_per_line)
    catalog, train = shop.catalog, size.model
    schema = derive(catalog.metadata)
    cfg = ClimberConfig(
        n_items=catalog.n_items,
        max_items=40,
        blocks=2,
        layers=train.layers,
        hidden=train.hidden,
        heads=train.heads,
        mlp=train.mlp,
        tasks=("click", "buy"),
        items=items_digest(catalog.item_ids),
        timed=False,
        features=tuple(
            Feature(of.name, of.width, CATEGORY_ROWS * (of.dtype == "int32")) for of in schema.features
        ),
    )
    drawn = params.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0))
    scorers.save(
        folder, cfg, drawn, lambda folder: save_catalog(catalog, folder / "catalog.jsonl"), "float32"
    )
    _fill_store(folder / STORE, schema, catalog)
    config = override(
        Config(),
        f"model.path={folder}",
        f"features.store={folder / STORE}",
        *system.base,
    )
    return World(config, Dataset(catalog, leave_one_out(shop.sequences, shop.names)))


def _history(system: System, folder: Path, size: Size) -> World:
    """A small HSTU, whose kept users do not depend on the time, with its items' table in a file of its own."""
    shop = make_shop(n_users=size.users, items_per_line=size.items_per_line)
    catalog, train = shop.catalog, size.model
    cfg = HstuConfig.of(
        replace(train, max_items=40, times=False), catalog.n_items, items_digest(catalog.item_ids)
    )
    drawn = params.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0))
    drawn = jax.tree.map(lambda x: x * SPREAD, drawn)
    scorers.save(
        folder, cfg, drawn, lambda folder: save_catalog(catalog, folder / "catalog.jsonl"), "float32"
    )
    config = override(Config(), f"model.path={folder}", *system.base)
    return World(config, Dataset(catalog, leave_one_out(shop.sequences, shop.names)))


_MAKERS: Mapping[str, Callable[[System, Path, Size], World]] = {
    "ranker": _ranker,
    "generator": _generator,
    "scorer": _scorer,
    "history": _history,
}


def _title_tokenizer(catalog: Catalog) -> Tokenizer:
    """The catalog's tokens, and the words of the items' titles."""
    words = sorted({word for of in catalog.metadata for word in str(of["title"]).split()})
    names = ["<pad>", "<bos>", "<sid>", "<unk>", *map(str, catalog.symbols[0])]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate([*names, *words])}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return Tokenizer(inner)


def _save_decoder(folder: Path, train: TrainConfig, catalog: Catalog, tokenizer: Tokenizer) -> None:
    from jgr.training.generator import (
        decoder_config,
    )  # with jgr[train], which a model of one's own does not need

    cfg = decoder_config(train, tokenizer.vocab_size, 1100)
    drawn = jax.tree.map(lambda x: x * SPREAD, params.initialize(decoder.spec(cfg), jax.random.key(0)))

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, drawn, write_beside)


def _fill_store(path: Path, schema: Schema, catalog: Catalog) -> None:
    store = open_store(str(path), 60.0, create=True)
    store.put_many(catalog.item_ids, extract(schema, catalog.item_ids, catalog.metadata))
    store.set_schema(str(schema))
    store.close()
