# SPDX-License-Identifier: Apache-2.0
"""The section of the configuration on the border between embedding rows and kept users; see `jgr.config`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jgr.fields import check, require


@dataclass(frozen=True)
class MemoryConfig:
    """Where the border between embedding rows and kept users stands in the pool, and what moves it."""

    # What moves the border. static: nothing; pid: both caches' misses made equal; predictor: boosted trees, to the
    # split of the least predicted latency; ppo: a policy that was trained offline; full: that, corrected online and
    # with a rule for bursts (HLEM).
    controller: Literal["static", "pid", "predictor", "ppo", "full"] = "static"
    # Share of the model's pages that embedding rows begin with, and go back to where signals are missing; kept users
    # (executors.share_user=cache) have the others. Where no users are kept, rows have all of them.
    split: float = 0.5
    least: float = 0.1  # least share of the pool that embedding rows have
    most: float = 0.9  # most share of the pool that embedding rows have
    limit_ms: float = 30.0  # latency that 99 of 100 requests should stay below, for the controllers
    epoch_s: float = 5.0  # seconds between two decisions
    # File of a trained controller, .npz; empty: the one that comes with jgr, made by jgr train --config=controller.
    file: str = ""

    def __post_init__(self) -> None:
        check(self, least=0, most=0, split=0, limit_ms=0, epoch_s=0)
        ordered = 0.0 < self.least <= self.split <= self.most < 1.0
        require(
            ordered,
            f"memory.split ({self.split}) must lie between memory.least ({self.least}) and memory.most ({self.most}), "
            "which are above 0 and below 1",
        )
        for name in ("limit_ms", "epoch_s"):
            value = getattr(self, name)
            require(0.0 < value < math.inf, f"memory.{name} must be above 0, not {value}")
