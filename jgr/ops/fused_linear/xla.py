# SPDX-License-Identifier: Apache-2.0
"""A fused linear layer with the product in the arrays' own dtype, left to XLA to fuse with what surrounds it."""

from __future__ import annotations

import jax

from jgr.ops.dense import dense
from jgr.ops.dispatch import target_platform
from jgr.ops.exponential import exp_negative
from jgr.ops.fused_linear.arguments import ACTIVATIONS, Layer, finished, gelu_by_series, normalized

_ON_CPU = {**ACTIVATIONS, "gelu": lambda x: gelu_by_series(x, exp_negative)}


def fused_linear(layer: Layer) -> jax.Array:
    """See jgr.ops.fused_linear."""
    x = normalized(layer).astype(layer.w.dtype) if layer.normalize else layer.x
    activations = _ON_CPU if target_platform() == "cpu" else ACTIVATIONS
    return finished(layer, dense(x, layer.w), activations)
