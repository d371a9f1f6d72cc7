# SPDX-License-Identifier: Apache-2.0
"""A generator whose logits are cosines: its loss by the formula, the decoder that is written out, and a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import ConfigError, TrainConfig, override
from jgr.data.datasets import Dataset
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderParams
from jgr.training.generator import cosine_loss, decoder_config, token_vectors, train_generator, with_cosines
from tests.noise import noisy
from tests.training.test_lazy import best_items
from tests.training.test_trainer import rule_config, rule_dataset

PREFIX = np.array([1], np.int32)
APART = np.array([[2 + i // 3, 6 + i] for i in range(10)], np.int32)
"""Four groups, and a code of each item's own."""
SHARED = np.array([[2 + i // 3, 3 + i] for i in range(10)], np.int32)
"""The same, where both levels have some of the tokens."""
TRAIN = TrainConfig(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32)
CFG = decoder_config(TRAIN, 16, 16)
KEY = jax.random.key(0)
TEMPERATURE = 0.2
PREFILL = jax.jit(decoder.prefill, static_argnums=1)


def drawn() -> DecoderParams:
    weights: DecoderParams = noisy(params.initialize(decoder.spec(CFG), KEY), 0.1)
    return weights


def states(weights: DecoderParams, tokens: np.ndarray) -> np.ndarray:
    """The hidden states after each token, in float64, of the length 1: whatever the last norm is, they point there.
    What is read are rows of the mean square 1 where the weights' is 1 / D, as in HSTU."""
    read = replace(weights, embed=weights.embed * CFG.hidden**0.5)
    padded = np.pad(tokens, (0, 9 - len(tokens)))[None]
    hidden = PREFILL(read, CFG, padded, np.array([len(tokens)])).hidden[:, : len(tokens)]
    hidden = np.asarray(hidden, np.float64)[0] / np.asarray(weights.norm)
    return hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("smoothing", "item_loss", "later"), [(0.0, 0.0, 1.0), (0.1, 0.0, 1.0), (0.0, 0.5, 0.3), (0.2, 1.0, 0.2)]
)
@pytest.mark.parametrize("item_tokens", [APART, SHARED], ids=["apart", "shared"])
def test_the_loss_is_by_level_and_of_whole_items_as_well(
    smoothing: float, item_loss: float, later: float, item_tokens: np.ndarray
) -> None:
    weights = drawn()
    rows = np.array([[1, 2, 3, -1], [4, 5, -1, -1], [6, 7, 8, 9]], np.int32)
    embed = np.asarray(weights.embed, np.float64)
    unit = embed / np.linalg.norm(embed, axis=-1, keepdims=True)
    expected, targets = 0.0, 0
    for row in rows:
        tokens = np.concatenate([PREFIX, item_tokens[row[row >= 0]].ravel()])
        directions = states(weights, tokens)
        for t in range(3, len(tokens)):
            level, targets = (t - 1) % 2, targets + 1
            codes = np.unique(item_tokens[:, level])
            logits = unit[codes] @ directions[t - 1] / TEMPERATURE
            nats = np.log(np.exp(logits).sum()) - logits
            of_code = (1 - smoothing) * nats[codes == tokens[t]].sum() + smoothing * nats.mean()
            expected += of_code * (later if level else 1.0)
            if level == 0:
                own = item_tokens[:, 1]
                logits = unit[own] @ directions[t - 1] / TEMPERATURE
                whole = np.log(np.exp(logits).sum()) - logits[own == tokens[t + 1]].sum()
                expected += item_loss * whole
    loss = cosine_loss(
        CFG,
        PREFIX,
        item_tokens,
        0.0,
        1,
        smoothing,
        temperature=TEMPERATURE,
        item_loss=item_loss,
        later_codes=later,
    )
    nats, count = jax.jit(loss)(weights, jnp.asarray(rows), KEY)
    assert count == targets == 12
    np.testing.assert_allclose(nats, expected, rtol=1e-5)


def test_the_decoder_that_is_written_out_has_cosines_for_logits() -> None:
    weights = drawn()
    tokens = np.array([1, 3, 9, 2, 6], np.int32)
    served = with_cosines(weights, TEMPERATURE)
    hidden = PREFILL(served, replace(CFG, tied=False), tokens[None], np.array([5])).hidden
    embed = np.asarray(weights.embed, np.float64)
    cosines = states(weights, tokens) @ (embed / np.linalg.norm(embed, axis=-1, keepdims=True)).T
    found = decoder.logits(served, hidden)[0]
    np.testing.assert_allclose(found, cosines / TEMPERATURE, rtol=1e-4, atol=1e-4)


def test_a_codes_vector_is_the_mean_of_its_items() -> None:
    of_items = np.arange(20, dtype=np.float32).reshape(10, 2)
    found = token_vectors(of_items, APART, 16)
    np.testing.assert_allclose(found[2], of_items[:3].mean(axis=0))
    np.testing.assert_allclose(found[5], of_items[9])
    np.testing.assert_allclose(found[6:16], of_items)
    assert not found[:2].any()


def test_a_trained_folder_is_an_ordinary_decoder_that_has_learnt_the_rule(tmp_path: Path) -> None:
    rule = rule_dataset()
    n = rule.catalog.n_items
    codes = [[f"<a_{i // 6}>", f"<b_{i}>"] for i in range(n)]
    dataset = Dataset(Catalog.build(rule.catalog.item_ids, codes, [{}] * n), rule.interactions)
    np.save(tmp_path / "vectors.npy", np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32))
    config = override(
        rule_config(tmp_path / "ring"), "train.cosines=true", "train.temperature=0.3", "train.item_loss=1",
        "train.steps=250", "prompt.max_items=4", "train.max_items=4",  # each place of an item is learnt
        f"train.item_vectors={tmp_path / 'vectors.npy'}",
    )  # fmt: skip
    train_generator(config, dataset)
    cfg, weights = checkpoint.load(tmp_path / "ring")
    assert isinstance(weights, DecoderParams) and not cfg.tied
    np.testing.assert_allclose(np.linalg.norm(weights.head, axis=-1), 1, atol=1e-5)
    np.testing.assert_array_equal(best_items(config, dataset), dataset.interactions.test.targets)


def test_items_that_share_their_last_code_have_no_loss_of_their_own(tmp_path: Path) -> None:
    config = override(rule_config(tmp_path / "ring"), "train.cosines=true", "train.item_loss=1")
    with pytest.raises(ConfigError, match=r"^train\.item_loss: items share their last code"):
        train_generator(config, rule_dataset())


@pytest.mark.parametrize(
    "settings",
    [
        ("train.item_loss=1",),
        ("train.model=hstu", "train.cosines=true"),
        ("train.cosines=true", "train.start=x"),
    ],
)
def test_settings_that_say_nothing_together_are_refused(tmp_path: Path, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"train\.(item_loss|cosines|start)"):
        override(rule_config(tmp_path / "ring"), *settings)
