# SPDX-License-Identifier: Apache-2.0
"""The configuration of scorers that learn from feedback (climber, stu): what users did with what they were shown."""

from __future__ import annotations

from dataclasses import dataclass

from jgr.fields import check, require


@dataclass(frozen=True)
class FeedbackConfig:
    """What a scorer that learns from feedback predicts, and what it reads besides the history's items."""

    # Actions of the dataset to predict; each gets a score.
    tasks: tuple[str, ...] = ("click", "like", "long_view")
    weights: tuple[float, ...] = ()  # weight of each task in the loss; empty: all 1
    # Impressions in one training window; a request that showed more becomes several windows.
    candidates: int = 8
    # Rows of each of climber's embedding tables of a category feature. The features are those of features.schema, read
    # from the catalog's metadata; whole numbers are categories.
    rows: int = 1024
    timed: bool = True  # whether climber's attention bias depends on times
    # Actions that select the events of each of climber's blocks, joined by +, or "" for all events. Without any, the
    # blocks are parts of the history by age.
    behaviours: tuple[str, ...] = ()
    blocks: int = 2  # parts of the history that climber encodes apart; divides train.max_items
    experts: int = 4  # experts of climber's mixture
    action_dim: int = 8  # width of an action's embedding in stu

    def __post_init__(self) -> None:
        check(self, candidates=1, rows=1, blocks=1, experts=1, action_dim=1)
        distinct = len(set(self.tasks)) == len(self.tasks) > 0
        require(distinct, f"feedback.tasks must be different names, at least one, not {self.tasks}")
        fits = not self.weights or len(self.weights) == len(self.tasks)
        require(fits, f"feedback.weights: {len(self.weights)} of them, feedback.tasks has {len(self.tasks)}")
        require(min(self.weights, default=1) > 0, "feedback.weights must be above 0")
        fits = not self.behaviours or len(self.behaviours) == self.blocks
        require(fits, f"feedback.behaviours: {len(self.behaviours)} of them for {self.blocks} blocks")
