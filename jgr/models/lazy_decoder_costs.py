# SPDX-License-Identifier: Apache-2.0
"""The costs of OneRec-V2's lazy decoder (MODEL-22, MODEL-30). Imports no jax.

A prompt's tokens are items, `depth` tokens each; no layer runs over them. Reading a prompt is a product for each item,
and one pass of the start token, whose only key in the self-attention is its own.
"""

from __future__ import annotations

from typing import Protocol

from jgr.models.costs import Cost
from jgr.models.generator_costs import BeamStep, Decode, Work, beam_step


class Lazy(Protocol):
    """The sizes of a LazyConfig that costs depend on."""

    @property
    def depth(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def plain_layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def context_heads(self) -> int: ...
    @property
    def context_layers(self) -> int: ...
    @property
    def context_parts(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def expert_mlp(self) -> int: ...


def cost(cfg: Lazy, work: Work, itemsize: int = 4, weight_size: int | None = None) -> Cost:
    """The cost of one work. itemsize: bytes of a number. weight_size: those of a matrix's numbers, where they
    differ. Every expert is computed for every place, as the model does.

    Raises ValueError for a prompt with cached tokens, which this model cannot have.
    """
    if isinstance(work, BeamStep):
        return beam_step(cfg.hidden, work, itemsize)
    weight_size = itemsize if weight_size is None else weight_size
    queries, kv = cfg.heads * cfg.head_dim, 2 * cfg.kv_heads * cfg.head_dim
    item = cfg.context_layers * cfg.context_parts * cfg.context_heads * cfg.head_dim
    weights = _weights(cfg)
    if isinstance(work, Decode):
        beams, items = work.requests * work.width, work.context // cfg.depth
        pairs = cfg.layers * beams * (items + work.step + 2)  # the start token, those before, and itself
        moved = work.requests * items * item + cfg.layers * kv * beams * (work.step + 1)
        size = weight_size * weights + itemsize * moved
        return Cost(2 * beams * weights, 4 * queries * pairs, size, dispatches=cfg.layers)
    if work.cached:
        raise ValueError(f"{work.cached} cached tokens: a lazy decoder has no cached prompts")
    items = work.new // cfg.depth
    start = weights - cfg.layers * cfg.hidden * queries  # one key needs no query
    products = items * cfg.hidden * item + work.read * start
    size = weight_size * (cfg.hidden * item + start) + itemsize * items * item
    # Each start token sees the items of its own prompt: together all of them.
    return Cost(2 * products, 4 * queries * cfg.layers * items, size, dispatches=cfg.layers + 1)


def _weights(cfg: Lazy) -> int:
    """Numbers in the matrices of all blocks."""
    queries, kv = cfg.heads * cfg.head_dim, 2 * cfg.kv_heads * cfg.head_dim
    attention = cfg.hidden * (4 * queries + kv)
    mixture = cfg.hidden * (cfg.experts + 3 * (cfg.experts + 1) * cfg.expert_mlp)
    plain = cfg.plain_layers
    return cfg.layers * attention + plain * 3 * cfg.hidden * cfg.mlp + (cfg.layers - plain) * mixture
