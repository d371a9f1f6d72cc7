# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (MODEL-2): pairs of dimensions are turned by angles that grow with the position.

So the product of a query and a key depends on their distance alone, and what was turned for one position can be turned
on to another (PIC-1).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (MODEL-2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """[d / 2] float32 rotation per position of each pair of dimensions."""
    half = head_dim // 2
    freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return jnp.asarray(freq)
    wavelength = 2 * jnp.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((scaling.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
    return jnp.asarray((1 - smooth) * freq / scaling.factor + smooth * freq)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate dimension i with i + d/2. x: [..., heads, d]; cos, sin: [..., 1, d / 2] float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
