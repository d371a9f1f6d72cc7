# SPDX-License-Identifier: Apache-2.0
"""LRURec against float64 loops, training that learns and goes on, and the candidates that it names."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import ConfigError, UserError, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import DataError, Ragged
from jgr.evaluation import validation
from jgr.evaluation.candidates import Candidates, load_candidates, retrieve, save_candidates
from jgr.models import lru_rec, params, retrievers
from jgr.models.lru_rec import LruRecConfig, LruRecParams
from jgr.models.params import CheckpointError
from jgr.training.progress import RunFolder
from jgr.training.retriever import softmax_loss, train_retriever
from tests.noise import noisy
from tests.training.shortcuts import equal_steps_compiled_once, without_curves
from tests.training.test_trainer import KEY, rule_config, rule_dataset

CFG = LruRecConfig(n_items=10, max_items=6, hidden=8, layers=2, mlp=32, items="v")
WALKS = (
    "train.model=lrurec",
    "train.steps=12",
    "train.checkpoint_every=4",
    "train.dropout=0.2",
    "train.batch=10",
)


recurrence = jax.jit(lru_rec.recurrence)


@pytest.fixture(scope="module", autouse=True)
def cheap_trainings() -> Iterator[None]:
    with without_curves(), equal_steps_compiled_once():
        yield


def draw(cfg: LruRecConfig) -> LruRecParams:
    """Parameters where nothing is zero."""
    drawn: LruRecParams = params.initialize(lru_rec.spec(cfg), KEY)
    return noisy(drawn, 0.1)


def start(state: int) -> tuple[np.ndarray, np.ndarray]:
    """lambda's modulus and angle in fresh parameters, [S] each."""
    place = np.arange(state) + 0.5
    return np.sqrt(0.64 + place / state * (0.99**2 - 0.64)), 2 * np.pi * (place * (math.sqrt(5) - 1) / 2 % 1)


def recurrence_by_hand(x: np.ndarray, nu: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """[N, S] complex128, place by place."""
    modulus, angle = start(x.shape[-1])
    decay = np.exp(-np.exp(np.log(-np.log(modulus)) + nu) + 1j * np.exp(np.log(angle) + theta))
    states, state = [], np.zeros(x.shape[-1], complex)
    for row in x:
        state = decay * state + np.sqrt(1 - abs(decay) ** 2) * row
        states.append(state)
    return np.array(states)


def scores_by_hand(weights: LruRecParams, history: list[int]) -> np.ndarray:
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    erf = np.vectorize(math.erf)

    def norm(x: np.ndarray, scale_bias: np.ndarray) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        scaled: np.ndarray = x * (1 + scale_bias[0]) + scale_bias[1]
        return scaled

    x = norm(w.embed[history], w.norm)
    for at in range(CFG.layers):
        layer = jax.tree.map(lambda x, at=at: x[at], w.layers)
        b, c = layer.into[:, :16] + 1j * layer.into[:, 16:], layer.out[:16] - 1j * layer.out[16:]
        states = recurrence_by_hand(x @ b, layer.nu[0], layer.theta[0])
        x = norm(x + (states @ c).real, layer.recurrence_norm)
        inner = x @ layer.w1 + layer.b1
        x = norm(x + inner * (1 + erf(inner / math.sqrt(2))) / 2 @ layer.w2 + layer.b2, layer.mlp_norm)
    scores: np.ndarray = w.embed @ x[-1] + w.bias
    return scores


def test_the_recurrence_is_the_loop() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 50, 16)) + 1j * rng.normal(size=(3, 50, 16))
    nu, theta = rng.normal(scale=0.3, size=(2, 1, 16))
    got = recurrence(jnp.complex64(x), jnp.float32(nu), jnp.float32(theta))
    expected = np.stack([recurrence_by_hand(row, nu[0], theta[0]) for row in x])
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-5)


def test_fresh_parameters_decay_on_the_ring() -> None:
    unit = jnp.zeros((1, 2, 128), jnp.complex64).at[:, 0].set(1)
    zeros = jnp.zeros((1, 128))
    first, second = np.asarray(recurrence(unit, zeros, zeros))[0]
    modulus, angle = start(128)
    assert 0.8 < modulus.min() < 0.801 and 0.989 < modulus.max() < 0.99
    np.testing.assert_allclose(second / first, modulus * np.exp(1j * angle), atol=1e-5)
    np.testing.assert_allclose(first, np.sqrt(1 - modulus**2), rtol=1e-4)


def test_scores_are_the_formulas_whatever_stands_beside_a_history() -> None:
    weights, histories = draw(CFG), [[1], [2, 3, 4, 9], [5, 6, 7, 8, 0, 1]]
    expected = np.array([scores_by_hand(weights, history) for history in histories])
    together = np.full((3, 6), -1, np.int32)
    for row, history in zip(together, histories, strict=True):
        row[: len(history)] = history
    got = retrievers.scores_after(weights, together, cfg=CFG)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    alone = retrievers.scores_after(weights, np.array([histories[1]], np.int32), cfg=CFG)
    np.testing.assert_allclose(alone[0], got[1], rtol=1e-5, atol=1e-5)


def test_the_best_are_the_formulas_and_leave_out_what_was_seen() -> None:
    weights, histories = draw(CFG), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 0, 1, 2]]
    for exclude_seen in (False, True):
        found = retrievers.top_k(weights, CFG, Ragged.of(histories), 12, exclude_seen=exclude_seen)
        for row, history in zip(found, histories, strict=True):
            order = np.argsort(-scores_by_hand(weights, history[-CFG.max_items :])).tolist()
            best = [item for item in order if not (exclude_seen and item in history)]
            assert row.tolist() == best + [-1] * (12 - len(best))


def test_the_losses_are_the_full_and_the_sampled_softmax() -> None:
    weights, rows = draw(CFG), np.array([[1, 2, 3, 4], [5, 6, -1, -1]], np.int32)
    drawn = np.asarray(jax.random.randint(jax.random.split(KEY)[1], (20,), 0, 10))
    full, sampled = 0.0, 0.0
    for history, target in (([1], 2), ([1, 2], 3), ([1, 2, 3], 4), ([5], 6)):
        scores = scores_by_hand(weights, history)
        full += np.log(np.exp(scores).sum()) - scores[target]
        others = np.exp(scores[drawn[drawn != target]]).sum() * 9 / 20
        sampled += np.log(np.exp(scores[target]) + others) - scores[target]
    for negatives, expected in ((0, full), (20, sampled)):
        nats, targets = jax.jit(softmax_loss(CFG, negatives, 0.0))(weights, jnp.asarray(rows), KEY)
        assert targets == 4
        np.testing.assert_allclose(nats, expected, rtol=1e-5)


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_broken_off_training_goes_on_as_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, unbroken, broken = rule_dataset(), tmp_path / "unbroken", tmp_path / "broken"
    train_retriever(override(rule_config(unbroken), *WALKS), dataset)

    class Killed(Exception):
        pass

    record = RunFolder.record

    def record_until(self: RunFolder, step: int, loss: jax.Array) -> None:
        record(self, step, loss)
        if step == 6:
            raise Killed

    monkeypatch.setattr(RunFolder, "record", record_until)
    with pytest.raises(Killed):
        train_retriever(override(rule_config(broken), *WALKS), dataset)
    monkeypatch.undo()
    train_retriever(override(rule_config(broken), *WALKS), dataset)
    assert losses(broken) == losses(unbroken)
    (cfg, weights), (_, others) = retrievers.load(unbroken), retrievers.load(broken)
    assert (type(cfg), cfg.items) == (LruRecConfig, retrievers.items_digest(dataset.catalog.item_ids))
    jax.tree.map(np.testing.assert_array_equal, weights, others)


def test_a_checkpoint_is_what_was_saved_and_no_other_is_taken(tmp_path: Path) -> None:
    weights = draw(CFG)
    retrievers.save(tmp_path / "lru", CFG, weights, lambda folder: None)
    cfg, loaded = retrievers.load(tmp_path / "lru")
    assert cfg == CFG
    jax.tree.map(np.testing.assert_array_equal, weights, loaded)
    with pytest.raises(UserError, match="was trained on other items"):
        retrievers.load_for(tmp_path / "lru", ["a", "b"])
    path = tmp_path / "lru" / "config.json"
    path.with_name("digests.json").unlink()  # which would name the changed file
    for wrong in ('{"model_type": "lru"}', '{"model_type": "lrurec", "n_items": 10}', "[]", "{"):
        path.write_text(wrong)
        with pytest.raises(CheckpointError, match="is not the config of a retriever"):
            retrievers.load(tmp_path / "lru")


def test_sasrec_asks_for_heads_that_divide_and_lrurec_for_none() -> None:
    train = dataclasses.replace(rule_config(Path("x")).train, model="sasrec", hidden=30, heads=4)
    with pytest.raises(ConfigError, match=r"train\.hidden \(30\) must be a multiple of train\.heads \(4\)"):
        retrievers.make_config(train, ["a"])
    assert retrievers.make_config(dataclasses.replace(train, model="lrurec"), ["a"]).hidden == 30


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """A folder trained on the ring where an item's successor always follows."""
    folder, dataset = tmp_path_factory.mktemp("lru") / "ring", rule_dataset()
    config = override(
        rule_config(folder), "train.model=lrurec", "train.evaluate_every=75", "train.patience=2",
        "train.steps=150", "train.checkpoint_every=500",
    )  # fmt: skip
    train_retriever(config, dataset, validate=validation.retriever_recall(config, dataset))
    return folder, dataset


def test_it_learns_the_rule_and_names_the_target_among_its_candidates(
    ring: tuple[Path, Dataset], tmp_path: Path
) -> None:
    folder, dataset = ring
    trained = losses(folder)
    assert trained[-1] < trained[0] / 2
    test = dataset.interactions.test
    cfg, weights = retrievers.load_for(folder, dataset.catalog.item_ids)
    found = retrieve(weights, cfg, dataset, test, 40, exclude_seen=True)
    assert found.rows.shape == (30, 40)
    for i, history in enumerate(test.histories):  # 30 items, 7 of them seen
        assert sorted(found.rows[i, :23]) == sorted(set(range(30)) - set(history.tolist()))
        assert (found.rows[i, 23:] == -1).all()
        assert found.rows[i, found.target_at[i]] == test.targets[i]
    assert found.recall(40) == 1.0 and found.eligible.all()
    assert found.recall(1) == np.mean(found.rows[:, 0] == test.targets)

    save_candidates(found, tmp_path / "c.npz")
    loaded = load_candidates(tmp_path / "c.npz", dataset)
    assert loaded.users.tolist() == [dataset.interactions.user_ids[user] for user in test.users]
    np.testing.assert_array_equal(loaded.rows, found.rows)
    np.testing.assert_array_equal(loaded.target_at, found.target_at)


def test_a_target_that_is_not_among_the_candidates(ring: tuple[Path, Dataset]) -> None:
    folder, dataset = ring
    cfg, weights = retrievers.load(folder)
    seen = dataset.interactions.test.histories.rows[:1].tolist() * 2
    examples = dataclasses.replace(
        dataset.interactions.test, histories=Ragged.of([seen] * 30), targets=np.full(30, seen[0], np.int32)
    )
    found = retrieve(weights, cfg, dataset, examples, 10, exclude_seen=True)
    assert (found.target_at == -1).all() and found.recall(10) == 0.0


def test_candidates_of_other_items_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    dataset, path = rule_dataset(), tmp_path / "c.npz"
    items = retrievers.items_digest(dataset.catalog.item_ids)
    whole = Candidates(np.array(["u"]), np.array([[3, 1]], np.int32), np.array([1], np.int32), items)
    ids = [f"other{i}" for i in range(30)]
    other = Dataset(
        Catalog.build(ids, [[f"<c_{i}>"] for i in range(30)], [{} for _ in ids]), dataset.interactions
    )
    save_candidates(whole, path)
    with pytest.raises(DataError, match="are of other items"):
        load_candidates(path, other)
    for rows, target_at, words in (
        ([[30, 1]], [1], "candidates must be -1 to 29, found 1 to 30"),
        ([[3, 1]], [2], "target_at must be -1 to 1, found 2 to 2"),
        ([[3, 1]], [1, 1], r"are not \[e\], \[e, k\] int32"),
    ):
        wrong = Candidates(whole.users, np.array(rows, np.int32), np.array(target_at, np.int32), items)
        save_candidates(wrong, path)
        with pytest.raises(DataError, match=words):
            load_candidates(path, dataset)
    np.savez(path, users=whole.users)
    with pytest.raises(DataError, match="holds other arrays"):
        load_candidates(path, dataset)
