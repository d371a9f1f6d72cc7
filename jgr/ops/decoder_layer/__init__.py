# SPDX-License-Identifier: Apache-2.0
"""What stands around the attention of a decoder's layer (MODEL-1), each side in one op.

    attention_inputs:  q, k, v of rmsnorm(h), with heads normed and turned
    layer_output:      h + attended wo, and on top of it the gated MLP

Weights are stacks of all layers and the number of one, so that a loop over layers copies none out of its stack.
"""

from __future__ import annotations

from typing import Any

import jax

from jgr.ops.decoder_layer import native, reference
from jgr.ops.decoder_layer.arguments import Inputs, InputWeights, Output, OutputWeights
from jgr.ops.dispatch import Implementation, dispatch, fits, on_cpu

__all__ = ["InputWeights", "OutputWeights", "attention_inputs", "is_native", "layer_output"]

OF_INPUTS = (
    on_cpu(native.attention_inputs, native.supports),
    Implementation("reference", reference.attention_inputs),
)
OF_OUTPUT = (
    on_cpu(native.layer_output, native.supports),
    Implementation("reference", reference.layer_output),
)


def is_native(shape: tuple[int, ...], weights: InputWeights, head: int) -> bool:
    """Whether "auto" takes the library for h of a shape [B, T, D] and heads of so many numbers: else a decoder's own
    functions do as well."""
    h: Any = jax.ShapeDtypeStruct(shape, weights.norm.dtype)
    return fits(OF_INPUTS[0], Inputs(h, weights, h, h, h, 0.0, head)) is None


def attention_inputs(
    h: jax.Array,
    weights: InputWeights,
    number: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    head: int,
    queries: bool = True,
    real: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """The queries, keys and values of a layer: heads of rmsnorm(h) w + b, those of q and k normed and turned.

    Args:
        h: [B, T, D], the layer's input.
        weights: of all layers; number: () int32, the layer that is meant.
        cos, sin: [B, T, 1, d / 2] float32; dimension i of a head is turned with i + d / 2.
        eps: of the norms. head: d, an even number.
        queries: whether the queries are computed.
        real: [B, T] bool, which tokens are no padding; default all. What others get is finite where h is, no more.

    Returns:
        q [B, T, H, d], or None where they are not wanted, and k and v [B, K, T, d].
    """
    call = Inputs(h, weights, number, cos, sin, eps, head, queries, real)
    made: tuple[jax.Array | None, jax.Array, jax.Array] = dispatch(
        "attention_inputs", OF_INPUTS, implementation, call
    )
    return made


def layer_output(
    h: jax.Array,
    attended: jax.Array,
    weights: OutputWeights,
    number: jax.Array,
    *,
    eps: float,
    real: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """y + (silu(x gate) * (x up)) down, where y = h + attended wo and x = rmsnorm(y).

    Args:
        h: [B, T, D], the layer's input.
        attended: [B, T, H * d], what its attention gave.
        weights: of all layers; number: () int32, the layer that is meant.
        eps: of the norm. real: as in attention_inputs.

    Returns:
        [B, T, D], the layer's output.
    """
    call = Output(h, attended, weights, number, eps, real)
    out: jax.Array = dispatch("layer_output", OF_OUTPUT, implementation, call)
    return out
