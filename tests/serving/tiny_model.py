# SPDX-License-Identifier: Apache-2.0
"""A model folder with random weights over a catalog of 60 items, small enough to compile in a test."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, override
from jgr.models import checkpoint, decoder, params
from jgr.prompt.tokens import semantic_id_tokenizer
from jgr.training.generator import decoder_config

N_ITEMS = 60
MAX_ITEMS = 10
SETTINGS = (
    "model.name=tiny",
    "model.compilation_cache=",
    "prompt.max_items=10",
    "beam.width=8",
    "profiles.batch=1,4",
    "profiles.tokens=16,32",
    "profiles.widths=16",
    "profiles.candidates=16",
    "server.port=0",
)


def make_catalog(depth: int = 3) -> Catalog:
    """60 items on `depth` levels of 5; some share an id."""
    codes = np.random.default_rng(0).integers(0, 5, (N_ITEMS, depth))
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    return Catalog.build(
        [f"B{i:03}" for i in range(N_ITEMS)], symbols, [{"title": f"Item {i}"} for i in range(N_ITEMS)]
    )


def shuffled_catalog() -> Catalog:
    """The items of `make_catalog`, each under another semantic id."""
    catalog = make_catalog()
    symbols = [
        [names[code] for names, code in zip(catalog.symbols, row, strict=True)] for row in catalog.codes
    ]
    return Catalog.build(catalog.item_ids, symbols[7:] + symbols[:7], catalog.metadata)


def as_lines(catalog: Catalog) -> bytes:
    """The catalog as it is uploaded."""
    symbols = [
        [names[code] for names, code in zip(catalog.symbols, row, strict=True)] for row in catalog.codes
    ]
    lines = [
        json.dumps({"item_id": item, "semantic_id": path, "metadata": metadata})
        for item, path, metadata in zip(catalog.item_ids, symbols, catalog.metadata, strict=True)
    ]
    return "\n".join(lines).encode()


def make_folder(folder: Path, seed: int = 1, layers: int = 2, depth: int = 3, head_dim: int = 16) -> Config:
    """A model folder with random weights, and the configuration that serves it."""
    sizes = (f"train.layers={layers}", "train.hidden=32", f"train.head_dim={head_dim}")
    config = override(Config(), *SETTINGS, f"model.path={folder}", *sizes)
    catalog = make_catalog(depth)
    tokenizer = semantic_id_tokenizer(catalog)
    cfg = decoder_config(config.train, tokenizer.vocab_size, 64)
    drawn = jax.tree.map(lambda x: x * 3, params.initialize(decoder.spec(cfg), jax.random.key(seed)))

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, drawn, write_beside)
    return config
