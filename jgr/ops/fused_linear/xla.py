# SPDX-License-Identifier: Apache-2.0
"""A fused linear layer with the product in the arrays' own dtype, left to XLA to fuse with what surrounds it."""

from __future__ import annotations

import jax

from jgr.ops.dense import dense
from jgr.ops.fused_linear.arguments import Layer, finished, normalized


def fused_linear(layer: Layer) -> jax.Array:
    """See jgr.ops.fused_linear."""
    x = normalized(layer).astype(layer.w.dtype) if layer.normalize else layer.x
    return finished(layer, dense(x, layer.w))
