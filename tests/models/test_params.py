# SPDX-License-Identifier: Apache-2.0
"""How parameters are drawn, against jax's own functions at each parameter's shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jgr.models.params import SMALL, Spec, initialize


def test_parameters_of_few_and_of_many_numbers_are_those_of_their_keys() -> None:
    shapes = ((3, 5), (2, SMALL // 2 + 1))
    specs = [*(Spec(shape, ("a", "b"), fan_in=4) for shape in shapes), Spec((7,), ("a",), "ones")]
    key = jax.random.key(3)
    *drawn, ones = initialize(specs, key, jnp.bfloat16)
    for number, (shape, values) in enumerate(zip(shapes, drawn, strict=True)):
        right = 0.5 * jax.random.normal(jax.random.fold_in(key, number), shape)
        np.testing.assert_array_equal(values, right.astype(jnp.bfloat16))
    np.testing.assert_array_equal(ones, jnp.ones(7, jnp.bfloat16))
