# SPDX-License-Identifier: Apache-2.0
"""Weight matrices of 8-bit numbers, with a factor for each output channel, and their products.

The one idea: the factor belongs to a column of the matrix, so it is applied to the product's column, which is the same
number. What multiplies is the matrix of small numbers, which every float type of activations holds exactly.

The matrix as floats lives for its product alone. Without the barrier XLA for GPUs makes those of all layers once, for
the prompt and all steps of a search, and they are in memory together; with it, most products are one kernel that reads
8 bits. fp8 is held as bits, since XLA for CPUs makes 16 bits of a stack of an 8-bit float type before it takes a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """The matrix values * scale, in the place of an array [..., D, F]."""

    values: Any  # [..., D, F] int8; or uint8, which are the bits of float8_e4m3fn
    scale: Any  # [..., F] float32, one factor for each output channel

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's, [..., D, F]."""
        return tuple(self.values.shape)


def product(x: jax.Array, w: Quantized) -> jax.Array:
    """x [..., D] times w [D, F]: [..., F], in the dtype of x, summed in float32."""
    values, x = jax.lax.optimization_barrier((w.values, x))
    if values.dtype == jnp.uint8:
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    summed = jnp.matmul(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    made: jax.Array = (summed * w.scale).astype(x.dtype)
    return made
