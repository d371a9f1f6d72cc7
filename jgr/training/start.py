# SPDX-License-Identifier: Apache-2.0
"""Begin a decoder's training from the weights of another: train.start.

The layers are taken as they are. The vocabularies may differ: a token's row is that of the token of the same name, and
a token that is new keeps the row that was drawn for it. The tokens of semantic ids are matched by the items that both
catalogs know, for their names mean nothing: `jgr ids` names them by a count or a cluster of its own data.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgr.catalog import Catalog, load_catalog
from jgr.config import ConfigError, TrainConfig, UserError
from jgr.models import checkpoint
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.prompt import Tokenizer
from jgr.training.trainer import Begin, as_drawn

_log = logging.getLogger(__name__)


def begin_from(train: TrainConfig, model: DecoderConfig, tokenizer: Tokenizer, catalog: Catalog) -> Begin:
    """What a training of `model` begins with: train.start, a model folder, or the drawn parameters where that is empty.

    Raises ConfigError where there is no such folder or a damaged one, for a model that is no decoder, has other sizes
    than `model` (but for vocabulary and longest position), shares no token with it, or whose semantic ids of the same
    items are others, and for train.out itself.
    """
    if not train.start:
        return as_drawn
    folder = Path(train.start)
    if not folder.is_dir():
        raise ConfigError(f"train.start: {folder}: no such model folder")
    if folder.resolve() == Path(train.out).resolve():
        raise ConfigError(f"train.start: {folder} is train.out too, which would be replaced")
    try:
        found, weights = checkpoint.load(folder)
        its = Tokenizer.from_file(folder / "tokenizer.json").vocabulary
        items = folder / "catalog.jsonl"  # a model that was not trained here has none
        names = {name: name for name in tokenizer.vocabulary}
        if items.exists():
            names = _its_names(tokenizer, catalog, load_catalog(items))
    except UserError as error:
        raise ConfigError(f"train.start: {error}") from None
    if not isinstance(found, DecoderConfig) or not isinstance(weights, DecoderParams):
        raise ConfigError(f"train.start: {folder} is not a decoder")
    if replace(found, vocab_size=model.vocab_size, max_position=model.max_position) != model:
        raise ConfigError(f"train.start: {folder} is of other sizes: {found}, not {model}")
    if max(its.values()) >= found.vocab_size:
        raise ConfigError(
            f"train.start: {folder}: its tokenizer.json has tokens that its weights have no row for"
        )
    shared = [(tokenizer.vocabulary[name], its[other]) for name, other in names.items() if other in its]
    if not shared:
        raise ConfigError(f"train.start: {folder} has no token of this dataset's")
    _log.info("beginning from %s: %d of %d tokens are known", folder, len(shared), len(tokenizer.vocabulary))
    to, of = np.array(shared, np.int32).T

    def rows(drawn: jax.Array | None, known: jax.Array | None) -> jax.Array | None:
        if drawn is None or known is None:
            return None
        return jnp.asarray(drawn).at[to].set(jnp.asarray(known)[of])

    def begin(drawn: DecoderParams) -> DecoderParams:
        return replace(weights, embed=rows(drawn.embed, weights.embed), head=rows(drawn.head, weights.head))

    return begin


def _its_names(tokenizer: Tokenizer, catalog: Catalog, its: Catalog) -> dict[str, str]:
    """By token what the other catalog calls it. ConfigError where a symbol would be two of the other's, or a part of
    semantic ids of another depth."""
    if its.depth != catalog.depth:
        raise ConfigError(f"its semantic ids have {its.depth} symbols, this dataset's {catalog.depth}")
    mine, others = (_symbols(which) for which in (catalog, its))
    own: dict[str, str] = {}
    for item_id in filter(
        others.__contains__, mine
    ):  # in the catalog's order, which the error's item depends on
        for symbol, other in zip(mine[item_id], others[item_id], strict=True):
            if own.setdefault(symbol, other) != other:
                raise ConfigError(
                    f"the semantic ids are others: {symbol!r} stands for its {own[symbol]!r} and {other!r} (item "
                    f"{item_id!r})"
                )
    symbols = {symbol for of in mine.values() for symbol in of}
    return own | {name: name for name in tokenizer.vocabulary if name not in symbols}


def _symbols(catalog: Catalog) -> dict[str, list[str]]:
    """Every item's symbols."""
    return {
        item_id: [str(catalog.symbols[level][code]) for level, code in enumerate(codes)]
        for item_id, codes in zip(catalog.item_ids, catalog.codes.tolist(), strict=True)
    }
