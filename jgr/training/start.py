# SPDX-License-Identifier: Apache-2.0
"""Begin a decoder's training from the weights of another decoder: train.start.

The layers are taken as they are; a model of more layers has new ones above them. The vocabularies may differ: each
token takes the embedding row of the token with the same name, and a new token keeps its random row, as long as the
known ones are on average. Tokens of semantic ids are matched by the items that both catalogs have, since their names
have no meaning: `jgr ids` numbers the items or the clusters of its own data.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgr.catalog.catalog import Catalog, Symbol, load_catalog
from jgr.config import ConfigError, TrainConfig, UserError
from jgr.models import checkpoint
from jgr.models.decoder import DecoderConfig, DecoderParams, LayerParams
from jgr.prompt.tokens import Tokenizer
from jgr.training.trainer import Begin, as_drawn

_log = logging.getLogger(__name__)


def begin_from(train: TrainConfig, model: DecoderConfig, tokenizer: Tokenizer, catalog: Catalog) -> Begin:
    """The function that turns drawn parameters into those that a training of `model` begins with.

    If train.start is empty it changes nothing; otherwise it takes the weights of that model folder. Raises ConfigError
    if the folder is missing or damaged, is train.out or lies in it, is not a decoder's, has more layers or other sizes
    than `model` (vocabulary and longest position apart), shares no token or item with it, or groups the items into ids
    of its own.
    """
    if not train.start:
        return as_drawn
    folder = Path(train.start)
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such model folder")
        real, out = (Path(os.path.realpath(path)) for path in (folder, train.out))
        if out == real or out in real.parents:
            raise ConfigError(f"{folder} is train.out too, or lies in it, which will be replaced")
        found, weights = checkpoint.load(folder)
        its = Tokenizer.from_file(folder / "tokenizer.json")
        items = folder / "catalog.jsonl"  # only models that jgr trained have one
        symbols = _same_symbols(folder, catalog, load_catalog(items)) if items.exists() else {}
        shared = _same_rows(folder, tokenizer, its, symbols)
    except UserError as error:
        raise ConfigError(f"train.start: {error}") from None
    except OSError as error:
        raise ConfigError(f"train.start: {folder}: {error.strerror}") from None
    if not isinstance(found, DecoderConfig) or not isinstance(weights, DecoderParams):
        raise ConfigError(f"train.start: {folder} is not a decoder")
    alike = replace(found, vocab_size=model.vocab_size, max_position=model.max_position, layers=model.layers)
    if alike != model or found.layers > model.layers:
        raise ConfigError(f"train.start: {folder} is of other sizes: {found}, not {model}")
    if max(*its.vocabulary.values(), *shared.values()) >= found.vocab_size:
        raise ConfigError(f"train.start: {folder}: it has tokens that its weights have no row for")
    _log.info("beginning from %s: %d of %d tokens are known", folder, len(shared), len(tokenizer.vocabulary))
    to, of = np.array(list(shared.items()), np.int32).T

    def rows(drawn: jax.Array | None, known: jax.Array | None) -> jax.Array | None:
        if drawn is None or known is None:
            return None
        kept = jnp.asarray(known)[of]
        longer = jnp.sqrt((kept**2).mean() / (drawn**2).mean())
        return (drawn * longer).at[to].set(kept)

    def begin(drawn: DecoderParams) -> DecoderParams:
        layers = jax.tree.map(
            lambda new, known: jnp.asarray(new).at[: found.layers].set(known),
            _copying(drawn.layers, model),
            weights.layers,
        )
        return replace(
            weights,
            embed=rows(drawn.embed, weights.embed),
            layers=layers,
            head=rows(drawn.head, weights.head),
        )

    return begin


def _copying(layers: LayerParams, model: DecoderConfig) -> LayerParams:
    """The layers with keys projected as queries are, and the output as the values' transpose: each token looks for what
    is like it, and copies that (mimetic initialization, arXiv 2305.09828)."""
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    group = heads // kv_heads
    count, hidden, _ = layers.wq.shape
    wk = layers.wq.reshape(count, hidden, kv_heads, group, dim)[:, :, :, 0].reshape(count, hidden, -1)
    values = layers.wv.reshape(count, hidden, kv_heads, 1, dim)
    wo = jnp.broadcast_to(values / group, (count, hidden, kv_heads, group, dim)).reshape(count, hidden, -1)
    return replace(layers, wk=wk, wo=wo.swapaxes(1, 2))


def _same_symbols(folder: Path, catalog: Catalog, its: Catalog) -> dict[Symbol, Symbol | None]:
    """For each symbol of our semantic ids the other catalog's symbol for the same items, None if it has none.

    Raises ConfigError if one symbol would match two, the ids have another depth, or no item is in both catalogs.
    """
    if its.depth != catalog.depth:
        raise ConfigError(
            f"{folder}: its semantic ids have {its.depth} symbols, this dataset's {catalog.depth}"
        )
    mine, others = (_symbols(which) for which in (catalog, its))
    known = [item_id for item_id in mine if item_id in others]
    if not known:
        raise ConfigError(f"{folder}: none of this dataset's items is in its catalog.jsonl")
    same: dict[Symbol, Symbol] = {}
    for item_id in known:
        for symbol, other in zip(mine[item_id], others[item_id], strict=True):
            if same.setdefault(symbol, other) != other:
                raise ConfigError(
                    f"{folder}: its semantic ids are others: {symbol!r} stands for its {same[symbol]!r} and "
                    f"{other!r} (item {item_id!r})"
                )
    return {symbol: same.get(symbol) for of in mine.values() for symbol in of}


def _same_rows(
    folder: Path, tokenizer: Tokenizer, its: Tokenizer, symbols: Mapping[Symbol, Symbol | None]
) -> dict[int, int]:
    """For each row of our vocabulary the other's row for the same token: by `symbols` for semantic ids, else by name.

    Raises ConfigError if no token is shared, or a catalog's symbol is not a token of its tokenizer.
    """

    def row(symbol: Symbol, of: Tokenizer) -> int:
        found = symbol if isinstance(symbol, int) else of.vocabulary.get(symbol)
        if found is None:
            raise ConfigError(f"{folder}: {symbol!r} of the catalog.jsonl is not in the tokenizer.json")
        return found

    rows = {
        here: its.vocabulary[name] for name, here in tokenizer.vocabulary.items() if name in its.vocabulary
    }
    for symbol, other in symbols.items():
        here = row(symbol, tokenizer)
        if other is None:
            rows.pop(here, None)
        else:
            rows[here] = row(other, its)
    if not rows:
        raise ConfigError(f"{folder} has no token of this dataset's")
    return rows


def _symbols(catalog: Catalog) -> dict[str, list[Symbol]]:
    """The symbols of every item's semantic id, by item id."""
    return {
        item_id: [catalog.symbols[level][code] for level, code in enumerate(codes)]
        for item_id, codes in zip(catalog.item_ids, catalog.codes.tolist(), strict=True)
    }
