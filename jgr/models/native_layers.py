# SPDX-License-Identifier: Apache-2.0
"""A decoder's weights as the kernels of jgr-native take them (jgr.ops.decoder_layer)."""

from __future__ import annotations

from typing import Any

import jax

from jgr.ops.decoder_layer import InputWeights, OutputWeights, is_native


def native_weights(layers: Any, tokens: jax.Array, head: int) -> tuple[InputWeights, OutputWeights] | None:
    """The weights of a stack of layers (jgr.models.decoder.LayerParams), or None where "auto" does not take the
    kernels for prompts [B, T] and heads of so many numbers, or where the layers are apart."""
    if type(layers) is tuple:
        return None
    x = layers
    weights = InputWeights(x.attention_norm, x.wq, x.wk, x.wv, x.bq, x.bk, x.bv, x.q_norm, x.k_norm)
    is_taken = is_native((*tokens.shape, x.attention_norm.shape[1]), weights, head)
    return (weights, OutputWeights(x.wo, x.mlp_norm, x.gate, x.up, x.down)) if is_taken else None
