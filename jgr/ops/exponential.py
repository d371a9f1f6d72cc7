# SPDX-License-Identifier: Apache-2.0
"""An exp of float32 that XLA:CPU vectorises; XLA's own exp takes three times as long there.

exp(x) = 2^n 2^f with n + f = x / ln 2: n is the nearest whole number and is added to the exponent's bits; f is at most
one half, where a polynomial of degree 5 has a relative error of 8e-8. Rounding x / ln 2 adds 6e-8 |x|.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jgr.ops.dispatch import target_platform

_LEAST = -126.0
_WHOLE = 1.5 * 2**23  # a whole number added to it stands in its lowest bits
_POLYNOMIAL = (
    1.327647199276538e-3,
    9.675541334453464e-3,
    5.550713273497202e-2,
    2.4022119723839996e-1,
    6.93146967064761e-1,
    1.0000000716546849,
)
"""The coefficients, from f^5 down, with the least relative error of 2^f."""


@jax.custom_jvp
def exp_negative(x: jax.Array) -> jax.Array:
    """exp(x) of float32 x <= 0, of any shape. On a CPU the result is at least 2^-126; elsewhere it is JAX's own."""
    if target_platform() != "cpu":
        return jnp.exp(x)
    power = jnp.maximum(x * math.log2(math.e), _LEAST)
    whole = jnp.round(power)
    value = jnp.full_like(power, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        value = value * (power - whole) + coefficient
    exponent = jax.lax.bitcast_convert_type(whole + _WHOLE, jnp.int32) << 23
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(value, jnp.int32) + exponent, jnp.float32
    )


@exp_negative.defjvp
def _derivative(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    value = exp_negative(*primals)
    return value, value * tangents[0]
