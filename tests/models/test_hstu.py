# SPDX-License-Identifier: Apache-2.0
"""HSTU's research form: Meta's PyTorch stack, model and cached run; growing histories; the loss, and training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.cli.convert import convert_hstu
from jgr.config import ConfigError, UserError, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import Examples, Interactions, Ragged
from jgr.evaluation.candidates import retrieve
from jgr.models import hstu, hstu_import, params, retrievers
from jgr.models.hstu import HstuConfig, HstuParams, WindowSlides
from jgr.models.hstu_costs import Work, cost, of_history
from jgr.models.params import CheckpointError, Spec
from jgr.training.retriever import softmax_loss, train_retriever
from jgr.training.windows import Windows
from tests.training.shortcuts import without_curves
from tests.training.test_trainer import rule_config, rule_dataset
from tools.hstu_golden import ATOL, GOLDEN, INPUTS, golden, golden_config, next_times
from tools.hstu_parity import FILES, comparisons, grown

KEY = jax.random.key(0)

CFG = HstuConfig(
    n_items=40,
    max_items=7,
    hidden=12,
    layers=2,
    heads=2,
    qk_dim=4,
    v_dim=6,
    length=18,
    items="v",
    bias="times",
)
encode = jax.jit(hstu.encode, static_argnames="cfg")


def assert_reproduced(file: str) -> None:
    """Every output array of one of the authors' files, and none twice."""
    compared = list(comparisons(file))
    for c in compared:
        assert c.is_within(ATOL), f"{file}: {c.array} is off by {c.error:.2g}"
    names = [c.array for c in compared]
    assert sorted(names) == sorted(name for name in golden(file) if not INPUTS.fullmatch(name))


def test_every_file_of_the_authors_is_compared() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(FILES)


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("research")])
def test_layers_model_and_caches_are_those_of_the_authors(file: str) -> None:
    assert_reproduced(file)


def draw(cfg: HstuConfig) -> HstuParams:
    """Parameters where nothing is zero, and the bias is as large as the products."""
    rng = np.random.default_rng(0)
    drawn: HstuParams = jax.tree.map(
        lambda declared: np.float32(0.5 * rng.normal(size=declared.shape)),
        hstu.spec(cfg), is_leaf=lambda x: isinstance(x, Spec),
    )  # fmt: skip
    return drawn


def test_a_delta_of_the_authors_is_a_history_that_grows_by_one() -> None:
    """Their cached run replaces the last row of each history; the rows before were computed for another time."""
    z = golden("research_stack")
    users, at = np.arange(len(z["lengths"])), z["delta_positions"]
    np.testing.assert_allclose(z["y"][users, at], z["delta_y"][users, at], rtol=0, atol=ATOL)
    before, after, _ = grown(z)  # the comparisons hold `after` against delta_y
    assert np.abs(np.asarray(before)[:-1] - after[:-1]).max() > 0.01


@pytest.mark.parametrize("bias", ["positions", "times"])
def test_a_history_that_grows_is_the_history_encoded_anew(bias: Any) -> None:
    cfg = dataclasses.replace(CFG, bias=bias)
    weights, rng = draw(cfg), np.random.default_rng(0)
    events = rng.integers(0, 40, (3, 7)).astype(np.int32)
    times = np.cumsum(rng.integers(1, 10**6, (3, 8)), axis=1).astype(np.int32)
    history = hstu.empty(cfg, 3)
    counts = np.zeros(3, int)
    # At last without new events: asked again at another time, of which only the timed form's answer depends.
    for new in ([2, 0, 3], [0, 1, 3], [2, 3, 1], [0, 0, 0]):
        rows, stamps = np.full((3, 3), -1, np.int32), np.zeros((3, 4), np.int32)
        all_rows, all_times = np.full((3, 7), -1, np.int32), np.zeros((3, 8), np.int32)
        for user, count in enumerate(new):
            old, counts[user] = counts[user], counts[user] + count
            now = times[user, counts[user] - 1] + rng.integers(1, 10**6)
            rows[user, :count] = events[user, old : old + count]
            stamps[user, : count + 1] = [*times[user, old : old + count], now]
            all_rows[user, : counts[user]] = events[user, : counts[user]]
            all_times[user, : counts[user] + 1] = [*times[user, : counts[user]], now]
        got, history = hstu.extend(weights, cfg, history, rows, stamps if cfg.timed else None)
        encoded = encode(weights, cfg, all_rows, times=all_times if cfg.timed else None)
        for user in np.flatnonzero(counts):
            want = encoded[user, counts[user] - 1]
            np.testing.assert_allclose(got[user], want, rtol=0, atol=1e-5)
    with pytest.raises(WindowSlides, match="8 events, the window holds 7"):
        hstu.extend(weights, cfg, history, events[:, :1] * 0 + [[-1], [-1], [4]], np.zeros((3, 2), np.int32))


def test_scores_depend_on_n_and_not_on_the_width_of_a_call() -> None:
    cfg = dataclasses.replace(CFG, bias="positions")
    weights, rows = draw(cfg), np.array([[1, 2, 3], [4, 5, -1]], np.int32)
    wide = np.pad(rows, ((0, 0), (0, 4)), constant_values=-1)
    narrow = retrievers.scores_after(weights, rows, cfg=cfg)
    np.testing.assert_allclose(retrievers.scores_after(weights, wide, cfg=cfg), narrow, rtol=0, atol=1e-6)
    other = dataclasses.replace(weights, position=weights.position[:9])
    layers = dataclasses.replace(weights.layers, positions=weights.layers.positions[..., 9:-9])
    shorter = dataclasses.replace(cfg, length=9)
    scores = retrievers.scores_after(dataclasses.replace(other, layers=layers), rows, cfg=shorter)
    assert np.abs(np.asarray(scores) - narrow).max() > 1e-4


def test_the_loss_is_the_softmax_over_the_target_and_the_drawn() -> None:
    cfg = dataclasses.replace(CFG, bias="positions")
    weights, rows = draw(cfg), np.array([[1, 2, 3, 4], [5, 6, -1, -1]], np.int32)
    hidden = np.asarray(encode(weights, cfg, rows[:, :-1]), np.float64)
    embed = np.asarray(weights.embed, np.float64)
    scores = hidden @ (embed / np.linalg.norm(embed, axis=1, keepdims=True)).T / 0.05
    drawn = np.asarray(jax.random.randint(jax.random.split(KEY)[1], (200,), 0, 40))
    expected = 0.0
    for row, place, target in ((0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 0, 6)):
        assert target in drawn
        masked = scores[row, place, drawn] - np.where(drawn == target, 5e4, 0)
        logits = np.concatenate([scores[row, place, [target]], masked])
        expected += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[0]
    loss = softmax_loss(cfg, 200, 0.0, temperature=0.05, weigh_negatives=False)
    nats, targets = jax.jit(loss)(weights, jnp.asarray(rows), KEY)
    assert targets == 4
    np.testing.assert_allclose(nats, expected, rtol=1e-5)


def timed_dataset(users: int) -> Dataset:
    """A ring on which two steps are made after a day, and otherwise one; so that times alone tell the next item.

    The first half of the users is trained on, and asked is for the last item of the others.
    """
    rng, ring = np.random.default_rng(0), rule_dataset()
    gaps = rng.choice([30, 200_000], (users, 7))
    walks = rng.integers(30, size=(users, 1)) + np.cumsum(np.where(gaps > 30, 2, 1), axis=1)
    rows, times = (walks % 30).astype(np.int32).ravel(), (10**9 + np.cumsum(gaps, axis=1)).ravel()
    starts = np.arange(users) * 7
    half = starts[: users // 2]
    last = starts[users // 2 :] + 6
    named = np.arange(users // 2, users, dtype=np.int32)
    asked = Examples(Ragged(rows, last - 6, last, times), rows[last], named, times[last])
    names = tuple(map(str, range(users)))
    return Dataset(
        ring.catalog, Interactions(names, Ragged(rows, half, half + 7, times), asked, asked, asked)
    )


def test_windows_have_seconds_since_their_first_event(tmp_path: Path) -> None:
    train = override(rule_config(tmp_path), "train.model=hstu", "train.times=true", "train.max_items=4").train
    sequences = timed_dataset(60).interactions.sequences
    batch = Windows(sequences, train).batch(3)
    assert batch.shape == (train.batch, 5, 2)
    everything = {
        tuple(sequences[i][at : at + 5]): sequences.times_of(i)[at : at + 5]
        for i in range(30) for at in range(3)
    }  # fmt: skip
    for rows, seconds in zip(batch[..., 0], batch[..., 1], strict=True):
        times = everything[tuple(rows)]
        np.testing.assert_array_equal(seconds, times - times[0])
    with pytest.raises(ConfigError, match=r"train\.times: the dataset has no times"):
        Windows(Ragged.of([[1, 2, 3]]), train)
    with pytest.raises(ConfigError, match=r"only hstu's bias"):
        override(rule_config(tmp_path), "train.times=true")


def test_times_that_32_bits_do_not_hold_are_refused(tmp_path: Path) -> None:
    """The last time that fits is told from the first that does not; of a long history the latest events count."""
    train = override(rule_config(tmp_path), "train.model=hstu", "train.times=true", "train.max_items=4").train
    most = 2**31 - 1

    def sequences(*times: int) -> Ragged:
        ragged = Ragged.of([[1, 2], list(range(len(times)))])
        return dataclasses.replace(ragged, times=np.array([5, 6, *times], np.int64))

    assert Windows(sequences(7, 8, 7 + most), train).batch(0)[..., 1].max() == most
    message = f"a history spans {most + 1} seconds, over 68 years; .* jgr prepare --time_unit"
    with pytest.raises(ConfigError, match=rf"train\.times: {message}"):
        Windows(sequences(7, 8, 8 + most), train)
    Windows(sequences(7, 8, 8 + most), dataclasses.replace(train, times=False))

    cfg = retrievers.make_config(train, [f"i{i}" for i in range(9)])
    weights = params.initialize(hstu.spec(cfg), KEY)

    def ranked(asked: int) -> np.ndarray:
        when = np.array([9, asked], np.int64)
        return retrievers.top_k(weights, cfg, sequences(0, 7, 8, 9, 10), 9, exclude_seen=False, asked=when)

    assert sorted(ranked(7 + most)[1].tolist()) == list(range(9))
    with pytest.raises(UserError, match=f"this retriever depends on times: {message}"):
        ranked(8 + most)


def test_it_learns_what_times_alone_tell(tmp_path: Path) -> None:
    dataset = timed_dataset(600)
    config = override(
        rule_config(tmp_path / "hstu"), "train.model=hstu", "train.times=true", "train.temperature=0.1",
        "train.steps=100", "train.batch=60", "train.learning_rate=1e-2",
    )  # fmt: skip
    with without_curves():
        train_retriever(config, dataset)
    cfg, weights = retrievers.load_for(tmp_path / "hstu", dataset.catalog.item_ids)
    assert isinstance(cfg, HstuConfig) and cfg.timed and cfg.length == config.train.max_items + 11
    test = dataset.interactions.test
    found = retrieve(weights, cfg, dataset, test, 10, exclude_seen=False)
    assert found.recall(1) > 0.9  # without times no more than half can be known
    untimed = dataclasses.replace(test, histories=dataclasses.replace(test.histories, times=None))
    with pytest.raises(UserError, match="depends on times, and the histories have none"):
        retrieve(weights, cfg, dataset, untimed, 10, exclude_seen=False)


def state_dict(z: dict[str, Any]) -> dict[str, np.ndarray]:
    """The golden model under the names of the authors' checkpoints."""
    layer = "_hstu._attention_layers.{}."
    names = {
        "uvqk": "_uvqk", "o_weight": "_o.weight", "o_bias": "_o.bias", "pos_w": "_rel_attn_bias._pos_w",
        "ts_w": "_rel_attn_bias._ts_w",
    }  # fmt: skip
    found = {
        layer.format(i) + theirs: z[f"layer{i}_{ours}"] for i in range(2) for ours, theirs in names.items()
    }
    found["_embedding_module._item_emb.weight"] = z["item_embedding"]
    found["_input_features_preproc._pos_emb.weight"] = z["position_embedding"]
    found["_hstu._attn_mask"] = np.zeros((20, 20), bool)
    return {f"module.{name}": x for name, x in found.items()}


def test_the_authors_checkpoint_becomes_a_retriever(tmp_path: Path) -> None:
    z = golden("research_full_model")
    np.savez(tmp_path / "hstu.npz", **state_dict(z))
    ids = [str(i) for i in (3, 1, 60)]
    cfg, weights = hstu_import.research(hstu_import.read_state(tmp_path / "hstu.npz"), ids, "v", heads=2)
    assert cfg == dataclasses.replace(golden_config(z, 3), max_items=9)
    np.testing.assert_array_equal(weights.embed, z["item_embedding"][[3, 1, 60]])
    whole = [str(i) for i in range(1, 61)]
    catalog = Catalog.build(whole, [[f"<a_{i}>"] for i in whole], [{} for _ in whole])
    save_catalog(catalog, tmp_path / "catalog.jsonl")
    convert_hstu(tmp_path / "hstu.npz", tmp_path / "catalog.jsonl", tmp_path / "out", heads=2)
    found, converted = retrievers.load_for(tmp_path / "out", whole)
    rows = z["past_ids"].astype(np.int32) - 1
    scores = retrievers.scores_after(converted, rows, next_times(z), cfg=found)
    np.testing.assert_allclose(scores, z["item_scores"], rtol=0, atol=ATOL)


def test_a_checkpoint_of_other_keys_shapes_or_items_is_refused(tmp_path: Path) -> None:
    state = {name.removeprefix("module."): x for name, x in state_dict(golden("research_full_model")).items()}
    without = {name: x for name, x in state.items() if not name.endswith("1._o.bias")}
    without["_extra"] = np.zeros(1)
    with pytest.raises(
        CheckpointError, match=r"missing _hstu\._attention_layers\.1\._o\.bias; unexpected _extra"
    ):
        hstu_import.research(without, ["1"], "v", heads=2)
    short = state | {f"_hstu._attention_layers.{i}._rel_attn_bias._pos_w": np.zeros(37) for i in range(2)}
    with pytest.raises(CheckpointError, match=r"layers\.positions has shape \(2, 1, 37\), .* \(2, 1, 39\)"):
        hstu_import.research(short, ["1"], "v", heads=2)
    with pytest.raises(CheckpointError, match="rows 1 to 60; item 'x' is none of them"):
        hstu_import.research(state, ["1", "x"], "v", heads=2)
    with pytest.raises(CheckpointError, match="heads: 7 do not divide"):
        hstu_import.research(state, ["1"], "v", heads=7)
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must be a \.npz or \.safetensors"):
        hstu_import.read_state(tmp_path / "a.pt")
    (tmp_path / "a.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="cannot be read"):
        hstu_import.read_state(tmp_path / "a.npz")


def test_costs_are_those_of_the_products() -> None:
    cfg = dataclasses.replace(CFG, layers=3)
    assert of_history(4, cached=2) == Work(4, 2, 3 + 4 + 5 + 6)
    products = 12 * 2 * 2 * (4 + 6) + 2 * 6 * 12
    per_layer = 2 * (4 * products + 18 * 2 * (4 + 6))
    found = cost(cfg, of_history(4, cached=2))
    assert (found.flops, found.bytes) == (3 * per_layer, 3 * 4 * (products + 6 * 2 * (4 + 6)))
