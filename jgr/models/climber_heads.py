# SPDX-License-Identifier: Apache-2.0
"""What Climber does after its blocks: bit-wise gating fusion of their outputs, experts, and a tower for each task.

Letters as in jgr.models.climber: N_b blocks, D hidden, H heads, F width of an MLP, X experts, P tasks; n candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgr.models.hstu import standard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fusion:
    """Bit-wise gating fusion of the blocks' outputs."""

    norm: Any  # [2, D]: scale minus 1, and bias
    qkv: Any  # [D, 3 D]: queries, keys and values of the attention over the blocks
    out: Any  # [D, D]: its output projection
    gate1: Any  # [N_b, D, D], from the blocks' outputs, which lie one after the other
    gate2: Any  # [N_b, D, D], to a gate for each number of each block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """Experts that the tasks share, the tasks' gates over them, and towers."""

    expert1: Any  # [X, D, F]: first matrix of each expert
    expert1_bias: Any  # [X, F]: its bias
    expert2: Any  # [X, F, D]: second matrix of each expert
    gates: Any  # [P, D, X]: each task's gate over the experts
    tower1: Any  # [P, D, D]: first matrix of each task's tower
    tower1_bias: Any  # [P, D]: its bias
    tower2: Any  # [P, D]: second matrix of the tower
    tower2_bias: Any  # [P]: its bias


def _shares(logits: Sequence[jax.Array]) -> list[jax.Array]:
    """A softmax over the arrays of a list, which is short: XLA:CPU is slow to reduce an axis that is not the last."""
    top = functools.reduce(jnp.maximum, logits)
    weights = [jnp.exp(x - top) for x in logits]
    total = sum(weights[1:], weights[0])
    return [x / total for x in weights]


def fuse(weights: Fusion, x: jax.Array, heads: int) -> jax.Array:
    """Fuse the blocks' outputs x, E [N_b, n, D], into z [n, D]. Sums over a head are products with matrices of ones."""
    hidden = x.shape[-1]
    of_head = jnp.repeat(jnp.eye(heads, dtype=x.dtype), hidden // heads, axis=0)  # [D, H]
    projected = (standard(x) * (1 + weights.norm[0]) + weights.norm[1]) @ weights.qkv
    q, k, v = jnp.split(projected, 3, axis=-1)
    attended = []
    for asking in q:
        shares = _shares([(asking * key) @ of_head * (hidden // heads) ** -0.5 for key in k])
        attended.append(sum(share @ of_head.T * value for share, value in zip(shares, v, strict=True)))
    x = x + jnp.stack(attended) @ weights.out
    inner = jax.nn.relu(sum(block @ part for block, part in zip(x, weights.gate1, strict=True)))
    gate = jax.nn.sigmoid(inner @ weights.gate2)
    out: jax.Array = sum(y * block for y, block in zip(gate, x, strict=True))
    return out


def tasks(weights: Heads, z: jax.Array) -> jax.Array:
    """The tasks' probabilities [n, P] of inputs z [n, D]: each task mixes the experts by a gate of its own (MMoE)."""
    inner = jax.nn.relu(z @ weights.expert1 + weights.expert1_bias[:, None])
    experts = inner @ weights.expert2  # [X, n, D]
    mixed = []
    for gate in weights.gates:
        shares = jax.nn.softmax(z @ gate)[..., None]
        mixed.append(sum(shares[:, at] * expert for at, expert in enumerate(experts)))
    inner = jax.nn.relu(jnp.stack(mixed) @ weights.tower1 + weights.tower1_bias[:, None])
    return jax.nn.sigmoid((inner @ weights.tower2[..., None])[..., 0] + weights.tower2_bias[:, None]).T
