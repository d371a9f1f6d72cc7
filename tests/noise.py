# SPDX-License-Identifier: Apache-2.0
"""Noise on drawn parameters, by numpy: jax would compile a program to draw and one to add for every shape."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Params = TypeVar("Params")


def noisy(drawn: Params, scale: float) -> Params:
    """The parameters where nothing is zero or one. Arrays of one shape get the same noise."""

    def changed(x: jax.Array) -> jax.Array:
        noise = np.random.default_rng(x.size).standard_normal(x.shape, np.float32)
        return jnp.asarray(np.asarray(x) + np.float32(scale) * noise)

    found: Params = jax.tree.map(changed, drawn)
    return found
