# SPDX-License-Identifier: Apache-2.0
"""The work that a decoder's executors are given, and the outcomes that they give back: arrays without item ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.catalog.item_filters import NO_FILTER, ItemFilter
from jgr.models.beam import Levels
from jgr.prompt.segments import Prompt
from jgr.serving.policies.jobs import Profile
from jgr.serving.policies.sources import PlannedPrompt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RecommendWork:
    """Generate items after a prompt. prompt: [t] int32 tokens. filter: the items that may be returned. explained:
    whether the outcome is to have the search's levels, which only executors with such programs give."""

    prompt: Int32
    beam_width: int
    filter: ItemFilter = NO_FILTER
    explained: bool = False


@dataclass(frozen=True, eq=False)
class RankWork:
    """Score candidates after a prompt. prompt: [t] int32 tokens. leaves: [c] int32, in the caller's order."""

    prompt: Int32
    leaves: Int32


@dataclass(frozen=True, eq=False)
class SegmentsWork:
    """A prompt whose segments may be cached, to rank its items or to go on from.

    columns: [c] int32, for each candidate the token whose logit is its score; negative_columns: [c] int32, the token
    whose logit is taken from it. beam_width, filter, explained: as in RecommendWork. plan: where the segments come
    from, known once the batch is planned. epoch: the epoch of the cache's pool that it was planned for; None: any.
    """

    prompt: Prompt
    columns: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    negative_columns: Int32 | None = None
    beam_width: int = 0
    filter: ItemFilter = NO_FILTER
    explained: bool = False
    plan: PlannedPrompt | None = None
    epoch: int | None = None


@dataclass(frozen=True, eq=False)
class RecommendOutcome:
    """The leaves that a search found, [m] int32, best first, and their log-likelihoods, [m] float32.

    Dead beams are left out, so m is at most beam_width. levels: the beams after every level, for a work that is
    explained.
    """

    leaves: Int32
    scores: Float32
    levels: Levels | None = None


@dataclass(frozen=True, eq=False)
class RankOutcome:
    """The candidates' scores, [c] float32, in the caller's order: log-likelihoods of their semantic ids, or logits."""

    scores: Float32


Work = RecommendWork | RankWork | SegmentsWork
Outcome = RecommendOutcome | RankOutcome


@dataclass(frozen=True, eq=False)
class Pending:
    """A batch that was handed to the device.

    outputs: the program's, which may not be there yet. staged: the inputs that it reads, a Staged. epoch: the pool's.
    """

    profile: Profile
    works: Sequence[Any]
    outputs: Any
    staged: Any
    epoch: int = 0
