# SPDX-License-Identifier: Apache-2.0
"""Recall on validation examples while a model trains: the served search, asked directly with the weights of the moment.

The search, the prompts and the order of items are those of the engine; there is no server and no batching in between.
For a model that learns from feedback, the figure is the area under the curve (AUC) instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.data.impressions import action_bits, requests
from jgr.data.interactions import Examples, Interactions
from jgr.evaluation.binary_metrics import auc
from jgr.evaluation.metrics import Hits, mean_all, rank_candidates
from jgr.models import beam, retrievers
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.generators import GeneratorConfig, GeneratorParams
from jgr.models.manifest import refuse_learnt_valid
from jgr.models.params import PyTree
from jgr.models.retrievers import RetrieverConfig, RetrieverParams
from jgr.models.scorers import ScorerConfig
from jgr.prompt.layouts import CAUSAL
from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens, semantic_id_tokenizer
from jgr.training import feedback, letter_ranker, plain_ranker, ranker
from jgr.training.progress import NDCG

METRIC = "recall@10"
TOP_K = 10
BATCH = 32  # prompts that are searched at once
RANKED, RANKED_TOGETHER = 100, 8  # candidates of a ranker's prompt, and prompts at once
WINDOWS = 64  # windows of impressions that are scored at once

Int32 = npt.NDArray[np.int32]
_log = logging.getLogger(__name__)


def validation_examples(config: Config, dataset: Dataset) -> Examples:
    """train.validation_examples of the validation split, drawn by train.seed. ConfigError where there is none."""
    examples = validation_split(dataset.interactions)
    count = min(config.train.validation_examples, len(examples))
    chosen = np.random.default_rng(config.train.seed).choice(len(examples), count, replace=False)
    return examples.select(np.sort(chosen))


def validation_split(interactions: Interactions) -> Examples:
    """The validation examples of a dataset. Raises ConfigError where there is none."""
    if not len(interactions.valid):
        raise ConfigError("train.evaluate_every: the dataset has no validation examples; set it to 0")
    return interactions.valid


def generator_recall(config: Config, dataset: Dataset) -> Callable[[GeneratorConfig, GeneratorParams], float]:
    """recall@10 of a generator that `train_generator` makes of this configuration and dataset."""
    catalog, examples = dataset.catalog, validation_examples(config, dataset)
    tokenizer = semantic_id_tokenizer(catalog)
    tokens = level_tokens(catalog, tokenizer, tokenizer.vocab_size)
    tree = PrefixTree.build(catalog.codes)
    builder = PromptBuilder(config.prompt, tokenizer, catalog)
    prompts = [builder.build(history) for history in examples.histories]
    # Short ones together: a batch is as wide as its longest prompt, rounded up so that few shapes are compiled.
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    quantum = -(-builder.max_tokens // 4)

    def recall(cfg: GeneratorConfig, params: GeneratorParams) -> float:
        tables = beam.catalog_tables(tree, tokens, params)
        ranked = np.full((len(examples), TOP_K), -1, np.int32)
        for at in range(0, len(order), BATCH):
            chosen = order[at : at + BATCH]
            lengths = np.ones(BATCH, np.int32)
            lengths[: len(chosen)] = [len(prompts[i]) for i in chosen]
            padded = np.zeros((BATCH, -(-int(lengths.max()) // quantum) * quantum), np.int32)
            for row, i in enumerate(chosen):
                padded[row, : lengths[row]] = prompts[i]
            widths = np.full(BATCH, config.beam.width, np.int32)
            found = beam.recommend(
                params, tables, padded, lengths, widths,
                cfg=cfg, width=config.beam.width, normalize=config.beam.normalize,
                approximate=config.beam.approximate,
            )  # fmt: skip
            leaves, alive = np.asarray(found.leaves), ~np.isneginf(np.asarray(found.scores))
            for row, i in enumerate(chosen):
                best_leaves = leaves[row, alive[row]][:TOP_K]
                rows = [tree.rows_of(leaf)[: config.beam.items_per_id] for leaf in best_leaves]
                best = np.concatenate(rows)[:TOP_K]
                ranked[i, : len(best)] = best
        return _recall(ranked, examples)

    return recall


def retriever_recall(config: Config, dataset: Dataset) -> Callable[[RetrieverConfig, RetrieverParams], float]:
    """recall@10 of a retriever."""
    examples = validation_examples(config, dataset)

    def recall(cfg: RetrieverConfig, params: RetrieverParams) -> float:
        found = retrievers.top_k(
            params, cfg, examples.histories, TOP_K, exclude_seen=False, asked=examples.target_times
        )
        return _recall(found, examples)

    return recall


def ranker_recall(config: Config, dataset: Dataset) -> Callable[[DecoderConfig, DecoderParams], float]:
    """recall@10 of a ranker in the layouts of train.layouts; the mean where these are both. NDCG@10 where it answers by
    letters: of so few candidates most are among the first ten.

    The candidates are those of train.retriever, for the users whose target is among them; without one the target and
    others drawn as for training, RANKED in all; in plain order 1 + train.negatives.
    """
    train, catalog = config.train, dataset.catalog
    examples = validation_examples(config, dataset)
    tokenizer = ranker.ranker_tokenizer(config, catalog)
    count = 1 + train.negatives if train.layouts == CAUSAL.name else RANKED
    histories = np.full((len(examples), config.prompt.max_items), -1, np.int32)
    for row, history in zip(histories, examples.histories, strict=True):
        recent = history[-config.prompt.max_items :]
        row[: len(recent)] = recent
    if train.retriever:
        refuse_learnt_valid(
            train.retriever, "train.retriever", "give another retriever, or set train.evaluate_every to 0"
        )
        found, retriever = retrievers.load_for(Path(train.retriever), catalog.item_ids)
        candidates = retrievers.top_k(
            retriever, found, examples.histories, count, exclude_seen=True, asked=examples.target_times
        )
    else:
        weights = jnp.log(jnp.asarray(ranker.popularity(dataset.interactions.sequences, catalog.n_items)))
        others, targets = min(count, catalog.n_items) - 1, jnp.asarray(examples.targets)
        key = jax.random.key(train.seed)
        candidates = np.asarray(ranker.draw_candidates(key, weights, jnp.asarray(histories), targets, others))
        candidates = np.random.default_rng(train.seed).permuted(
            candidates, axis=1
        )  # plain order sees their places
    eligible = np.flatnonzero((candidates == examples.targets[:, None]).any(axis=1))
    if not len(eligible):
        raise ConfigError("train.retriever: finds no target of the validation users")
    metric = NDCG if letter_ranker.is_asked(config) else METRIC
    if train.retriever:
        own = _quality(candidates[eligible], examples.select(eligible), metric)
        _log.info("%d validation examples; the retriever's own order: %s %.4f", len(eligible), metric, own)
    orders = {"both": (False, True), "item_prefix": (True,)}.get(train.layouts, (False,))
    scores = _candidate_scores(config, tokenizer, catalog)
    together = RANKED_TOGETHER if jax.default_backend() == "cpu" else BATCH  # a GPU is idle with few

    def recall(cfg: DecoderConfig, params: DecoderParams) -> float:
        recalls = []
        for items_first in orders:
            ranked = np.full((len(eligible), TOP_K), -1, np.int32)
            for at in range(0, len(eligible), together):
                chosen = np.resize(eligible[at : at + together], together)
                listed = candidates[chosen]
                first = np.full(len(chosen), items_first)
                found = np.asarray(scores(params, histories[chosen], listed, first, cfg=cfg))
                if np.isnan(found).any():
                    raise ConfigError("a validation's scores are no numbers: lower train.learning_rate")
                best = np.take_along_axis(listed, rank_candidates(found)[:, :TOP_K], axis=1)
                ranked[at : at + together, : best.shape[1]] = best[: len(eligible) - at]
            recalls.append(_quality(ranked, examples.select(eligible), metric))
        return float(np.mean(recalls))

    return recall


def _candidate_scores(config: Config, tokenizer: Tokenizer, catalog: Catalog) -> Callable[..., jax.Array]:
    """(params, histories, candidates, whether items stand first, cfg=) -> scores, as they are trained."""
    if letter_ranker.is_asked(config):
        of_letters = letter_ranker.prompt_text(config, tokenizer, catalog)

        @functools.partial(jax.jit, static_argnames="cfg")
        def by_letters(params: Any, rows: Any, listed: Any, first: Any, *, cfg: DecoderConfig) -> jax.Array:
            return letter_ranker.answers(params, cfg, of_letters, rows, listed).scores

        return by_letters
    if config.train.layouts == CAUSAL.name:
        plain = plain_ranker.prompt_text(config, tokenizer, catalog)

        @functools.partial(jax.jit, static_argnames="cfg")
        def of_plain(params: Any, rows: Any, listed: Any, first: Any, *, cfg: DecoderConfig) -> jax.Array:
            return plain_ranker.candidate_scores(params, cfg, plain, rows, listed)[0]

        return of_plain
    text = ranker.prompt_text(config, tokenizer, catalog)

    @functools.partial(jax.jit, static_argnames="cfg")
    def scores(params: Any, rows: Any, listed: Any, first: Any, *, cfg: DecoderConfig) -> jax.Array:
        return ranker.candidate_scores(params, cfg, text, rows, listed, first)[0]

    return scores


def feedback_auc(
    config: Config, dataset: Dataset, features: feedback.Features
) -> Callable[[ScorerConfig, PyTree], float]:
    """feedback.METRIC of a model that `train_feedback` makes, on the impressions of train.validation_examples requests.

    Raises ConfigError, naming the task, where they have one label alone for one.
    """
    train, settings, interactions = config.train, config.feedback, dataset.interactions
    found = requests(interactions, validation_split(interactions), settings.candidates)
    feedback.refuse_long_windows(found, train)
    count = min(train.validation_examples, len(found))
    chosen = np.random.default_rng(train.seed).choice(len(found), count, replace=False)
    given = feedback.windows(found, np.sort(chosen), train.max_items, settings.candidates)
    bits = action_bits(interactions, settings.tasks, "feedback.tasks")
    _require_both_labels(given[:, train.max_items :], settings.tasks, bits)
    arrays = {name: jnp.asarray(array) for name, array in features.items()}
    scores = jax.jit(feedback.scores, static_argnames="cfg")

    def mean_auc(cfg: ScorerConfig, params: PyTree) -> float:
        parts = []
        for at in range(0, len(given), WINDOWS):
            batch = np.resize(given[at : at + WINDOWS], (WINDOWS, *given.shape[1:]))
            parts.append([np.asarray(x)[: len(given) - at] for x in scores(params, cfg, batch, arrays)])
        probabilities, actions = (np.concatenate(part) for part in zip(*parts, strict=True))
        real = actions >= 0
        areas = [auc(probabilities[real][:, task], actions[real] >> bit & 1) for task, bit in enumerate(bits)]
        return float(np.mean(areas))

    return mean_auc


def _require_both_labels(shown: Int32, tasks: tuple[str, ...], bits: tuple[int, ...]) -> None:
    """Raise ConfigError for a task without an AUC, before hours of training. shown: the windows' impressions."""
    actions = shown[..., 2][shown[..., 0] >= 0]
    for task, bit in zip(tasks, bits, strict=True):
        done = actions >> bit & 1
        if done.all() or not done.any():
            raise ConfigError(
                f"feedback.tasks: {task} {'always' if done.all() else 'never'} happens in the {len(done)} validated "
                "impressions, so it has no AUC: raise train.validation_examples, leave the task out, or set "
                "train.evaluate_every=0"
            )


def _recall(ranked: Int32, examples: Examples) -> float:
    return _quality(ranked, examples, METRIC)


def _quality(ranked: Int32, examples: Examples, metric: str) -> float:
    return mean_all(Hits.of_targets(ranked, examples.targets), (metric,))[metric]
