# SPDX-License-Identifier: Apache-2.0
"""The costs of a dense decoder's works (MODEL-30): Qwen2, Qwen3 and Llama. Imports no jax."""

from __future__ import annotations

from typing import Protocol

from jgr.models.costs import Cost
from jgr.models.generator_costs import BeamStep, Decode, Work, beam_step


class Decoder(Protocol):
    """The sizes of a DecoderConfig that costs depend on."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp(self) -> int: ...


def cost(cfg: Decoder, work: Work, itemsize: int = 4, weight_size: int | None = None) -> Cost:
    """The cost of one work. itemsize: bytes of a number. weight_size: those of a matrix's number, if others."""
    if isinstance(work, BeamStep):
        return beam_step(cfg.hidden, work, itemsize)
    layers, queries, kv = cfg.layers, cfg.heads * cfg.head_dim, 2 * cfg.kv_heads * cfg.head_dim
    keys_values = cfg.hidden * kv
    rest = 2 * cfg.hidden * queries + 3 * cfg.hidden * cfg.mlp
    weights = layers * (keys_values + rest)
    if isinstance(work, Decode):
        beams = work.requests * work.width
        pairs = layers * beams * (work.context + work.step + 1)
        products = beams * weights
        moved = layers * kv * (work.requests * work.context + beams * (work.step + 1))
    else:
        pairs = (layers - 1) * work.pairs + work.read_pairs
        products = layers * work.new * keys_values + ((layers - 1) * work.new + work.read) * rest
        moved = layers * kv * (work.new + work.cached)
    size = (itemsize if weight_size is None else weight_size) * weights + itemsize * moved
    return Cost(2 * products, 4 * queries * pairs, size, dispatches=layers)
