# SPDX-License-Identifier: Apache-2.0
"""Climber's costs (MODEL-30), in the terms of `jgr.models.costs`. Imports no jax.

A pair is a query and a key that it sees. FLAME publishes 3.72e9 FLOPs for `base` and 1.64e10 for `long`, which counts
all pairs (`all_pairs`: 3.72e9 and 1.81e10 with the width and MLP of MODEL-19). The visible pairs cost 2.72e9 and
1.01e10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jgr.models.costs import Cost


class Climber(Protocol):
    """The sizes of a ClimberConfig that costs depend on. part: events of a block."""

    @property
    def blocks(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def tasks(self) -> Sequence[str]: ...
    @property
    def part(self) -> int: ...


class Work(NamedTuple):
    """The work for one user. In each block: tokens that are computed, visible pairs, and tokens whose keys and values
    are read or stored (cached). candidates: how many pass through fusion and heads."""

    tokens: int
    pairs: int
    cached: int
    candidates: int


def of_history(cfg: Climber) -> Work:
    """The work of `read` for a full history."""
    events = cfg.part
    return Work(events, events * (events + 1) // 2, events, 0)


def of_candidates(cfg: Climber, candidates: int) -> Work:
    """The work of `score` for candidates of a full history: each sees the history and itself."""
    return Work(candidates, candidates * (cfg.part + 1), cfg.part, candidates)


def of_both(cfg: Climber, candidates: int) -> Work:
    """The work of `rank`, which stores no keys and values."""
    history, scored = of_history(cfg), of_candidates(cfg, candidates)
    return Work(history.tokens + scored.tokens, history.pairs + scored.pairs, cached=0, candidates=candidates)


def all_pairs(cfg: Climber, candidates: int) -> Work:
    """The work of `rank` as FLAME counts it: every token of history and candidates sees every other."""
    work = of_both(cfg, candidates)
    return work._replace(pairs=work.tokens**2)


def exponentials(cfg: Climber, work: Work, heads: int) -> int:
    """How many exponentials the softmax computes."""
    return cfg.blocks * cfg.layers * heads * work.pairs


def cost(cfg: Climber, work: Work, itemsize: int = 4) -> Cost:
    """The cost of one user's work. itemsize: bytes of a number. Weights are read once."""
    hidden, mlp, blocks, tasks = cfg.hidden, cfg.mlp, cfg.blocks, len(cfg.tasks)
    layer = 4 * hidden**2 + 2 * hidden * mlp
    fusion = 4 * hidden**2 + 2 * blocks * hidden**2
    of_blocks = blocks * 6 * hidden**2 + 2 * blocks**2 * hidden  # attention over the blocks, and the gate
    heads = cfg.experts * 2 * hidden * mlp + tasks * (hidden * cfg.experts + hidden**2 + hidden)
    products = blocks * cfg.layers * work.tokens * layer + work.candidates * (of_blocks + heads)
    pairs = blocks * cfg.layers * work.pairs
    moved = blocks * cfg.layers * (layer + 2 * hidden * work.cached)
    moved += (fusion + heads if work.candidates else 0) + blocks * hidden * work.tokens
    return Cost(2 * products, 4 * hidden * pairs, moved * itemsize, dispatches=cfg.layers)
