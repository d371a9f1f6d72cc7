# SPDX-License-Identifier: Apache-2.0
"""Layer norm, matrix product, activation and residual in one op (FLAME-9)."""

from __future__ import annotations

import jax

from jgr.ops.dispatch import Implementation, dispatch, kernel
from jgr.ops.fused_linear import pallas_triton, reference, xla
from jgr.ops.fused_linear.arguments import ACTIVATIONS, Activation, Layer

__all__ = ["IMPLEMENTATIONS", "Activation", "fused_linear"]

IMPLEMENTATIONS = (
    *kernel(pallas_triton.fused_linear, pallas_triton.interpreted, pallas_triton.supports),
    Implementation("xla", xla.fused_linear),
    Implementation("reference", reference.fused_linear),
)


def fused_linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    normalize: bool = True,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    activation: Activation = "none",
    residual: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """activation(norm(x) @ w + bias) + residual, where norm(x) = (x - mean) / sqrt(variance + 1e-6) * scale + shift.

    Statistics, sums, activation and residual are in float32; the product's factors are in the arrays' dtype. The forms
    "xla" and "reference" have gradients.

    Args:
        x: [..., D].
        w: [D, F] in x's dtype.
        bias: [F], or None for none.
        normalize: whether there is a norm. scale, shift: [D] of the norm, or None for none.
        activation: "none", "silu", "gelu" (by the error function) or "relu".
        residual: [..., F], or None for none.

    Returns:
        [..., F] in x's dtype.

    Raises:
        ValueError: shapes that do not fit, a scale or shift without a norm, or what the named form cannot run.
    """
    inner, width = w.shape
    wanted = {
        "x": (x, (*x.shape[:-1], inner)),
        "bias": (bias, (width,)),
        "scale": (scale, (inner,)),
        "shift": (shift, (inner,)),
        "residual": (residual, (*x.shape[:-1], width)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} is {list(array.shape)}, and must be {list(shape)} as w is {list(w.shape)}"
            )
    if not normalize and (scale is not None or shift is not None):
        raise ValueError("scale and shift belong to a norm, which normalize=False leaves out")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, not one of {sorted(ACTIVATIONS)}")
    rows = None if residual is None else residual.reshape(-1, width)
    layer = Layer(x.reshape(-1, inner), w, bias, scale, shift, rows, normalize, activation)
    out: jax.Array = dispatch("fused_linear", IMPLEMENTATIONS, implementation, layer)
    return out.reshape(*x.shape[:-1], width)
