# SPDX-License-Identifier: Apache-2.0
"""Training windows against plain lists, the loss against numpy, and a decoder that learns a rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jgr.catalog import Catalog
from jgr.config import Config, ConfigError, TrainConfig, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.evaluation.recommendations import recommend_all
from jgr.models import decoder, params
from jgr.serving.loading import load_engine
from jgr.training.generator import train_generator
from jgr.training.trainer import Batch, Windows, decoder_config, fit, next_token_loss

PREFIX = np.array([1], np.int32)
ITEM_TOKENS = (2 + np.arange(20).reshape(10, 2)).astype(np.int32)  # item i has tokens 2 + 2i, 3 + 2i
TRAIN = TrainConfig(
    batch=4, max_items=3, steps=3, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32
)


def windows(sequences: list[list[int]], train: TrainConfig = TRAIN) -> Windows:
    return Windows([np.array(s, np.int32) for s in sequences], PREFIX, ITEM_TOKENS, train)


def items_of(tokens: np.ndarray, length: int) -> list[int]:
    assert tokens[0] == 1 and not tokens[length:].any()
    pairs = tokens[1:length].reshape(-1, 2)
    assert (pairs[:, 1] == pairs[:, 0] + 1).all()
    return [int(t - 2) // 2 for t in pairs[:, 0]]


def test_an_epoch_shows_every_user_once_and_batches_repeat_exactly() -> None:
    sequences = [[i, (i + 1) % 10, (i + 2) % 10] for i in range(8)]
    data = windows([*sequences, [5]])  # the last user has nothing to predict
    assert len(data) == 8 and data.steps_per_epoch() == 2
    seen = [items_of(t, n) for step in (0, 1) for t, n in zip(*data.batch(step), strict=True)]
    assert sorted(seen) == sorted(sequences)
    for step in range(4):
        np.testing.assert_array_equal(data.batch(step).tokens, windows(sequences).batch(step).tokens)
    assert not np.array_equal(data.batch(0).tokens, data.batch(2).tokens)  # another epoch, another order


def test_long_sequences_give_every_window_in_time() -> None:
    sequence = [3, 1, 4, 1, 5, 9, 2]
    data = windows([sequence])
    seen = {tuple(items_of(t, n)) for step in range(60) for t, n in zip(*data.batch(step), strict=True)}
    assert seen == {tuple(sequence[i : i + 4]) for i in range(4)}


def test_nothing_to_learn_from() -> None:
    with pytest.raises(ConfigError, match="no user has two interactions"):
        windows([[1], []])


def test_the_loss_is_the_mean_cross_entropy_of_the_real_targets() -> None:
    cfg = decoder_config(TRAIN, 22, 16)
    weights = params.initialize(decoder.spec(cfg), jax.random.key(0))
    data = windows([[1, 2, 3], [4, 5], [6, 7, 8, 9], [0, 1]])
    batch = data.batch(0)
    logits = np.asarray(
        decoder.logits(weights, decoder.prefill(weights, cfg, batch.tokens, batch.lengths).hidden), np.float64
    )
    nats = []
    for row, length in enumerate(batch.lengths):
        for t in range(data.first_target, length):  # from the second item's first token on
            scores = logits[row, t - 1]
            nats.append(np.log(np.exp(scores).sum()) - scores[batch.tokens[row, t]])
    loss = next_token_loss(weights, cfg, batch, data.first_target)
    np.testing.assert_allclose(loss, np.mean(nats), atol=1e-5)
    padded = Batch(np.where(batch.tokens == 0, 21, batch.tokens), batch.lengths)
    np.testing.assert_allclose(next_token_loss(weights, cfg, padded, data.first_target), loss, atol=1e-6)


def test_equal_seeds_give_equal_models_and_dropout_is_a_rate() -> None:
    cfg = decoder_config(TRAIN, 22, 16)
    data = windows([[1, 2, 3], [4, 5], [6, 7, 8, 9], [0, 1]])
    first, again = fit(data, TRAIN, cfg), fit(data, TRAIN, cfg)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = fit(data, dataclasses.replace(TRAIN, seed=1), cfg)
    assert not np.array_equal(first.embed, other.embed)


def rule_dataset() -> Dataset:
    """30 items on a ring; every user walks it, so the next item is always the next on the ring."""
    symbols = [[f"<a_{i // 6}>", f"<b_{i % 6}>"] for i in range(30)]
    catalog = Catalog.build([f"item{i}" for i in range(30)], symbols, [{} for _ in range(30)])
    walks = [[(start + step) % 30 for step in range(8)] for start in range(30)]
    return Dataset(catalog, leave_one_out(walks))


def rule_config(folder: Path) -> Config:
    return override(
        Config(), f"model.path={folder}", f"train.out={folder}", "model.compilation_cache=", "prompt.max_items=8",
        "beam.width=4", "profiles.batch=8", "profiles.tokens=32", "profiles.widths=4", "profiles.candidates=4",
        "train.steps=250", "train.batch=30", "train.learning_rate=5e-3", "train.dropout=0", "train.hidden=32",
        "train.layers=1", "train.mlp=64", "train.warmup_steps=20", "train.max_items=8",
    )  # fmt: skip


def test_a_trained_folder_is_served_and_has_learnt_the_rule(tmp_path: Path) -> None:
    import asyncio

    dataset, config = rule_dataset(), rule_config(tmp_path / "ring")
    told: list[tuple[int, int, str]] = []
    assert train_generator(config, dataset, lambda *x: told.append(x)) == tmp_path / "ring"
    assert [t[:2] for t in told] == [(100, 250), (200, 250), (250, 250)]

    async def ask() -> np.ndarray:
        engine = load_engine(config)
        await engine.start()
        ranked = await recommend_all(engine, dataset.interactions.test, top_k=3)
        await engine.drain(10)
        return ranked

    ranked = asyncio.run(ask())
    np.testing.assert_array_equal(ranked[:, 0], dataset.interactions.test.targets)
    assert (ranked >= 0).all()


def test_training_refuses_prompts_that_hide_the_next_item(tmp_path: Path) -> None:
    config = override(rule_config(tmp_path / "ring"), "prompt.template={history}<bos>")
    with pytest.raises(ConfigError, match=r"prompt\.template ending in \{history\}"):
        train_generator(config, rule_dataset())
    with pytest.raises(ConfigError, match=r"train\.out"):
        train_generator(override(config, "train.out="), rule_dataset())
