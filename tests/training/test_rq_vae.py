# SPDX-License-Identifier: Apache-2.0
"""The RQ-VAE's loss and gradients against numpy and finite differences, and a small one that learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.training.rq_vae import (
    Layer,
    RqVaeConfig,
    RqVaeParams,
    batch_rows,
    initialize,
    reseed_dead,
    rq_vae_loss,
    train_rq_vae,
)
from jgr.training.semantic_ids import SemanticIdError, quantize, residual_kmeans

SMALL = RqVaeConfig(sizes=(8, 8), latent=4, hidden=(16,), steps=300, batch=64, learning_rate=3e-3)


def points(n: int = 256, e: int = 6) -> np.ndarray:
    """Points near a curved surface of three dimensions."""
    rng = np.random.default_rng(0)
    flat = rng.standard_normal((n, 3))
    curved = np.tanh(flat @ rng.standard_normal((3, e))) + 0.05 * rng.standard_normal((n, e))
    return curved.astype(np.float32)


def mlp(layers: tuple[Layer, ...], x: np.ndarray) -> np.ndarray:
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer.weight, np.float64) + np.asarray(layer.bias, np.float64)
        x = x if i == len(layers) - 1 else np.maximum(x, 0)
    return x


def quantised(
    params: RqVaeParams, z: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Per level: residuals before it, codes, codewords taken."""
    residuals, codes, words = [z], [], []
    for book in np.asarray(params.codebooks, np.float64):
        squared = ((residuals[-1][:, None] - book) ** 2).sum(axis=2)
        codes.append(squared.argmin(axis=1))
        words.append(book[codes[-1]])
        residuals.append(residuals[-1] - words[-1])
    return residuals, codes, words


def test_the_loss_is_the_formula() -> None:
    x = points(40)
    params = initialize(SMALL, x)
    loss, parts = rq_vae_loss(params, x, 0.25)
    residuals, codes, words = quantised(params, mlp(params.encoder, x))
    reconstruction = ((x - mlp(params.decoder, sum(words))) ** 2).sum(axis=1).mean()
    quantization = sum(
        1.25 * ((r - w) ** 2).sum(axis=1).mean() for r, w in zip(residuals[:-1], words, strict=True)
    )
    np.testing.assert_allclose(parts.reconstruction, reconstruction, rtol=1e-4)
    np.testing.assert_allclose(parts.quantization, quantization, rtol=1e-4)
    np.testing.assert_allclose(loss, reconstruction + quantization, rtol=1e-4)
    for taken, found in zip(parts.taken, codes, strict=True):
        np.testing.assert_array_equal(taken, np.bincount(found, minlength=8))


def test_each_gradient_goes_where_the_stop_gradients_let_it() -> None:
    x = points(40)
    params = initialize(SMALL, x)
    found = jax.grad(lambda p: rq_vae_loss(p, x, 0.25)[0])(params)
    residuals, codes, words = quantised(params, mlp(params.encoder, x))
    for level, codebook in enumerate(found.codebooks):  # only |sg(r) - c|^2 moves a codeword
        expected = np.zeros(codebook.shape)
        np.add.at(expected, codes[level], 2 * (words[level] - residuals[level]) / len(x))
        np.testing.assert_allclose(codebook, expected, atol=1e-4)
    # The encoder: the decoder's gradient at z^, taken over unchanged, and the commitment of every level.
    decode = jax.grad(
        lambda z: (
            jnp.square(
                x
                - jax.nn.relu(z @ params.decoder[0].weight + params.decoder[0].bias)
                @ params.decoder[1].weight
                - params.decoder[1].bias
            )
            .sum(-1)
            .mean()
        )
    )
    at_z = np.asarray(decode(jnp.asarray(sum(words), jnp.float32)))
    at_z = at_z + sum(2 * 0.25 * (r - w) / len(x) for r, w in zip(residuals[:-1], words, strict=True))
    np.testing.assert_allclose(found.encoder[-1].bias, at_z.sum(axis=0), atol=1e-4)


def test_codebooks_start_from_a_residual_kmeans_of_the_first_batch() -> None:
    x = points(64)
    params = initialize(SMALL, x)
    latents = mlp(params.encoder, x).astype(np.float32)
    expected = residual_kmeans(latents, SMALL.sizes, seed=SMALL.seed)
    for book, wanted in zip(params.codebooks, expected.codebooks, strict=True):
        np.testing.assert_allclose(book, wanted, atol=1e-4)


def test_dead_codes_move_to_residuals_of_the_batch_and_living_ones_stay() -> None:
    x = points(64)
    identity = (Layer(jnp.eye(6), jnp.zeros(6)),)
    books = (jnp.zeros((3, 6)).at[1:].set(100.0), jnp.full((2, 6), 50.0))
    params = RqVaeParams(identity, identity, books)
    found = reseed_dead(params, [jnp.array([64, 0, 0]), jnp.array([0, 64])], x, np.random.default_rng(0))
    first, second = np.asarray(found.codebooks[0]), np.asarray(found.codebooks[1])
    assert not first[0].any() and (second[1] == 50).all()
    rows = [int(np.flatnonzero((np.abs(x - word) < 1e-6).all(axis=1))[0]) for word in first[1:]]
    assert len(set(rows)) == 2
    left = quantize(x, [first]).residual(1)
    assert (np.abs(left - second[0]) < 1e-6).all(axis=1).any()


def test_more_dead_codes_than_rows() -> None:
    x = points(2)
    identity = (Layer(jnp.eye(6), jnp.zeros(6)),)
    params = RqVaeParams(identity, identity, (jnp.full((5, 6), 9.0),))
    moved = np.asarray(reseed_dead(params, [jnp.zeros(5)], x, np.random.default_rng(0)).codebooks[0])
    assert (moved != 9).all(axis=1).tolist() == [True, True, False, False, False]


def test_an_epoch_shows_every_item_once() -> None:
    config = dataclasses.replace(SMALL, batch=5)
    epochs = [[batch_rows(config, 20, 4 * e + i) for i in range(4)] for e in (0, 1)]
    assert [np.sort(np.concatenate(epoch)).tolist() for epoch in epochs] == [list(range(20))] * 2
    assert (np.concatenate(epochs[0]) != np.concatenate(epochs[1])).any()
    assert sorted(batch_rows(config, 3, 7).tolist()) == [0, 1, 2]


def test_it_learns_and_more_levels_rebuild_better() -> None:
    seen: list[tuple[int, int]] = []
    two = train_rq_vae(points(), SMALL, lambda done, total, note: seen.append((done, total)))
    one = train_rq_vae(points(), dataclasses.replace(SMALL, sizes=(8,)))
    assert two.losses.shape == (300,) and two.losses[-20:].mean() < 0.5 * two.losses[:20].mean()
    assert two.error < 0.8 * one.error < one.error < 0.8
    assert two.quantized.codes.shape == (256, 2)
    assert [len(set(column)) for column in two.quantized.codes.T.tolist()] == [8, 8]
    assert seen == [(done, 300) for done in range(50, 301, 50)]
    # The error by hand, from the parameters.
    x = points().astype(np.float64)
    x = (x - x.mean(axis=0)) / np.sqrt(((x - x.mean(axis=0)) ** 2).mean())
    _, codes, words = quantised(two.params, mlp(two.params.encoder, x))
    np.testing.assert_array_equal(two.quantized.codes, np.stack(codes, axis=1))
    by_hand = ((x - mlp(two.params.decoder, sum(words))) ** 2).sum() / (x**2).sum()
    assert two.error == pytest.approx(by_hand, rel=1e-3)


def test_the_seed_decides_and_the_unit_does_not() -> None:
    config = dataclasses.replace(SMALL, steps=20)
    first, again = train_rq_vae(points(), config), train_rq_vae(points(), config)
    np.testing.assert_array_equal(first.losses, again.losses)
    np.testing.assert_array_equal(first.quantized.codes, again.quantized.codes)
    other = train_rq_vae(points(), dataclasses.replace(config, seed=1))
    assert (other.losses != first.losses).any()
    scaled = train_rq_vae(1024 * points() + 4096, config)
    np.testing.assert_allclose(scaled.losses, first.losses, rtol=1e-2)


def test_fewer_items_than_codes() -> None:
    found = train_rq_vae(points(5), dataclasses.replace(SMALL, steps=3, reseed_every=1))
    assert found.quantized.codes.shape == (5, 2) and np.isfinite(found.error)


@pytest.mark.parametrize(
    "wrong", [{"sizes": ()}, {"latent": 0}, {"steps": 0}, {"batch": 0}, {"reseed_every": 0}]
)
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(SemanticIdError):
        dataclasses.replace(SMALL, **wrong)


@pytest.mark.parametrize("vectors", [np.ones((4, 2), np.float32), np.full((4, 2), np.nan, np.float32)])
def test_vectors_that_teach_nothing(vectors: np.ndarray) -> None:
    with pytest.raises(SemanticIdError, match="all the same, or not finite"):
        train_rq_vae(vectors, SMALL)
