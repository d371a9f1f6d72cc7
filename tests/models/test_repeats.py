# SPDX-License-Identifier: Apache-2.0
"""Weights of the history's items by their age: buckets, windows and scores against plain loops."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import ConfigError, TrainConfig
from jgr.data.interactions import Ragged
from jgr.models import repeats, retrievers, scorers
from jgr.models.params import CheckpointError, initialize
from jgr.models.retrievers import RetrieverConfig, RetrieverParams

ITEMS, PLACES = 12, 9
HISTORIES = [[3, 5, 3, 7, 5, 5, 1], [4], [2, 2, 2, 9, 0, 11, 2, 8, 9], [6, 10, 6]]


def bucket_by_hand(age: int) -> int:
    """Two to an octave of age + 1, and the first bucket alone."""
    octave = math.floor(math.log2(age + 1))
    upper = age + 1 >= 1.5 * 2**octave
    return 0 if octave == 0 else 2 * octave + upper - 1


def added_by_hand(weights: np.ndarray, history: list[int], items: int) -> np.ndarray:
    """What the history adds to the score of each item, [items], by a loop from the newest event."""
    found = np.zeros(items)
    for item in set(history):
        age = next(ago for ago in range(len(history)) if history[len(history) - 1 - ago] == item)
        found[item] = 4 * weights[bucket_by_hand(age)]
    return found


def model(name: str, on: bool = True) -> tuple[RetrieverConfig, RetrieverParams]:
    """A retriever with weights of some size."""
    train = TrainConfig(
        model=name,  # type: ignore[arg-type]
        max_items=PLACES,
        hidden=8,
        layers=2,
        heads=2,
        kv_heads=2,
        mlp=8,
        repeats=on,
    )
    cfg = retrievers.make_config(train, [str(row) for row in range(ITEMS)])
    params = initialize(retrievers.retriever(cfg).spec(cfg), jax.random.key(0))
    if on:
        drawn = np.random.default_rng(5).normal(size=params.repeats.shape).astype(np.float32)
        params = dataclasses.replace(params, repeats=drawn)
    return cfg, params


def padded(histories: list[list[int]]) -> np.ndarray:
    return np.array([history + [-1] * (PLACES - len(history)) for history in histories], np.int32)


def test_buckets_are_two_to_an_octave() -> None:
    assert repeats.buckets(4000).tolist() == [bucket_by_hand(age) for age in range(4000)]
    assert repeats.buckets(1).tolist() == [0] and repeats.spec(1).shape == (1,)
    assert repeats.spec(50).shape == (11,)


def test_candidates_are_aged_by_their_latest_event() -> None:
    rng = np.random.default_rng(0)
    for history in [*HISTORIES, []]:
        asked = rng.integers(0, ITEMS, 40).astype(np.int32)
        wanted = [
            bucket_by_hand(history[::-1].index(item)) if item in history else -1 for item in asked.tolist()
        ]
        assert repeats.buckets_of(padded([history])[0], asked).tolist() == wanted
    assert repeats.buckets_of(padded([[1]])[0], np.zeros(0, np.int32)).tolist() == []


def test_what_every_place_adds_is_that_of_the_events_up_to_it() -> None:
    weights = np.random.default_rng(1).normal(size=repeats.spec(PLACES).shape).astype(np.float32)
    rows = padded(HISTORIES)
    seen = repeats.window(jnp.asarray(rows))
    drawn = np.array([2, 5, 5, 11, 0], np.int32)
    targets = np.random.default_rng(2).integers(0, ITEMS, rows.shape).astype(np.int32)
    of_drawn = np.asarray(repeats.of_drawn(jnp.asarray(weights), seen, jnp.asarray(drawn)))
    of_targets = np.asarray(repeats.of_targets(jnp.asarray(weights), seen, jnp.asarray(targets)))
    for row, history in enumerate(HISTORIES):
        for place in range(len(history)):
            wanted = added_by_hand(weights, history[: place + 1], ITEMS)
            np.testing.assert_allclose(of_drawn[row, place], wanted[drawn], rtol=1e-6)
            np.testing.assert_allclose(of_targets[row, place], wanted[targets[row, place]], rtol=1e-6)


@pytest.mark.parametrize("name", retrievers.MODELS)
def test_a_retriever_adds_the_weights_and_changes_nothing_else(name: str) -> None:
    cfg, params = model(name)
    bare, without = dataclasses.replace(cfg, repeats=False), dataclasses.replace(params, repeats=None)
    rows = padded(HISTORIES)
    plain = np.asarray(retrievers.scores_after(without, rows, cfg=bare))
    found = np.asarray(retrievers.scores_after(params, rows, cfg=cfg))
    wanted = plain + [added_by_hand(np.asarray(params.repeats), history, ITEMS) for history in HISTORIES]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    ranked = retrievers.top_k(params, cfg, Ragged.of(HISTORIES), ITEMS, exclude_seen=False)
    np.testing.assert_array_equal(ranked, np.argsort(-wanted, axis=1))

    scorer = scorers.scorer(cfg)
    read, score = jax.jit(scorer.read, static_argnums=1), jax.jit(scorer.score, static_argnums=1)
    nothing = jnp.zeros(rows.shape, jnp.int32)
    users = scorers.Users(jnp.asarray(rows), nothing, nothing, nothing[:, 0], nothing[:, :0], nothing[:, 0])
    asked = np.tile(np.arange(ITEMS, dtype=np.int32)[::-1], (len(rows), 1))
    ages = np.stack([repeats.buckets_of(row, own) for row, own in zip(rows, asked, strict=True)])
    state = read(params, cfg, users)
    given = scorers.Candidates(jnp.asarray(asked), {}, jnp.asarray(ages))
    np.testing.assert_allclose(
        np.asarray(score(params, cfg, state, given))[..., 0], wanted[:, ::-1], atol=1e-5
    )
    with pytest.raises(ValueError, match="ages"):
        score(params, cfg, state, given._replace(ages=None))


@pytest.mark.parametrize("name", retrievers.MODELS)
def test_the_option_and_the_weights_are_in_the_folder(name: str, tmp_path: Path) -> None:
    cfg, params = model(name)
    retrievers.save(tmp_path / "on", cfg, params, lambda folder: None)
    again, read = retrievers.load(tmp_path / "on")
    assert again == cfg and again.repeats
    np.testing.assert_array_equal(read.repeats, params.repeats)
    off, none = model(name, on=False)
    assert none.repeats is None and scorers.scorer(off).needs(off).repeats is False
    # Off, every parameter is drawn as it was before there was the option.
    jax.tree.map(np.testing.assert_array_equal, none, dataclasses.replace(params, repeats=None))
    retrievers.save(tmp_path / "off", off, none, lambda folder: None)
    config = (tmp_path / "off" / "config.json").read_text()
    (tmp_path / "off" / "config.json").write_text(config.replace('"repeats": false', '"repeats": true'))
    with pytest.raises(CheckpointError):
        retrievers.load(tmp_path / "off")


def test_only_retrievers_learn_it() -> None:
    with pytest.raises(ConfigError, match=r"train\.repeats: train\.model=generator is no retriever"):
        TrainConfig(model="generator", repeats=True)
