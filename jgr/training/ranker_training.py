# SPDX-License-Identifier: Apache-2.0
"""Train a ranker, in the layouts of train.layouts: those of `jgr.training.ranker`, or plain order, where rank.method
says whether it answers by the candidates' own tokens or by letters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.models import checkpoint, decoder
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.model_files import ModelFiles
from jgr.prompt.layouts import CAUSAL
from jgr.prompt.tokens import PromptBuilder
from jgr.training import letter_ranker, plain_ranker, ranker
from jgr.training.generator import decoder_config
from jgr.training.letter_ranker import LetterText, Targets
from jgr.training.plain_ranker import PlainText
from jgr.training.progress import NDCG, RECALL
from jgr.training.run import Progress, train_to_best
from jgr.training.start import begin_from
from jgr.training.windows import Windows


def train_ranker(
    config: Config,
    dataset: Dataset,
    progress: Progress = lambda done, total, status: None,
    validate: Callable[[DecoderConfig, DecoderParams], float] | None = None,
) -> Path:
    """Train on the dataset's training sequences and write train.out. For the arguments see `train_generator`."""
    train, catalog = config.train, dataset.catalog
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    if not 1 <= train.negatives < catalog.n_items:
        raise ConfigError(
            f"train.negatives must be 1 to {catalog.n_items - 1} for a ranker, not {train.negatives}"
        )
    checkpoint.require_writable(Path(train.out))
    tokenizer = ranker.ranker_tokenizer(config, catalog)
    plain, letters = train.layouts == CAUSAL.name, letter_ranker.is_asked(config)
    if train.compute != "float32" and not letters:
        raise ConfigError("train.compute: only a ranker that learns letters takes another type than float32")
    for name in ("lookups", "retrieved"):
        if getattr(train, name) and not letters:
            raise ConfigError(f"train.{name}: only a ranker that learns letters has it")
    if train.skip_events and letters:
        raise ConfigError("train.skip_events: a ranker that learns letters takes whole histories")
    parts = letter_ranker if letters else plain_ranker if plain else ranker
    asked = parts.prompt_text(config, tokenizer, catalog)
    text = asked.plain if isinstance(asked, LetterText) else asked
    # Training needs positions for max_items; the server for its longest prompt with its suffix and candidates.
    served = PromptBuilder(config.prompt, tokenizer, catalog).max_tokens
    follow = config.rank.item_span + len(text.instruction)
    longest = max(len(text.prefix) + train.max_items, served) + follow
    if plain:  # there the candidates stand one behind the other
        longest = max(longest, max(config.rank.tokens) + follow)
    model = decoder_config(train, tokenizer.vocab_size, longest)

    scores_of = ranker.retriever_scores(train, catalog) if train.retriever else None
    weights = ranker.negative_weights(config, dataset, scores_of)
    if isinstance(asked, LetterText):
        retrieved = scores_of if train.retrieved else None
        loss = letter_ranker.letter_loss(model, asked, weights, train, retrieved)
    elif isinstance(asked, PlainText):
        loss = plain_ranker.ranking_loss(model, asked, weights, train)
    else:
        loss = ranker.ranking_loss(model, asked, weights, train)
    sequences = dataset.interactions.sequences
    # Negatives are drawn by it, so a run does not go on with one that was trained anew in the same folder.
    retriever = {"retriever": ModelFiles(Path(train.retriever)).weights()[:16]} if train.retriever else {}

    def save(params: DecoderParams, write_beside: Callable[[Path], None]) -> None:
        def write_all(folder: Path) -> None:
            tokenizer.save(folder / "tokenizer.json")
            write_beside(folder)

        checkpoint.save(Path(train.out), model, params, write_all)

    return train_to_best(
        config,
        catalog,
        decoder.spec(model),
        loss,
        Targets(sequences, train) if letters else Windows(sequences, train),
        described={
            "prompt": asdict(config.prompt),
            "rank": asdict(config.rank),
            "catalog_version": catalog.version,
            **retriever,
        },
        validate=None if validate is None else lambda params: validate(model, params),
        progress=progress,
        save=save,
        metric=NDCG if letters else RECALL,
        begin=begin_from(train, model, tokenizer, catalog),
    )
