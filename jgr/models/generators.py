# SPDX-License-Identifier: Apache-2.0
"""The interface of models that the beam search can use: five functions, found by the type of the config.

The beam search knows a generator only by these. `begin` reads the prompt once for all beams; `advance` adds one token a
beam; the state between them is the generator's own, and holds nothing that is reordered: beams are told apart by the
table of ancestors.

Letters: B batch, T tokens, W beams, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import PromptConfig
from jgr.models import decoder, lazy_decoder
from jgr.models.decoder import DecoderConfig, DecoderParams, LayerParams
from jgr.models.joined_layers import joined
from jgr.models.lazy_decoder import Block, LazyConfig, LazyParams
from jgr.models.params import PyTree, layer_of, split_layers
from jgr.models.quantize import kind_of
from jgr.ops.dispatch import target_platform
from jgr.ops.quantized import Quantized
from jgr.ops.tiled import is_wanted, tiled

GeneratorConfig = DecoderConfig | LazyConfig
"""Each has family, vocab_size, hidden, layers, and max_position: the most tokens of a prompt and an item together."""
GeneratorParams = DecoderParams | LazyParams
"""Each has output_rows [V, D]: the output row of each token, whichever level it belongs to."""


class Generator(Protocol):
    """The module of a generator."""

    def spec(self, cfg: Any) -> PyTree:
        """The declaration of every parameter."""

    def begin(self, params: Any, cfg: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        """Read prompts [B, T] int32, right padded, of lengths [B]; returns their last hidden [B, 1, D] and a state.

        The product of the hidden state and output_rows gives the logits of the first generated token.
        """

    def advance(
        self, params: Any, cfg: Any, tokens: jax.Array, state: Any, ancestors: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The s-th generated token [B, W] int32 of every beam -> hidden [B, W, D], and the state of s + 1 tokens.

        ancestors: [B, s + 1, W] int32, the row in which each token of a beam was computed; the last is the beam's own.
        """

    def next_logits(self, params: Any, cfg: Any, hidden: jax.Array, level: int) -> tuple[jax.Array, int]:
        """The logits [..., V'] float32 of all tokens that the model may give at a level, and the first of these tokens.

        hidden: [..., D]. The tokens are first, first + 1, ...
        """

    def misfit(self, cfg: Any, prompt: PromptConfig, level_tokens: Sequence[npt.NDArray[np.int32]]) -> str:
        """Say why the model cannot read such prompts or generate the tokens of a catalog's levels; empty: it can."""


_GENERATORS: dict[type, Generator] = {DecoderConfig: decoder, LazyConfig: lazy_decoder}


def generator(cfg: GeneratorConfig) -> Generator:
    """The functions of the model that a config describes."""
    return _GENERATORS[type(cfg)]


def laid_out(params: GeneratorParams, devices: int = 1) -> GeneratorParams:
    """The parameters in the form that is fastest on this platform. devices: how many share them.

    On a CPU a stack starts faster, and its layers are not copied before they are used; a decoder's matrices in bfloat16
    are tiled where one with AMX has them alone. A GPU takes layers apart, and joined where it has them alone: joined
    matrices cannot be divided by heads.
    """
    if target_platform() != "gpu":
        if isinstance(params, DecoderParams) and devices == 1 and is_wanted(params.embed.dtype):
            return with_matrices_tiled(params)
        return params
    return with_layers_joined(params) if devices == 1 else with_layers_apart(params)


def compiler_options(params: GeneratorParams) -> dict[str, bool]:
    """XLA's options for programs over these parameters.

    On an H200, cuBLAS alone was up to 8 % faster than with Triton's products beside it, for which sums of parts follow.
    But those read matrices in 8 bits without widening them first.
    """
    return {"xla_gpu_enable_triton_gemm": False} if target_platform() == "gpu" and not kind_of(params) else {}


def with_matrices_tiled(params: DecoderParams) -> DecoderParams:
    """The same parameters, the layers' matrices tiled (jgr.ops.tiled); those in 8 bits stay as they are."""

    def is_quantized(x: Any) -> bool:
        return isinstance(x, Quantized)

    def of(x: Any) -> Any:
        return tiled(x) if not is_quantized(x) and x.ndim == 3 and x.dtype == jnp.bfloat16 else x

    return replace(params, layers=jax.tree.map(of, params.layers, is_leaf=is_quantized))


def with_layers_joined(params: GeneratorParams) -> GeneratorParams:
    """The same parameters, a decoder's layers joined (jgr.models.joined_layers), those of other generators apart."""
    if not isinstance(params, DecoderParams):
        return with_layers_apart(params)
    count = params.layers.attention_norm.shape[0]
    return replace(params, layers=tuple(joined(layer_of(params.layers, n)) for n in range(count)))


def with_layers_apart(params: GeneratorParams) -> GeneratorParams:
    """The same parameters, each layer's in arrays of their own, copied out of the stacks."""

    def is_stack(x: Any) -> bool:
        return isinstance(x, LayerParams | Block)

    apart: GeneratorParams = jax.tree.map(
        lambda x: split_layers(x) if is_stack(x) else x, params, is_leaf=is_stack
    )
    return apart
