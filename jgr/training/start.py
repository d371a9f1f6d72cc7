# SPDX-License-Identifier: Apache-2.0
"""Begin a decoder's training from the weights of another: train.start.

The layers are taken as they are. The vocabularies may differ: a token's row is that of the token of the same name, and
a token that is new keeps the row that was drawn for it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgr.config import ConfigError
from jgr.models import checkpoint
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.params import CheckpointError
from jgr.prompt import Tokenizer
from jgr.training.trainer import Begin, as_drawn

_log = logging.getLogger(__name__)


def begin_from(start: str, model: DecoderConfig, tokenizer: Tokenizer) -> Begin:
    """What a training of `model` begins with; the drawn parameters where start is empty.

    start: a model folder. Raises CheckpointError or PromptError where there is none or a damaged one, ConfigError for a
    model that is no decoder, has other sizes than `model` (but for vocabulary and longest position), or shares no token
    with it.
    """
    if not start:
        return as_drawn
    folder = Path(start)
    if not folder.is_dir():
        raise CheckpointError(f"train.start: {folder}: no such model folder")
    found, weights = checkpoint.load(folder)
    if not isinstance(found, DecoderConfig) or not isinstance(weights, DecoderParams):
        raise ConfigError(f"train.start: {folder} is not a decoder")
    if replace(found, vocab_size=model.vocab_size, max_position=model.max_position) != model:
        raise ConfigError(f"train.start: {folder} is of other sizes: {found}, not {model}")
    its = Tokenizer.from_file(folder / "tokenizer.json").vocabulary
    shared = [(token, its[name]) for name, token in tokenizer.vocabulary.items() if name in its]
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
