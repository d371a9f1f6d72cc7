# SPDX-License-Identifier: Apache-2.0
"""How the beam attention kernel cuts its work (XGR-6): tile sizes, and how many programs share a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jgr.ops import tuning

H200_CORES = 132
SPLIT_TOKENS = 256
"""The fewest prompt tokens of a program that shares its prompt: what shorter parts save is lost in the merge."""


class Shape(NamedTuple):
    """What the tiles depend on. rows: beams x query heads of one key/value head; itemsize: bytes of a value."""

    batch: int
    kv_heads: int
    rows: int
    tokens: int
    dim: int
    itemsize: int


@dataclass(frozen=True)
class Config:
    """Tiles of the kernel.

    block_rows: the rows of one program; block_tokens: the prompt tokens of one step of its loop; splits: how many
    programs share the prompt of the same rows (where more than one, a second kernel merges their results);
    merge_rows: the rows of one program of that second kernel; warps, stages: Triton's num_warps and num_stages.
    """

    block_rows: int = 64
    block_tokens: int = 64
    splits: int = 1
    merge_rows: int = 16
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_tokens", "merge_rows", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value}")
        if self.block_rows < 16 or self.block_tokens < 16:
            raise ValueError(f"block_rows and block_tokens must be at least 16: {self}")
        if self.splits < 1 or self.stages < 1:
            raise ValueError(f"splits and stages must be at least 1: {self}")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def choose_config(shape: Shape) -> Config:
    """The tiles that were measured to be fastest on this kind of device, or else the heuristic's."""
    return tuning.choose("beam_attention", shape, candidates(shape), heuristic(shape))


def candidates(shape: Shape) -> list[Config]:
    """The tiles to choose from: the heuristic's, and smaller ones, which spill no more, with other splits."""
    largest = heuristic(shape)
    splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= max(1, -(-shape.tokens // SPLIT_TOKENS))]
    smaller = [
        Config(rows, tokens, n, warps=largest.warps if rows > 64 else min(4, largest.warps), stages=stages)
        for rows in (16, 32, 64, 128)
        if rows <= largest.block_rows
        for tokens in (16, 32, 64)
        if tokens <= largest.block_tokens
        for n in splits
        for stages in range(1, largest.stages + 1)
    ]
    return [largest, *(config for config in smaller if config != largest)]


def heuristic(shape: Shape, cores: int = H200_CORES) -> Config:
    """Tiles that spill no register, and as many programs as there are cores.

    In 16 bits, for heads of up to 128, the tiles that were fastest on an H200 for large batches; the other sizes are
    the largest that compile without spilling for one (`make compile-gpu`), and were not timed.
    """
    most_splits = max(1, -(-shape.tokens // SPLIT_TOKENS))
    if shape.itemsize > 2:
        block_rows, block_tokens, warps, stages = (16, 32, 8, 1) if shape.dim > 128 else (32, 32, 4, 2)
    elif shape.dim > 128:
        block_rows, block_tokens, warps, stages = 64, 32, 8, 2
    else:
        block_rows, block_tokens, warps, stages = 64, 64, 4, 3
    if shape.rows < block_rows:
        block_rows, warps = max(16, power_of_two(shape.rows)), min(warps, 4 if shape.dim <= 128 else 8)
    programs = shape.batch * shape.kv_heads * -(-shape.rows // block_rows)
    splits = min(max(1, cores // programs), most_splits)
    return Config(block_rows, block_tokens, splits, warps=warps, stages=stages)
