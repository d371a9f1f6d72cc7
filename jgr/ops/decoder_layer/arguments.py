# SPDX-License-Identifier: Apache-2.0
"""The arguments of the two ops, as all their forms take them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jgr.ops.quantized import Quantized
from jgr.ops.tiled import Tiled

Matrices = jax.Array | Quantized | Tiled
"""A stack of matrices [L, D, F], of the dtype of everything else, as it is or in tiles, or in 8 bits."""


class InputWeights(NamedTuple):
    """What stands in front of an attention. Stacks of L layers; None where the family has none."""

    norm: jax.Array  # [L, D]: scale of the norm
    wq: Matrices  # [L, D, H * d]
    wk: Matrices  # [L, D, K * d]
    wv: Matrices  # [L, D, K * d]
    bq: jax.Array | None = None  # [L, H * d]
    bk: jax.Array | None = None  # [L, K * d]
    bv: jax.Array | None = None  # [L, K * d]
    q_norm: jax.Array | None = None  # [L, d]: scale of the norm of each head
    k_norm: jax.Array | None = None  # [L, d]


class OutputWeights(NamedTuple):
    """What follows an attention. Stacks of L layers."""

    wo: Matrices  # [L, H * d, D]
    norm: jax.Array  # [L, D]: scale of the norm before the MLP
    gate: Matrices  # [L, D, F]
    up: Matrices  # [L, D, F]
    down: Matrices  # [L, F, D]


class Inputs(NamedTuple):
    """A call of attention_inputs. head: d. wants_queries: whether there are queries among the results. real: None where
    all tokens are."""

    h: jax.Array
    weights: InputWeights
    number: jax.Array
    cos: jax.Array
    sin: jax.Array
    eps: float
    head: int
    wants_queries: bool = True
    real: jax.Array | None = None


class Output(NamedTuple):
    """A call of layer_output. real: as in Inputs."""

    h: jax.Array
    attended: jax.Array
    weights: OutputWeights
    number: jax.Array
    eps: float
    real: jax.Array | None = None
