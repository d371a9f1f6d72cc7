# SPDX-License-Identifier: Apache-2.0
"""How weights of the history's items are learnt: the losses and their gradients against loops in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import Config, TrainConfig
from jgr.data.interactions import Ragged
from jgr.models import repeats, retrievers
from jgr.training import softmax
from jgr.training.retriever import softmax_loss, train_retriever
from jgr.training.softmax import Repeats, softmax_nats
from jgr.training.trainer import Trainer, fit
from jgr.training.windows import Windows
from tests.models.test_repeats import ITEMS, PLACES, added_by_hand, bucket_by_hand, model, padded
from tests.training.test_trainer import rule_dataset

HIDDEN, STEP = 5, 1e-5
WINDOWS = padded([[3, 5, 3, 7, 5, 5, 1], [4], [2, 2, 2, 9, 0, 11, 2, 8, 9], [6, 10, 6]])


def slopes(of: Callable[[Any], float], at: np.ndarray) -> np.ndarray:
    """The gradient at `at` by central differences."""
    found = np.zeros(at.size)
    for place in range(at.size):
        by = np.zeros(at.size)
        by[place] = STEP
        up, down = (at.reshape(-1) + sign * by for sign in (1, -1))
        found[place] = (of(up.reshape(at.shape)) - of(down.reshape(at.shape))) / (2 * STEP)
    return found.reshape(at.shape)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("chunk", [5, 512])
def test_the_full_softmax_and_its_gradients_are_those_of_a_loop(
    monkeypatch: pytest.MonkeyPatch, groups: int, chunk: int
) -> None:
    monkeypatch.setattr(softmax, "CHUNK", chunk)
    rng = np.random.default_rng(chunk + groups)
    hidden = rng.normal(size=(*WINDOWS.shape, HIDDEN))
    outputs, bias = rng.normal(size=(ITEMS, HIDDEN)), rng.normal(size=ITEMS)
    weights = rng.normal(size=repeats.spec(PLACES).shape)
    targets = rng.integers(0, ITEMS, WINDOWS.shape)
    real = rng.random(WINDOWS.shape) * (rng.random(WINDOWS.shape) < 0.6) * (WINDOWS >= 0)

    def wanted(hidden: Any, outputs: Any, weights: Any) -> float:
        nats = 0.0
        for row, place in zip(*np.nonzero(real), strict=True):
            history = [item for item in WINDOWS[row, : place + 1].tolist() if item >= 0]
            scores = outputs @ hidden[row, place] + bias + added_by_hand(weights, history, ITEMS)
            nats += real[row, place] * (np.log(np.exp(scores).sum()) - scores[targets[row, place]])
        return nats

    def found(hidden: Any, outputs: Any, weights: Any) -> jax.Array:
        own = Repeats(weights, repeats.window(jnp.asarray(WINDOWS)))
        return softmax_nats(
            hidden, outputs, jnp.asarray(targets, jnp.int32), jnp.asarray(real, jnp.float32),
            bias=jnp.asarray(bias, jnp.float32), repeats=own, groups=groups,
        )  # fmt: skip

    given = (hidden, outputs, weights)
    value, gradients = jax.jit(jax.value_and_grad(found, (0, 1, 2)))(*map(jnp.float32, given))
    np.testing.assert_allclose(value, wanted(*given), rtol=1e-5)
    for at in range(3):

        def only(x: Any, at: int = at) -> float:
            return wanted(*(x if number == at else whole for number, whole in enumerate(given)))

        by = slopes(only, given[at])
        np.testing.assert_allclose(gradients[at], by, atol=1e-4)


@pytest.mark.parametrize("negatives", [0, 7])
@pytest.mark.parametrize("name", retrievers.MODELS)
def test_a_retrievers_loss_is_that_of_its_scores_after_each_event(name: str, negatives: int) -> None:
    """The scores after each event are the model's own, by another path; the softmax over them is a loop."""
    cfg, params = model(name)
    key, temperature = jax.random.key(3), 0.7
    drawn = np.asarray(jax.random.randint(jax.random.split(key)[1], (negatives,), 0, ITEMS))
    events = [[3, 5, 3, 5, 1], [4, 4], [2, 9, 2, 2, 8, 9]]
    rows = padded(events)[:, :7]
    wanted = 0.0
    for history in events:
        for end in range(1, len(history)):
            scores = np.asarray(
                retrievers.scores_after(params, padded([history[:end]])[:, :6], cfg=cfg), np.float64
            )
            scores, target = scores[0] / temperature, history[end]
            among = np.exp(scores).sum()
            if negatives:
                others = np.exp(scores[drawn[drawn != target]]).sum()
                among = np.exp(scores[target]) + others * (ITEMS - 1) / negatives
            wanted += np.log(among) - scores[target]
    loss = softmax_loss(cfg, negatives, 0.0, temperature=temperature)
    nats, count = jax.jit(loss)(params, jnp.asarray(rows), key)
    assert count == sum(len(history) - 1 for history in events)
    np.testing.assert_allclose(nats, wanted, rtol=1e-5)


def newest_weights(*worlds: list[list[int]]) -> list[float]:
    """The weight of the newest event's item, after some steps on users with a world's events."""
    train = TrainConfig(
        model="hstu", steps=40, batch=30, learning_rate=1e-2, warmup_steps=5, dropout=0.0, temperature=0.1,
        max_items=PLACES, hidden=8, layers=1, heads=1, kv_heads=1, repeats=True,
    )  # fmt: skip
    cfg = retrievers.make_config(train, [str(row) for row in range(ITEMS)])
    loss = softmax_loss(cfg, 0, 0.0, temperature=train.temperature)
    trainer = Trainer(train, retrievers.retriever(cfg).spec(cfg), loss)
    found = []
    for events in worlds:
        batches = Windows(Ragged.of(events), train).batches(0)
        state = fit(trainer, trainer.initial(), batches, lambda done, state, loss: done == train.steps)
        found.append(float(state.params.repeats[0]))
    return found


def test_training_learns_whether_people_take_things_again() -> None:
    """Users never take a thing twice, or each twice in a row, with histories of one length."""
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(ITEMS)[:8].tolist() for _ in range(60)]
    once, twice = newest_weights(chosen, [np.repeat(items[:4], 2).tolist() for items in chosen])
    assert once < -0.02 and twice > once + 0.02


def test_a_trained_folder_holds_the_weights_beside_vectors_of_items(tmp_path: Path) -> None:
    dataset = rule_dataset()
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(dataset.catalog.n_items, 4)))
    train = TrainConfig(
        model="sasrec", out=str(tmp_path / "out"), steps=3, batch=8, warmup_steps=1, max_items=PLACES, hidden=8,
        layers=1, heads=1, kv_heads=1, mlp=8, item_vectors=str(tmp_path / "v.npy"), repeats=True,
    )  # fmt: skip
    train_retriever(Config(train=train), dataset)
    cfg, params = retrievers.load_for(tmp_path / "out", dataset.catalog.item_ids)
    assert cfg.repeats and params.repeats.shape == (bucket_by_hand(PLACES - 1) + 1,)
    assert np.abs(params.repeats).max() > 0
