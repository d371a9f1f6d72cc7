# SPDX-License-Identifier: Apache-2.0
"""The costs of HSTU's and the STU's layers (MODEL-30), in the terms of `jgr.models.costs`. Imports no jax."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jgr.models.costs import Cost

FLOAT_BYTES = 4


class Stack(Protocol):
    """The sizes of an HstuConfig or StuConfig. gated: how many vectors of H * v_dim numbers W_o reads."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def qk_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def gated(self) -> int: ...


class Work(NamedTuple):
    """The amount of work.

    new: rows to compute. cached: rows whose keys and values are read. pairs: visible pairs of rows.
    """

    new: int
    cached: int
    pairs: int


def of_history(events: int, cached: int = 0) -> Work:
    """The work for a user's new events after cached ones; each sees itself and the events before it."""
    return Work(events, cached, events * cached + events * (events + 1) // 2)


def of_candidates(candidates: int, history: int, micro_batch: int) -> Work:
    """The work for candidates by M-FALCON: each sees the history, which every micro-batch reads, and itself."""
    return Work(candidates, history * -(-candidates // micro_batch), candidates * (history + 1))


def cost(cfg: Stack, work: Work) -> Cost:
    """The cost of all layers in float32. Weights are read once."""
    values, both = cfg.heads * cfg.v_dim, cfg.heads * (cfg.qk_dim + cfg.v_dim)
    products = cfg.hidden * (2 * both + cfg.gated * values)
    layers = cfg.layers
    moved = products + (work.new + work.cached) * both
    return Cost(
        2 * layers * work.new * products, 2 * layers * work.pairs * both, FLOAT_BYTES * layers * moved,
        dispatches=layers,
    )  # fmt: skip
