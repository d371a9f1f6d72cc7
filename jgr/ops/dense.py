# SPDX-License-Identifier: Apache-2.0
"""x @ w with a gradient that XLA:CPU computes well; and products with quantised and tiled matrices, without one.

JAX's own rule makes the gradient of w as (g^T x)^T. XLA:CPU then recomputes g, often a chain of elementwise functions,
in transposed order: strided reads that cost more than the matmul. x^T g needs no such copy.
"""

from __future__ import annotations

import jax

from jgr.ops import quantized, tiled
from jgr.ops.quantized import Quantized
from jgr.ops.tiled import Tiled


def dense(x: jax.Array, w: jax.Array | Quantized | Tiled) -> jax.Array:
    """The product of x [..., D] and w [D, F]: [..., F], in the dtype of x, which an array w has too."""
    if isinstance(w, Tiled):
        return tiled.product(x, w)
    return quantized.product(x, w) if isinstance(w, Quantized) else _dense(x, w)


@jax.custom_vjp
def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ w, (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    rows, gradient = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return g @ w.T, jax.lax.dot_general(rows, gradient, (((0,), (0,)), ((), ())))


_dense.defvjp(_forward, _backward)
