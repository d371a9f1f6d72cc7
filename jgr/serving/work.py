# SPDX-License-Identifier: Apache-2.0
"""What an executor is given and what it gives back: plain arrays, no request objects, no item ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jgr.data.item_filters import NO_FILTER, ItemFilter
from jgr.serving.policies.batching import Profile

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RecommendWork:
    """prompt: [t] int32 tokens; filter: what may be returned."""

    prompt: Int32
    beam_width: int
    filter: ItemFilter = NO_FILTER


@dataclass(frozen=True, eq=False)
class RankWork:
    """prompt: [t] int32 tokens; leaves: [c] int32, the candidates' leaves in the caller's order."""

    prompt: Int32
    leaves: Int32


@dataclass(frozen=True, eq=False)
class RecommendOutcome:
    """leaves: [m] int32, best first, m <= beam_width (dead beams are left out); scores: [m] float32, log-likelihood."""

    leaves: Int32
    scores: Float32


@dataclass(frozen=True, eq=False)
class RankOutcome:
    """scores: [c] float32, the log-likelihood of each candidate's semantic id, in the caller's order."""

    scores: Float32


Work = RecommendWork | RankWork
Outcome = RecommendOutcome | RankOutcome
Progress = Callable[[int, int, str], None]


class Executor(Protocol):
    """Runs batches on a device. `run` blocks and is called by one thread at a time."""

    profiles: tuple[Profile, ...]

    def warm_up(self, progress: Progress) -> None:
        """Compile every profile; progress(done, total, label) after each."""

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        """One outcome per work, in order. len(works) <= profile.batch, all of the profile's kind."""
