# SPDX-License-Identifier: Apache-2.0
"""The configuration of rankers that learn from what users did with what they were shown (climber, stu)."""

from __future__ import annotations

from dataclasses import dataclass

from jgr.fields import check, require


@dataclass(frozen=True)
class FeedbackConfig:
    """What such a ranker predicts, and what it reads besides the history's items."""

    tasks: tuple[str, ...] = ("click", "like", "long_view")  # actions of the dataset; each gets a score
    weights: tuple[float, ...] = ()  # of the tasks in the loss; empty: all 1
    candidates: int = 8  # impressions of one window; a request with more becomes several
    # Of each of climber's tables of categories. Its features are those of features.schema, from the catalog's metadata;
    # whole numbers are categories.
    rows: int = 1024
    timed: bool = True  # whether climber's bias depends on times
    # Of each of climber's blocks, the actions of its events joined by +; "" takes all. Empty: parts by age.
    behaviours: tuple[str, ...] = ()
    blocks: int = 2  # of climber; divides train.max_items
    experts: int = 4  # of climber
    action_dim: int = 8  # of stu

    def __post_init__(self) -> None:
        check(self, candidates=1, rows=1, blocks=1, experts=1, action_dim=1)
        distinct = len(set(self.tasks)) == len(self.tasks) > 0
        require(distinct, f"feedback.tasks must be different names, at least one, not {self.tasks}")
        fits = not self.weights or len(self.weights) == len(self.tasks)
        require(fits, f"feedback.weights: {len(self.weights)} of them, feedback.tasks has {len(self.tasks)}")
        require(min(self.weights, default=1) > 0, "feedback.weights must be above 0")
        fits = not self.behaviours or len(self.behaviours) == self.blocks
        require(fits, f"feedback.behaviours: {len(self.behaviours)} of them for {self.blocks} blocks")
