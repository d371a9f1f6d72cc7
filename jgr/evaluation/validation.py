# SPDX-License-Identifier: Apache-2.0
"""Recall on validation examples while a model trains: the served search, asked directly with the weights of the moment.

The search, the prompts and the order of items are those of the engine; there is no server and no batching in between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.data.interactions import Examples
from jgr.data.prefix_tree import PrefixTree
from jgr.evaluation.metrics import Hits, mean_all
from jgr.models import beam, sasrec
from jgr.models.generators import GeneratorConfig, GeneratorParams
from jgr.models.sasrec import SasrecConfig, SasrecParams
from jgr.prompt import PromptBuilder, level_tokens, semantic_id_tokenizer

METRIC = "recall@10"
TOP_K = 10
BATCH = 32  # prompts that are searched at once

Int32 = npt.NDArray[np.int32]


def validation_examples(config: Config, dataset: Dataset) -> Examples:
    """train.validation_examples of the validation split, drawn by train.seed. ConfigError where there is none."""
    examples = dataset.interactions.valid
    if not len(examples):
        raise ConfigError("train.evaluate_every: the dataset has no validation examples; set it to 0")
    count = min(config.train.validation_examples, len(examples))
    chosen = np.random.default_rng(config.train.seed).choice(len(examples), count, replace=False)
    return examples.select(np.sort(chosen))


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
            )  # fmt: skip
            leaves, alive = np.asarray(found.leaves), ~np.isneginf(np.asarray(found.scores))
            for row, i in enumerate(chosen):
                rows = [tree.rows_of(leaf) for leaf in leaves[row, alive[row]][:TOP_K]]
                best = np.concatenate(rows)[:TOP_K]
                ranked[i, : len(best)] = best
        return _recall(ranked, examples)

    return recall


def sasrec_recall(config: Config, dataset: Dataset) -> Callable[[SasrecConfig, SasrecParams], float]:
    """recall@10 of a SASRec."""
    examples = validation_examples(config, dataset)

    def recall(cfg: SasrecConfig, params: SasrecParams) -> float:
        return _recall(sasrec.top_k(params, cfg, examples.histories, TOP_K, exclude_seen=False), examples)

    return recall


def _recall(ranked: Int32, examples: Examples) -> float:
    return mean_all(Hits.of_targets(ranked, examples.targets), (METRIC,))[METRIC]
