# SPDX-License-Identifier: Apache-2.0
"""The model and the catalog that jgr and its peers are given, and how their answers are compared.

A random Qwen3 of 16 M parameters (4 layers, hidden 256, vocabulary 25,000, untied) or of 51 M (8 layers, hidden 512),
exported once to a Hugging Face folder that everyone loads: weights, a tokenizer with a word for each token, and the
catalog as arrays. 12,000 items with three codes of 256 each.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import decoder, hf, params
from jgr.models.decoder import DecoderConfig

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

MODEL = DecoderConfig(
    family="qwen3",
    vocab_size=25_000,
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=64,
    mlp=704,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
    max_position=2304,
)
LARGER = replace(MODEL, hidden=512, layers=8, heads=8, kv_heads=8, mlp=1408)
PROFILES = (512, 1024, 2048)
"""The prompt lengths that jgr has programs for; a prompt is padded to the next one, which no peer does."""
N_ITEMS, DEPTH, LEVEL_SIZE = 12_000, 3, 256
FIRST_TOKEN = 24_000  # of the first level; text would come before
LOGIT_SCALE = 8.0  # makes the spread of logits about that of a trained model, 2.6, instead of 0.3

MAX_SCORE_ERROR = 1e-4
TIE = 2e-4
"""Beams whose scores are closer than this may change places."""


class Beams(NamedTuple):
    """sequences: [m, depth] int32 tokens, best first; scores: [m] float32, their log-likelihoods."""

    sequences: Int32
    scores: Float32


class Agreement(NamedTuple):
    """same: whether the sequences and their order are the same, apart from ties. max_score_error: over the beams in
    order; infinite where their number differs. common: how many of our sequences the other search has as well.
    returned: how many sequences the other search has."""

    same: bool
    max_score_error: float
    common: int
    returned: int


def agreement(ours: Beams, theirs: Beams) -> Agreement:
    """Compare two beam searches; positions may differ only within a run of scores that are closer than TIE.

    A part of the last run may lie beyond the beam width, so there only the scores must agree.
    """
    a, b = _names(ours.sequences), _names(theirs.sequences)
    common = len(np.intersect1d(a, b))
    if len(a) != len(b):
        return Agreement(False, float("inf"), common, len(b))
    error = float(np.abs(ours.scores - theirs.scores).max())
    ends = np.flatnonzero(-np.diff(theirs.scores) >= TIE) + 1
    runs = zip(np.split(a, ends)[:-1], np.split(b, ends)[:-1], strict=True)
    same = error <= MAX_SCORE_ERROR and all(set(x.tolist()) == set(y.tolist()) for x, y in runs)
    return Agreement(same, error, common, len(b))


def _names(sequences: Int32) -> Int64:
    """One number for each sequence of tokens."""
    names = np.zeros(len(sequences), np.int64)
    for column in sequences.T.astype(np.int64):
        names = names << 20 | column
    return names


class Catalog(NamedTuple):
    """level_tokens: [256] int32, by level; sequences: [leaves, depth] int32, the tokens of each leaf."""

    tree: PrefixTree
    level_tokens: tuple[Int32, ...]
    sequences: Int32


def make_catalog(rng: np.random.Generator) -> Catalog:
    flat = rng.choice(LEVEL_SIZE**DEPTH, N_ITEMS, replace=False)
    codes = np.stack(np.unravel_index(flat, (LEVEL_SIZE,) * DEPTH), axis=1).astype(np.int32)
    tree = PrefixTree.build(codes)
    starts = FIRST_TOKEN + LEVEL_SIZE * np.arange(DEPTH)
    level_tokens = tuple(np.arange(start, start + LEVEL_SIZE, dtype=np.int32) for start in starts)
    columns = [level_tokens[lv][tree.codes[lv][tree.paths[:, lv]]] for lv in range(DEPTH)]
    return Catalog(tree, level_tokens, np.stack(columns, axis=1))


def draw_prompt(catalog: Catalog, length: int, rng: np.random.Generator) -> Int32:
    """The tokens of items drawn at random."""
    items = catalog.sequences[rng.integers(0, N_ITEMS, -(-length // DEPTH))]
    return items.ravel()[:length]


def profile(length: int) -> int:
    """The length of the program that takes a prompt."""
    return min(tokens for tokens in PROFILES if tokens >= length)


def export(folder: Path, catalog: Catalog, model: DecoderConfig = MODEL) -> None:
    """Write the model, its tokenizer and the catalog (catalog.npz)."""
    drawn: decoder.DecoderParams = params.initialize(decoder.spec(model), jax.random.key(0))
    scale = LOGIT_SCALE * (MODEL.hidden / model.hidden) ** 0.5
    scaled = decoder.DecoderParams(drawn.embed, drawn.layers, drawn.norm, scale * drawn.head)
    hf.export(folder, model, scaled)
    _export_tokenizer(folder)
    arrays = {f"tokens_{level}": tokens for level, tokens in enumerate(catalog.level_tokens)}
    arrays |= {f"offsets_{level}": offsets for level, offsets in enumerate(catalog.tree.offsets)}
    arrays |= {f"codes_{level}": codes for level, codes in enumerate(catalog.tree.codes)}
    np.savez(folder / "catalog.npz", sequences=catalog.sequences, **arrays)  # type: ignore[arg-type]  # numpy's stub


def _export_tokenizer(folder: Path) -> None:
    """Token i is the word <w0000i>; prompts are given as tokens, words are for grammars."""
    words = {f"<w{token:05d}>": token for token in range(MODEL.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<w00001>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
