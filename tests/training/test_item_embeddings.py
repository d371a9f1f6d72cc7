# SPDX-License-Identifier: Apache-2.0
"""Item embeddings made of vectors: the loss, its gradients, and a training whose model needs no vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import Config, ConfigError, TrainConfig
from jgr.models import retrievers
from jgr.models.params import initialize
from jgr.models.retrievers import retriever
from jgr.training import item_embeddings, item_vectors
from jgr.training.item_vectors import VectorError
from jgr.training.retriever import softmax_loss, train_retriever
from tests.training.test_trainer import rule_dataset

TRAIN = TrainConfig(
    model="hstu", steps=12, batch=16, max_items=6, hidden=8, layers=1, heads=2, kv_heads=2, dropout=0,
    learning_rate=1e-2, warmup_steps=1, evaluate_every=6, checkpoint_every=6,
)  # fmt: skip


def test_the_loss_is_that_of_the_sum_and_reaches_both_parts() -> None:
    cfg = retrievers.make_config(TRAIN, [str(i) for i in range(9)])
    specs = item_embeddings.spec(retriever(cfg).spec(cfg), 3)
    params = initialize(specs, jax.random.key(0))
    vectors = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    windows, key = jnp.array([[1, 2, 3, 8], [4, 0, -1, -1]]), jax.random.key(1)
    plain = softmax_loss(cfg, 0, 0.0)
    loss = item_embeddings.informed_loss(plain, vectors)
    whole = replace(params.model, embed=params.model.embed + vectors @ params.projection)
    nats, of_sum = jax.jit(jax.value_and_grad(lambda p: plain(p, windows, key)[0]))(whole)
    found, of_parts = jax.jit(jax.value_and_grad(lambda p: loss(p, windows, key)[0]))(params)
    assert float(found) == pytest.approx(float(nats), rel=1e-6)
    np.testing.assert_allclose(of_parts.model.embed, of_sum.embed, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_parts.projection, vectors.T @ of_sum.embed, rtol=1e-4, atol=1e-5)


def test_a_trained_folder_holds_the_sum_alone_and_another_file_is_another_run(tmp_path: Path) -> None:
    dataset = rule_dataset()
    n = dataset.catalog.n_items
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for seed, file in enumerate(files):
        np.save(file, np.random.default_rng(seed).standard_normal((n, 4)).astype(np.float32))
    train = replace(TRAIN, out=str(tmp_path / "out"), item_vectors=",".join(map(str, files)))
    seen = []

    def validate(cfg: retrievers.RetrieverConfig, params: retrievers.RetrieverParams) -> float:
        seen.append(np.asarray(params.embed))
        return float(len(seen))

    train_retriever(Config(train=train), dataset, validate=validate)
    _, params = retrievers.load_for(tmp_path / "out", dataset.catalog.item_ids)
    assert len(seen) == 2
    np.testing.assert_allclose(np.asarray(params.embed), seen[-1], atol=1e-6)
    np.save(files[1], np.zeros((n, 4), np.float32))
    with pytest.raises(ConfigError, match="vectors"):
        train_retriever(Config(train=train), dataset)


def test_vectors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    assert item_vectors.read_vectors(f"{tmp_path}/a.npy, {tmp_path}/a.npy", 3).shape == (3, 4)
    with pytest.raises(VectorError, match="expected shape"):
        item_vectors.read_vectors(str(tmp_path / "a.npy"), 4)
    with pytest.raises(ConfigError, match=r"train\.item_vectors: train\.model=ranker is neither"):
        TrainConfig(model="ranker", item_vectors="a.npy")
