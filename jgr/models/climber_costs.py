# SPDX-License-Identifier: Apache-2.0
"""What Climber costs (MODEL-30): FLOPs of its products, bytes that must move. Imports no jax.

Multiply-adds count twice; norms, softmax, biases and gates are left out. Pairs are those of a query and a key that it
sees. FLAME publishes 3.72e9 FLOPs for `base` and 1.64e10 for `long`, which is what a whole square of pairs costs
(`all_pairs`): 3.72e9 and 1.81e10 with the width and MLP of MODEL-19. What is needed is 2.72e9 and 1.01e10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Climber(Protocol):
    """ClimberConfig. part: places of a block."""

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
    """Of one user in each block: tokens that are computed, pairs, tokens whose keys and values are read or stored;
    candidates, for which there are a fusion and heads besides."""

    tokens: int
    pairs: int
    cached: int
    candidates: int


class Cost(NamedTuple):
    flops: int
    bytes: int


def of_history(cfg: Climber) -> Work:
    """`read` of a full history."""
    events = cfg.part
    return Work(events, events * (events + 1) // 2, events, 0)


def of_candidates(cfg: Climber, candidates: int) -> Work:
    """`score` of so many candidates behind a full history: each sees it and itself."""
    return Work(candidates, candidates * (cfg.part + 1), cfg.part, candidates)


def of_both(cfg: Climber, candidates: int) -> Work:
    """`rank`, which stores no keys and values."""
    history, behind = of_history(cfg), of_candidates(cfg, candidates)
    return Work(history.tokens + behind.tokens, history.pairs + behind.pairs, cached=0, candidates=candidates)


def all_pairs(cfg: Climber, candidates: int) -> Work:
    """`rank` as FLAME counts it: every token with every other, history and candidates."""
    work = of_both(cfg, candidates)
    return work._replace(pairs=work.tokens**2)


def exponentials(cfg: Climber, work: Work, heads: int) -> int:
    """Of the softmax."""
    return cfg.blocks * cfg.layers * heads * work.pairs


def cost(cfg: Climber, work: Work, itemsize: int = 4) -> Cost:
    """Of one user. itemsize: bytes of a number; weights are read once."""
    hidden, mlp, blocks, tasks = cfg.hidden, cfg.mlp, cfg.blocks, len(cfg.tasks)
    layer = 4 * hidden**2 + 2 * hidden * mlp
    fusion = 4 * hidden**2 + 2 * blocks * hidden**2
    of_blocks = blocks * 6 * hidden**2 + 2 * blocks**2 * hidden  # attention over the blocks, and the gate
    heads = cfg.experts * 2 * hidden * mlp + tasks * (hidden * cfg.experts + hidden**2 + hidden)
    flops = blocks * cfg.layers * (work.tokens * layer + 2 * hidden * work.pairs)
    flops += work.candidates * (of_blocks + heads)
    moved = blocks * cfg.layers * (layer + 2 * hidden * work.cached)
    moved += (fusion + heads if work.candidates else 0) + blocks * hidden * work.tokens
    return Cost(2 * flops, moved * itemsize)
