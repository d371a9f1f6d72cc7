# SPDX-License-Identifier: Apache-2.0
"""jgr.training.softmax against the formula with all scores at once, its gradients by automatic differentiation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.training import softmax
from jgr.training.softmax import softmax_nats

ROWS, PLACES, VOCABULARY, HIDDEN = 4, 9, 23, 8


def formula(hidden: Any, outputs: Any, bias: Any, targets: Any, weights: Any) -> jax.Array:
    scores = jnp.einsum("bnd,vd->bnv", hidden, outputs) + (0 if bias is None else bias)
    taken = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], -1)[..., 0]
    return -(weights * taken).sum()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [5, 12, 512])
def test_value_and_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, groups: int, biased: bool, chunk: int
) -> None:
    monkeypatch.setattr(softmax, "CHUNK", chunk)
    rng = np.random.default_rng(chunk + groups)
    hidden = jnp.asarray(rng.normal(size=(ROWS, PLACES, HIDDEN)), jnp.float32)
    outputs = jnp.asarray(rng.normal(size=(VOCABULARY, HIDDEN)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=VOCABULARY), jnp.float32) if biased else None
    targets = jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, PLACES)), jnp.int32)
    weights = jnp.asarray(rng.random((ROWS, PLACES)) * (rng.random((ROWS, PLACES)) < 0.4), jnp.float32)

    def found(hidden: Any, outputs: Any, bias: Any) -> jax.Array:
        return 3 * softmax_nats(hidden, outputs, targets, weights, bias=bias, groups=groups)

    def wanted(hidden: Any, outputs: Any, bias: Any) -> jax.Array:
        return 3 * formula(hidden, outputs, bias, targets, weights)

    value, gradients = jax.jit(jax.value_and_grad(found, (0, 1, 2)))(hidden, outputs, bias)
    right, right_gradients = jax.value_and_grad(wanted, (0, 1, 2))(hidden, outputs, bias)
    np.testing.assert_allclose(value, right, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, right_gradients)


def test_a_chunk_without_a_target_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of twelve places have one, all over the rows, and fill one chunk; the others are not numbers."""
    monkeypatch.setattr(softmax, "CHUNK", 3)
    real = np.zeros((3, 4), bool)
    real[0, 3] = real[1, 0] = real[2, 2] = True
    hidden = np.where(real[..., None], 1.0, np.nan).astype(np.float32) * np.ones(HIDDEN, np.float32)
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(VOCABULARY, HIDDEN)), jnp.float32)
    targets = jnp.asarray(np.arange(12).reshape(3, 4), jnp.int32)
    value, gradient = jax.value_and_grad(lambda x: softmax_nats(x, outputs, targets, jnp.asarray(real)))(
        hidden
    )
    right = formula(np.nan_to_num(hidden), outputs, None, targets, real)
    np.testing.assert_allclose(value, right, rtol=1e-5)
    assert np.isfinite(gradient).all() and (np.abs(gradient).sum(-1) > 0).tolist() == real.tolist()
