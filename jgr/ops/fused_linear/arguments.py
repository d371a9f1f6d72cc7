# SPDX-License-Identifier: Apache-2.0
"""The arguments of a fused linear layer as its forms take them, and the activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

EPS = 1e-6
"""Added to the variance, so that a row of equal values has a norm."""

Activation = Literal["none", "silu", "gelu", "relu"]


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "relu": jax.nn.relu,
}


def gelu_by_series(x: jax.Array, exp_negative: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """gelu of float32 of any shape, for Triton, which has no error function, and XLA:CPU, whose own is slow.

    It is formula 7.1.26 of Abramowitz and Stegun, within 1.5e-7 of the error function.
    """
    size = jnp.abs(x) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * size)
    factors = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = functools.reduce(lambda total, factor: total * t + factor, factors, jnp.zeros_like(t)) * t
    tail = 0.5 * series * exp_negative(-size * size)
    return x * jnp.where(x < 0, tail, 1.0 - tail)


class Layer(NamedTuple):
    """A call of fused_linear. x: [M, D]. w: [D, F]. bias: [F]. scale, shift: [D] of the norm. residual: [M, F]."""

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None
    shift: jax.Array | None
    residual: jax.Array | None
    normalize: bool
    activation: Activation


def normalized(layer: Layer) -> jax.Array:
    """x after its norm, which the matrix is multiplied with: [M, D] float32."""
    x = layer.x.astype(jnp.float32)
    if not layer.normalize:
        return x
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)
    if layer.scale is not None:
        x = x * layer.scale.astype(jnp.float32)
    return x if layer.shift is None else x + layer.shift.astype(jnp.float32)


def finished(
    layer: Layer,
    product: jax.Array,
    activations: Mapping[str, Callable[[jax.Array], jax.Array]] = ACTIVATIONS,
) -> jax.Array:
    """The result, in x's dtype: bias, activation and residual, computed in float32 on the product [M, F]."""
    out = product.astype(jnp.float32)
    if layer.bias is not None:
        out = out + layer.bias.astype(jnp.float32)
    out = activations[layer.activation](out)
    if layer.residual is not None:
        out = out + layer.residual.astype(jnp.float32)
    return out.astype(layer.x.dtype)
