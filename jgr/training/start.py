# SPDX-License-Identifier: Apache-2.0
"""Begin a decoder's training from the weights of another: train.start.

The layers are taken as they are. The vocabularies may differ: a token's row is that of the token of the same name, and
a token that is new keeps the row that was drawn for it. The tokens of semantic ids are matched by the items that both
catalogs know, for their names mean nothing: `jgr ids` names them by a count or a cluster of its own data.
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
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.prompt.tokens import Tokenizer
from jgr.training.trainer import Begin, as_drawn

_log = logging.getLogger(__name__)


def begin_from(train: TrainConfig, model: DecoderConfig, tokenizer: Tokenizer, catalog: Catalog) -> Begin:
    """What a training of `model` begins with: train.start, a model folder, or the drawn parameters where that is empty.

    Raises ConfigError where there is no such folder or a damaged one, for a model that is no decoder, has other sizes
    than `model` (but for vocabulary and longest position), shares no token or item with it, or whose semantic ids of
    the same items are others, and for train.out and what lies in it.
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
        items = folder / "catalog.jsonl"  # a model that was not trained here has none
        symbols = _same_symbols(folder, catalog, load_catalog(items)) if items.exists() else {}
        shared = _same_rows(folder, tokenizer, its, symbols)
    except UserError as error:
        raise ConfigError(f"train.start: {error}") from None
    except OSError as error:
        raise ConfigError(f"train.start: {folder}: {error.strerror}") from None
    if not isinstance(found, DecoderConfig) or not isinstance(weights, DecoderParams):
        raise ConfigError(f"train.start: {folder} is not a decoder")
    if replace(found, vocab_size=model.vocab_size, max_position=model.max_position) != model:
        raise ConfigError(f"train.start: {folder} is of other sizes: {found}, not {model}")
    if max(*its.vocabulary.values(), *shared.values()) >= found.vocab_size:
        raise ConfigError(f"train.start: {folder}: it has tokens that its weights have no row for")
    _log.info("beginning from %s: %d of %d tokens are known", folder, len(shared), len(tokenizer.vocabulary))
    to, of = np.array(list(shared.items()), np.int32).T

    def rows(drawn: jax.Array | None, known: jax.Array | None) -> jax.Array | None:
        if drawn is None or known is None:
            return None
        return jnp.asarray(drawn).at[to].set(jnp.asarray(known)[of])

    def begin(drawn: DecoderParams) -> DecoderParams:
        return replace(weights, embed=rows(drawn.embed, weights.embed), head=rows(drawn.head, weights.head))

    return begin


def _same_symbols(folder: Path, catalog: Catalog, its: Catalog) -> dict[Symbol, Symbol | None]:
    """By symbol of our semantic ids what the other catalog calls it, None for one that it lacks. ConfigError where it
    would be two of the other's, the semantic ids are of another depth, or no item is in both."""
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
    """By row of ours the other's of the same token: of the same name, but for semantic ids, whose `symbols` are known.
    ConfigError where nothing is shared, or a catalog's symbol is no token of its tokenizer."""

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
    """Every item's symbols."""
    return {
        item_id: [catalog.symbols[level][code] for level, code in enumerate(codes)]
        for item_id, codes in zip(catalog.item_ids, catalog.codes.tolist(), strict=True)
    }
