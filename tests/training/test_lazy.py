# SPDX-License-Identifier: Apache-2.0
"""The lazy decoder's loss against its formulas, and a rule learnt by `train.model=onerec`."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, ConfigError, override
from jgr.data.datasets import Dataset
from jgr.models import beam, checkpoint
from jgr.prompt.tokens import PromptBuilder, level_tokens, semantic_id_tokenizer
from jgr.training.generator import train_generator
from jgr.training.lazy import next_item_loss
from tests.models.test_lazy_decoder import PLAIN, by_hand, draw, histories
from tests.training.test_trainer import KEY, rule_config, rule_dataset


def test_the_loss_is_the_cross_entropy_of_every_item_after_those_before_it() -> None:
    weights, item_tokens = draw(PLAIN), histories(PLAIN, [10])[0]
    rows = np.array([[1, 2, 3, -1], [4, 5, -1, -1], [6, 7, 8, 9]], np.int32)
    expected = []
    for row in rows:
        window = item_tokens[row[row >= 0]]
        for at in range(1, len(window)):
            logits = by_hand(weights, PLAIN, window[:at], window[at, :2].tolist())
            for level, (first, token) in enumerate(zip(PLAIN.first_tokens, window[at], strict=True)):
                own = logits[level, first : first + 12]
                expected.append(np.log(np.exp(own).sum()) - own[token - first])
    loss = jax.jit(next_item_loss(PLAIN, item_tokens, 0.0))
    nats, targets = loss(weights, jnp.asarray(rows), KEY)
    assert targets == len(expected) == 18
    np.testing.assert_allclose(nats, np.sum(expected), rtol=1e-5)


def best_items(config: Config, dataset: Dataset) -> list[int]:
    """The rows that a trained folder's beam of two finds first for the test histories."""
    cfg, weights = checkpoint.load(Path(config.train.out))
    tokenizer = semantic_id_tokenizer(dataset.catalog)
    tree = PrefixTree.build(dataset.catalog.codes)
    tables = beam.catalog_tables(tree, level_tokens(dataset.catalog, tokenizer, cfg.vocab_size), weights)
    prompts = PromptBuilder(config.prompt, tokenizer, dataset.catalog)
    tokens = np.stack([prompts.build(history) for history in dataset.interactions.test.histories])
    lengths, widths = np.full(len(tokens), tokens.shape[1], np.int32), np.full(len(tokens), 2, np.int32)
    found = beam.recommend(weights, tables, tokens, lengths, widths, cfg=cfg, width=2)
    return [tree.rows_of(leaf)[0] for leaf in np.asarray(found.leaves)[:, 0]]


@pytest.mark.slow
def test_it_learns_the_rule(tmp_path: Path) -> None:
    dataset = rule_dataset()
    config = override(
        rule_config(tmp_path / "ring"), "train.model=onerec", "prompt.template={history}", "prompt.max_items=5",
        "train.max_items=5", "train.steps=120", "train.dropout=0.05",
    )  # fmt: skip
    train_generator(config, dataset)
    np.testing.assert_array_equal(best_items(config, dataset), dataset.interactions.test.targets)


def test_what_it_cannot_read_is_refused_before_training(tmp_path: Path) -> None:
    dataset = rule_dataset()
    config = override(rule_config(tmp_path / "ring"), "train.model=onerec")
    with pytest.raises(ConfigError, match=r"reads items only: template=\{history\}"):
        train_generator(config, dataset)
    shared = [[f"<a_{i // 6}>", f"<a_{i % 6}>"] for i in range(30)]
    one_alphabet = Catalog.build([f"item{i}" for i in range(30)], shared, [{} for _ in range(30)])
    with pytest.raises(ConfigError, match="levels have names of their own"):
        train_generator(config, Dataset(one_alphabet, dataset.interactions))
