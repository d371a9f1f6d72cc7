# SPDX-License-Identifier: Apache-2.0
"""A root mean square norm, with a sum before it, in one pass over memory (MODEL-1)."""

from __future__ import annotations

import jax

from jgr.ops.add_norm import pallas_triton, reference
from jgr.ops.dispatch import Implementation, dispatch, kernel

__all__ = ["IMPLEMENTATIONS", "add_norm"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.add_norm, pallas_triton.interpreted, pallas_triton.supports),
    Implementation("reference", reference.add_norm),
)


def add_norm(
    x: jax.Array, added: jax.Array | None, scale: jax.Array, *, eps: float, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """y = x + added, and y / sqrt(mean(y^2) + eps) * scale, with statistics in float32.

    Args:
        x, added: [..., D] of one dtype; None adds nothing. scale: [D] of the same.
        eps: of the norm.

    Returns:
        Both as [..., D] in x's dtype. The norm is cast to it before it is multiplied with the scale.
    """
    rows, more = (None if z is None else z.reshape(-1, z.shape[-1]) for z in (x, added))
    made = dispatch("add_norm", IMPLEMENTATIONS, implementation, rows, more, scale, eps)
    total, normed = (z.reshape(x.shape) for z in made)
    return total, normed
