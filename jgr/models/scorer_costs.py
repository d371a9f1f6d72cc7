# SPDX-License-Identifier: Apache-2.0
"""The costs of a scorer's parts: the user's, candidates for a user that is there, and both (MODEL-30). Imports no jax.

One function for each family, with the same arguments. Histories are as long as they are compiled for, since padding is
computed too; a candidate sees the history and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jgr.models import climber_costs, hstu_costs
from jgr.models.climber_costs import Climber
from jgr.models.costs import Cost
from jgr.models.hstu_costs import FLOAT_BYTES, Stack


class Work(NamedTuple):
    """A part of a request. reads: whether the user's part is computed; else what it gave is read. candidates: how many
    are scored."""

    reads: bool
    candidates: int


class Sasrec(Protocol):
    """The sizes of a SasrecConfig that costs depend on."""

    @property
    def max_items(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def mlp(self) -> int: ...


class LruRec(Sasrec, Protocol):
    """The sizes of an LruRecConfig that costs depend on."""


class Hstu(Stack, Protocol):
    """The sizes of an HstuConfig that costs depend on."""

    @property
    def max_items(self) -> int: ...


class Stu(Stack, Protocol):
    """The sizes of a StuConfig that costs depend on."""

    @property
    def contextual(self) -> int: ...
    @property
    def max_attention(self) -> int: ...
    @property
    def full_rows(self) -> int: ...


class StuScorer(Protocol):
    """The sizes of a StuScorerConfig that costs depend on. slots: values of each contextual slot."""

    @property
    def stack(self) -> Stu: ...
    @property
    def max_items(self) -> int: ...
    @property
    def item_dim(self) -> int: ...
    @property
    def actions(self) -> int: ...
    @property
    def action_dim(self) -> int: ...
    @property
    def slots(self) -> Sequence[int]: ...
    @property
    def mlp(self) -> int: ...
    @property
    def tasks(self) -> Sequence[str]: ...


def sasrec(cfg: Sasrec, work: Work) -> Cost:
    """SASRec: causal attention over the history, and a product with each candidate's row."""
    events, hidden = cfg.max_items, cfg.hidden
    weights = 4 * hidden**2 + 2 * hidden * cfg.mlp
    read = Cost(
        2 * cfg.layers * events * weights, 4 * cfg.layers * hidden * (events * (events + 1) // 2),
        FLOAT_BYTES * (cfg.layers * (weights + 2 * events * hidden) + events * hidden), dispatches=cfg.layers,
    )  # fmt: skip
    return _with_rows(hidden, read, work)


def lru_rec(cfg: LruRec, work: Work) -> Cost:
    """LRURec: a recurrence of 2 D complex states, which is no product, and a product with each candidate's row."""
    events, hidden = cfg.max_items, cfg.hidden
    weights = 8 * hidden**2 + 2 * hidden * cfg.mlp
    moved = FLOAT_BYTES * (cfg.layers * (weights + 4 * events * hidden) + events * hidden)
    return _with_rows(hidden, Cost(2 * cfg.layers * events * weights, 0, moved, dispatches=cfg.layers), work)


def hstu(cfg: Hstu, work: Work) -> Cost:
    """HSTU as a retriever: its layers over the history, and a product with each candidate's row."""
    return _with_rows(cfg.hidden, hstu_costs.cost(cfg, hstu_costs.of_history(cfg.max_items)), work)


def stu(cfg: StuScorer, work: Work) -> Cost:
    """DLRMv3's STU scorer: the stack over context, history and candidates, and the networks around it."""
    stack, hidden, found = cfg.stack, cfg.stack.hidden, Cost()
    slots, context = stack.contextual, stack.contextual + cfg.max_items
    content, action = _mlp(cfg, cfg.item_dim, hidden), _mlp(cfg, cfg.actions * cfg.action_dim, hidden)
    if work.reads:
        into = slots * cfg.item_dim * hidden
        layers = hstu_costs.cost(stack, hstu_costs.Work(context, 0, _stu_pairs(stack, cfg.max_items)))
        around = Cost(
            2 * (cfg.max_items * (content + action) + into), bytes=FLOAT_BYTES * (content + action + into)
        )
        found = layers.plus(around)
    if work.candidates:
        seen = _stu_seen(stack, cfg.max_items, bool(stack.full_rows))
        asked = hstu_costs.Work(work.candidates, context, work.candidates * (seen + 1))
        each = content + (hidden + 4) * hidden + _mlp(cfg, cfg.item_dim, hidden)
        each += _mlp(cfg, hidden, len(cfg.tasks))
        around = Cost(2 * (work.candidates * each + action), bytes=FLOAT_BYTES * (each + action))
        found = found.plus(hstu_costs.cost(stack, asked)).plus(around)
    return found


def climber(cfg: Climber, work: Work) -> Cost:
    """Climber, which computes a user and candidates in one pass where both are asked for."""
    if work.reads and work.candidates:
        counted = climber_costs.of_both(cfg, work.candidates)
    elif work.candidates:
        counted = climber_costs.of_candidates(cfg, work.candidates)
    else:
        counted = climber_costs.of_history(cfg)
    return climber_costs.cost(cfg, counted)


def _with_rows(hidden: int, read: Cost, work: Work) -> Cost:
    """The cost with products of `hidden` numbers for each candidate; `read` is counted where it is computed."""
    rows = work.candidates * hidden
    return (read if work.reads else Cost()).plus(Cost(2 * rows, bytes=FLOAT_BYTES * rows))


def _mlp(cfg: StuScorer, inputs: int, outputs: int) -> int:
    return (inputs + outputs) * cfg.mlp


def _stu_pairs(cfg: Stu, events: int) -> int:
    """Visible pairs of a full history: slots see everything."""
    seen = sum(_stu_seen(cfg, at, at >= events - cfg.full_rows) + 1 for at in range(events))
    return cfg.contextual * (cfg.contextual + events) + seen


def _stu_seen(cfg: Stu, before: int, is_wide: bool) -> int:
    """How many rows a row after `before` events sees besides itself: slots stand one place before the first event."""
    if is_wide or not cfg.max_attention:
        return cfg.contextual + before
    return min(before, cfg.max_attention) + (cfg.contextual if before + 1 <= cfg.max_attention else 0)
