# SPDX-License-Identifier: Apache-2.0
"""Training windows against plain lists, losses against numpy, meshes and parts against the whole, learnt rules."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError, TrainConfig, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import Ragged, leave_one_out
from jgr.evaluation import validation
from jgr.evaluation.recommendations import recommend_all
from jgr.models import decoder, params, retrievers, sasrec
from jgr.models.params import Spec
from jgr.serving.decoders.loading import load_engine
from jgr.training.generator import decoder_config, next_item_loss, train_generator
from jgr.training.retriever import softmax_loss, train_retriever
from jgr.training.trainer import Trainer, fit, make_optimizer
from jgr.training.windows import Windows
from tests.noise import noisy

PREFIX = np.array([1], np.int32)
ITEM_TOKENS = (2 + np.arange(20).reshape(10, 2)).astype(np.int32)  # item i has tokens 2 + 2i, 3 + 2i
TRAIN = TrainConfig(
    batch=4, max_items=3, steps=3, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32
)
KEY = jax.random.key(0)


def windows(sequences: list[list[int]], train: TrainConfig = TRAIN) -> Windows:
    return Windows(Ragged.of(sequences), train)


def items(rows: np.ndarray) -> list[int]:
    """The window in a padded row; the padding is on the right."""
    size = int((rows >= 0).sum())
    assert (rows[size:] == -1).all()
    return rows[:size].tolist()


def test_an_epoch_shows_every_user_once_and_batches_repeat_exactly() -> None:
    sequences = [[i, (i + 1) % 10, (i + 2) % 10][: 2 + i % 2] for i in range(8)]
    data = windows([*sequences, [5]])  # the last user has nothing to predict
    assert len(data) == 8 and data.steps_per_epoch() == 2
    seen = [items(row) for step in (0, 1) for row in data.batch(step)]
    assert sorted(seen) == sorted(sequences)
    for step in range(4):
        np.testing.assert_array_equal(data.batch(step), windows(sequences).batch(step))
    assert not np.array_equal(data.batch(0), data.batch(2))  # another epoch, another order


def test_users_of_like_length_share_a_batch_and_its_width() -> None:
    train = dataclasses.replace(TRAIN, max_items=7)
    data = windows([[0, 1]] * 12 + [[0, 1, 2, 3, 4, 5, 6, 7, 8]] * 4, train)
    assert sorted(data.batch(step).shape for step in range(4)) == [(4, 2), (4, 2), (4, 2), (4, 8)]


def test_long_sequences_give_every_window_in_time() -> None:
    sequence = [3, 1, 4, 1, 5, 9, 2]
    data = windows([sequence])
    seen = {tuple(items(row)) for step in range(60) for row in data.batch(step)}
    assert seen == {tuple(sequence[i : i + 4]) for i in range(4)}


def test_events_that_are_left_out_leave_two_at_least_and_their_order() -> None:
    sequence = [3, 1, 4, 0, 5, 9, 2]
    train = dataclasses.replace(TRAIN, max_items=6, skip_events=0.6)
    data = windows([sequence] * 4, train)
    seen = [items(row) for step in range(200) for row in data.batch(step)]
    at = [[sequence.index(item) for item in window] for window in seen]
    assert all(sorted(set(places)) == places for places in at)
    lengths = np.array([len(places) for places in at])
    assert set(lengths.tolist()) == set(range(2, 8))
    # Two stay in any case, the others with probability .4 each: 2 + 5 * .4 events, less what the two are chosen by.
    assert 2.5 < lengths.mean() < 4
    assert {(1, 4), (0, 6)} <= {tuple(places) for places in at}  # any two, however far apart
    happened = np.array([5, 7, 8, 20, 33, 40, 41])
    timed = dataclasses.replace(Ragged.of([sequence] * 4), times=np.tile(happened, 4))
    rows, seconds = np.moveaxis(
        Windows(timed, dataclasses.replace(train, times=True, model="hstu")).batch(7), -1, 0
    )
    for row, when in zip(rows, seconds, strict=True):
        there = happened[[sequence.index(item) for item in items(row)]]
        assert when[: len(there)].tolist() == (there - there[0]).tolist() and not when[len(there) :].any()
    np.testing.assert_array_equal(data.batch(7), windows([sequence] * 4, train).batch(7))


def test_the_input_pipeline_gives_the_batches_from_any_step_on() -> None:
    data = windows([[i, (i + 1) % 10, (i + 2) % 10] for i in range(10)], dataclasses.replace(TRAIN, steps=7))
    for start in (0, 5, 7):
        ahead = list(data.batches(start))
        assert len(ahead) == 7 - start
        for step, rows in enumerate(ahead, start):
            np.testing.assert_array_equal(rows, data.batch(step))


def test_nothing_to_learn_from() -> None:
    with pytest.raises(ConfigError, match="no user has two interactions"):
        windows([[1], []])


def test_the_generators_loss_is_the_cross_entropy_of_the_real_targets() -> None:
    cfg = decoder_config(TRAIN, 22, 16)
    weights = params.initialize(decoder.spec(cfg), KEY)
    rows = np.array([[1, 2, 3, -1], [4, 5, -1, -1], [6, 7, 8, 9], [0, 1, -1, -1]], np.int32)

    @jax.jit
    def read(tokens: jax.Array, length: jax.Array) -> jax.Array:
        return decoder.logits(weights, decoder.prefill(weights, cfg, tokens, length).hidden)[0]

    expected = []
    # A tenth of each target goes to all codes of its level, by the formula of label smoothing.
    smoothed = []
    for row in rows:
        tokens = np.concatenate([PREFIX, ITEM_TOKENS[items(row)].ravel()])
        padded = np.pad(tokens, (0, 9 - len(tokens)))[None]
        logits = np.asarray(read(padded, np.array([len(tokens)])), np.float64)
        nats = np.log(np.exp(logits).sum(-1, keepdims=True)) - logits
        for t in range(3, len(tokens)):  # from the second item's first token on
            expected.append(nats[t - 1, tokens[t]])
            level = nats[t - 1, ITEM_TOKENS[:, (t - 1) % 2]]
            smoothed.append(0.9 * nats[t - 1, tokens[t]] + 0.1 * level.mean())
    for smoothing, wanted in ((0.0, expected), (0.1, smoothed)):
        loss = jax.jit(next_item_loss(cfg, PREFIX, ITEM_TOKENS, 0.0, smoothing=smoothing))
        found, targets = loss(weights, jnp.asarray(rows), KEY)
        assert targets == len(wanted) == 14
        np.testing.assert_allclose(found, np.sum(wanted), rtol=1e-6)


def sasrec_weights(cfg: sasrec.SasrecConfig) -> sasrec.SasrecParams:
    """Drawn, with norms and biases that are not zero."""
    drawn: sasrec.SasrecParams = params.initialize(sasrec.spec(cfg), KEY)
    return noisy(drawn, 0.1)


SASREC = sasrec.SasrecConfig(10, 3, 16, 2, 2, 32, "v")


def sasrec_by_hand(weights: sasrec.SasrecParams, history: list[int]) -> np.ndarray:
    """Scores of all items after the history, [n], in float64 loops."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)

    def norm(x: np.ndarray, scale_bias: np.ndarray) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * (1 + scale_bias[0]) + scale_bias[1]

    h = w.embed[history] * np.sqrt(16) + w.position[: len(history)]
    for at in range(2):
        layer = jax.tree.map(lambda x, at=at: x[at], w.layers)
        x = norm(h, layer.attention_norm)
        q, k, v = (x @ m for m in (layer.wq, layer.wk, layer.wv))
        out = np.zeros_like(h)
        for head in (slice(0, 8), slice(8, 16)):
            for t in range(len(h)):
                weight = np.exp(k[: t + 1, head] @ q[t, head] / np.sqrt(8))
                out[t, head] = weight / weight.sum() @ v[: t + 1, head]
        h = h + out @ layer.wo
        h = h + np.maximum(norm(h, layer.mlp_norm) @ layer.w1 + layer.b1, 0) @ layer.w2 + layer.b2
    return w.embed @ norm(h, w.norm)[-1]


def test_sasrec_ranks_as_the_formula_does() -> None:
    weights = sasrec_weights(SASREC)
    histories = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    ranked = retrievers.top_k(weights, SASREC, Ragged.of(histories), 12, exclude_seen=False)
    unseen = retrievers.top_k(weights, SASREC, Ragged.of(histories), 12, exclude_seen=True)
    for got, new, history in zip(ranked, unseen, histories, strict=True):
        order = np.argsort(-sasrec_by_hand(weights, history[-3:]))
        assert got.tolist() == [*order.tolist(), -1, -1]
        assert [row for row in new.tolist() if row >= 0] == [row for row in order if row not in history]


def test_sasrecs_losses_are_the_full_and_the_sampled_softmax() -> None:
    weights, rows = sasrec_weights(SASREC), np.array([[1, 2, 3, 4], [5, 6, -1, -1]], np.int32)
    drawn = np.asarray(jax.random.randint(jax.random.split(KEY)[1], (20,), 0, 10))
    full, sampled = 0.0, 0.0
    for history, target in (([1], 2), ([1, 2], 3), ([1, 2, 3], 4), ([5], 6)):
        scores = sasrec_by_hand(weights, history)
        full += np.log(np.exp(scores).sum()) - scores[target]
        others = np.exp(scores[drawn[drawn != target]]).sum() * 9 / 20
        sampled += np.log(np.exp(scores[target]) + others) - scores[target]
    for negatives, expected in ((0, full), (20, sampled)):
        nats, targets = jax.jit(softmax_loss(SASREC, negatives, 0.0))(weights, jnp.asarray(rows), KEY)
        assert targets == 4
        np.testing.assert_allclose(nats, expected, rtol=1e-5)


def losses_by(train: TrainConfig, trainer: Trainer, shortest: int) -> list[float]:
    data = windows([[i % 10, (3 * i) % 10, 7, i % 7][: max(shortest, 3 + i % 2)] for i in range(24)], train)
    losses: list[float] = []
    fit(
        trainer,
        trainer.initial(),
        data.batches(0),
        lambda done, state, loss: losses.append(float(loss)) or False,
    )
    return losses


def make_trainer(train: TrainConfig) -> Trainer:
    cfg = decoder_config(train, 22, 16)
    return Trainer(train, decoder.spec(cfg), next_item_loss(cfg, PREFIX, ITEM_TOKENS, train.dropout))


def run_losses(train: TrainConfig, shortest: int = 3) -> list[float]:
    return losses_by(train, make_trainer(train), shortest)


@pytest.mark.slow
def test_equal_seeds_give_equal_losses_and_parts_give_those_of_the_whole() -> None:
    """Batches of one width, whose parts have windows of two lengths, so that the targets of a part differ in number."""
    train = dataclasses.replace(TRAIN, batch=24, steps=6, dropout=0.0, warmup_steps=1)
    trainer = make_trainer(train)
    whole = losses_by(train, trainer, 3)
    assert whole == losses_by(train, trainer, 3)
    assert whole != run_losses(dataclasses.replace(train, seed=1))
    np.testing.assert_allclose(run_losses(dataclasses.replace(train, micro_batches=4)), whole, atol=1e-5)


MESH = """
import dataclasses, json, jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.training.test_trainer import TRAIN, run_losses
train = dataclasses.replace(TRAIN, batch=16, steps=6, dropout=0.2, warmup_steps=1)
print(json.dumps([run_losses(dataclasses.replace(train, devices=n), shortest=4) for n in (1, 8)]))
"""


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one() -> None:
    import json

    # NPROC sizes XLA's thread pool: with fewer threads than devices a collective can wait for ever.
    environment = {**os.environ, "PYTHONPATH": ".", "NPROC": "16"}
    done = subprocess.run(
        [sys.executable, "-c", MESH], env=environment, capture_output=True, text=True, check=True
    )
    one, eight = json.loads(done.stdout.splitlines()[-1])
    assert len(one) == 6 and one[5] < one[0]
    np.testing.assert_allclose(eight, one, atol=1e-5)


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.devices is 64, this machine has"):
        run_losses(dataclasses.replace(TRAIN, batch=64, devices=64))


ONE = Spec((1,), ("one",), "zeros")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_warm_up_to_the_peak_and_end_as_named(schedule: str) -> None:
    train = override(
        Config(), f"train.schedule={schedule}", "train.steps=100", "train.warmup_steps=10", "train.adam_b2=0"
    ).train
    # With b2 = 0 and a constant gradient, AdamW moves by the learning rate itself.
    optimizer, x = make_optimizer(dataclasses.replace(train, weight_decay=0.0), ONE), jnp.zeros((1,))
    state, moves, next_update = optimizer.init(x), [], jax.jit(optimizer.update)
    for _ in range(100):
        update, state = next_update(jnp.ones((1,)) * 0.5, state, x)
        moves.append(-float(update[0]) / train.learning_rate)
    at = np.arange(100) - 10
    after = {
        "cosine": 0.01 + 0.99 * (1 + np.cos(np.pi * at / 90)) / 2,
        "linear": 1 - 0.99 * at / 90,
        "constant": np.ones(100),
    }[schedule]
    np.testing.assert_allclose(moves, np.where(at < 0, np.arange(100) / 10, after), atol=1e-5)


def test_a_step_can_have_another_place_in_the_schedule() -> None:
    train = dataclasses.replace(
        TRAIN, schedule="linear", steps=100, warmup_steps=0, weight_decay=0.0, adam_b2=0
    )
    trainer = Trainer(train, ONE, lambda x, rows, key: (0.5 * x.sum(), jnp.ones(())))
    rows, state, moves = np.zeros((4, 2), np.int32), trainer.initial(), []
    for place in (None, 50, 99, 100):
        before = float(state.params[0])
        state, _ = trainer.step(state, rows, place)
        moves.append((before - float(state.params[0])) / train.learning_rate)
    np.testing.assert_allclose(moves, [1 - 0.99 * at / 100 for at in (0, 50, 99, 100)], atol=1e-5)
    assert int(state.step) == 4


def test_without_a_place_a_step_is_where_the_steps_are() -> None:
    """However far a clock had placed those before it."""
    train = dataclasses.replace(
        TRAIN, schedule="linear", steps=100, warmup_steps=0, weight_decay=0.0, adam_b2=0
    )
    trainer = Trainer(train, ONE, lambda x, rows, key: (0.5 * x.sum(), jnp.ones(())))
    rows, state, moves = np.zeros((4, 2), np.int32), trainer.initial(), []
    for place in (None, 70, 100, None, None):
        before = float(state.params[0])
        state, _ = trainer.step(state, rows, place)
        moves.append((before - float(state.params[0])) / train.learning_rate)
    np.testing.assert_allclose(moves, [1 - 0.99 * at / 100 for at in (0, 70, 100, 3, 4)], atol=1e-5)


@pytest.mark.parametrize(
    "specs",
    [
        decoder.spec(decoder_config(dataclasses.replace(TRAIN, layers=3), 40, 16)),
        sasrec.spec(sasrec.SasrecConfig(9, 4, 8, 3, 2, 16, "")),
    ],
    ids=["decoder", "sasrec"],
)
def test_weight_decay_shrinks_matrices_alone(specs: Any) -> None:
    """The norms and biases of several layers are stacked, and no matrices."""
    train = dataclasses.replace(
        TRAIN, weight_decay=0.5, learning_rate=0.1, warmup_steps=0, schedule="constant"
    )
    optimizer = make_optimizer(train, specs)
    weights = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs, is_leaf=lambda x: isinstance(x, Spec))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, weights), optimizer.init(weights), weights)
    shrunk = {
        jax.tree_util.keystr(path).rpartition(".")[2]: float(update.max())
        for path, update in jax.tree.leaves_with_path(updates)
    }
    assert all(value in (0.0, pytest.approx(-0.05)) for value in shrunk.values())
    plain = {name for name, value in shrunk.items() if value == 0}
    assert plain and all("norm" in name or name in ("b1", "b2") for name in plain)
    assert not any("norm" in name or name in ("b1", "b2") for name in shrunk.keys() - plain)


def test_the_gradient_is_clipped_before_the_optimizer() -> None:
    train = dataclasses.replace(TRAIN, clip_norm=1e-3, warmup_steps=0, steps=10)
    optimizer = make_optimizer(train, Spec((4,), ("four",), "zeros"))
    state = optimizer.init(jnp.zeros((4,)))
    _, state = optimizer.update(jnp.full((4,), 100.0), state, jnp.zeros((4,)))
    adam = next(s for s in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, optax.ScaleByAdamState))
                if isinstance(s, optax.ScaleByAdamState))  # fmt: skip
    np.testing.assert_allclose(adam.mu, 0.1 * 1e-3 / 2, rtol=1e-5)


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
        "train.steps=150", "train.batch=30", "train.learning_rate=5e-3", "train.dropout=0", "train.hidden=32",
        "train.layers=1", "train.mlp=64", "train.warmup_steps=20", "train.max_items=8",
    )  # fmt: skip


def test_a_trained_folder_is_served_and_has_learnt_the_rule(tmp_path: Path) -> None:
    import asyncio

    dataset, config = rule_dataset(), rule_config(tmp_path / "ring")
    told: list[tuple[int, int, str]] = []
    assert train_generator(config, dataset, lambda *x: told.append(x)) == tmp_path / "ring"
    assert [t[:2] for t in told] == [(step, 150) for step in range(151)]

    async def ask() -> np.ndarray:
        engine = load_engine(config, kinds=["recommend"])
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


@pytest.mark.slow
def test_sasrec_learns_the_rule_and_its_best_weights_are_kept(tmp_path: Path) -> None:
    dataset = rule_dataset()
    config = override(
        rule_config(tmp_path / "sasrec"), "train.model=sasrec", "train.evaluate_every=75", "train.patience=2",
        "train.steps=225", "train.checkpoint_every=500", "train.negatives=8",
    )  # fmt: skip
    train_retriever(config, dataset, validate=validation.retriever_recall(config, dataset))
    assert sorted(p.name for p in (tmp_path / "sasrec").iterdir()) == [
        "catalog.jsonl",
        "config.json",
        "curves.png",
        "digests.json",
        "metrics.jsonl",
        "params",
        "serving.json",
    ]
    cfg, weights = retrievers.load(tmp_path / "sasrec")
    test = dataset.interactions.test
    ranked = retrievers.top_k(weights, cfg, test.histories, 3, exclude_seen=False)
    np.testing.assert_array_equal(ranked[:, 0], test.targets)
