# SPDX-License-Identifier: Apache-2.0
"""dense and its gradient against those of x @ w."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops.dense import dense


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 4, 5)])
def test_values_and_gradients_are_those_of_the_product(shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], (5, 7))
    weight = jax.random.normal(keys[2], (*shape[:-1], 7))
    np.testing.assert_array_equal(dense(x, w), x @ w)
    ours = jax.grad(lambda x, w: (weight * jnp.sin(dense(x, w))).sum(), argnums=(0, 1))(x, w)
    plain = jax.grad(lambda x, w: (weight * jnp.sin(x @ w)).sum(), argnums=(0, 1))(x, w)
    for got, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_sixteen_bits_stay_sixteen_bits() -> None:
    x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16)
    gradients = jax.grad(lambda x, w: dense(x, w).astype(jnp.float32).sum(), argnums=(0, 1))(x, w)
    assert dense(x, w).dtype == gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
