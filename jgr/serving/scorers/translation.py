# SPDX-License-Identifier: Apache-2.0
"""From a request to what a scorer reads, and from its scores to an answer.

The one idea: what a request must say is what the model needs (`scorers.Needs`), so every check is made against that,
and a field that the model has no use for is refused rather than ignored. The user becomes one block (`user_block`),
the candidates become rows of the catalog.

Times of a user count from the start of the week, in UTC, of the oldest event that is kept: small numbers for 32 bits
that keep the hour of the day and the day of the week. That start moves only when the oldest event goes, and then every
place of the history moves too, so that nothing that is kept could be used.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import BufferLayout
from jgr.catalog.catalog import Catalog
from jgr.config import Config
from jgr.data.interactions import LONGEST_S
from jgr.fields import nearest
from jgr.models.repeats import buckets_of
from jgr.models.scorers import Needs
from jgr.models.stu_scorer import WEEK
from jgr.prompt.layouts import SINGLE_USER_MULTI_ITEM
from jgr.serving.api import Item, ModelInfo, RankRequest, Reuse, Usage
from jgr.serving.engine.settings import settings_digest
from jgr.serving.errors import MAX_QUOTED_CHARS, invalid, quoted
from jgr.serving.explanations import ExplainedSpan, Source
from jgr.serving.known_items import (
    MAX_LISTED_IDS,
    known_candidates,
    known_history,
    texts,
    user_entry,
)
from jgr.serving.policies.jobs import Kind
from jgr.serving.prefill import Asked, Prefill
from jgr.serving.scorers.user_block import known_by, new_block

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

NO_ROWS = np.zeros(0, np.int32)
MAX_WEIGHT = 1e6
"""The largest weight of a task: a sum of scores with such weights stays finite in float32."""


@dataclass(eq=False)
class ScorerTask:
    """A validated request on its way through the engine.

    rows: [n] int32, the candidates. block: the user, see user_block. key: the bytes by which a kept user is recognised
    (`user_block.known_by`). user: the id of its cache entry. weights: [P] float32, with which the tasks' scores are
    summed for the order. scores: [n, P] float32, filled part by part. state: what its parts are given of the user: the
    block, until a run has made more of it. records: the candidates' features, once they are there. found: [n] states of
    the records where these are in pages, which runs write to as well. ages: [n] int32, see `models.scorers.Candidates`;
    None where the model does not read them. arrival_ns: when it came in. ready_ns: since when its next run waits for
    executors only. kept: whether the user's part is in the cache.
    """

    request: RankRequest | Prefill
    rows: Int32
    block: UInt8
    key: UInt8
    user: str
    weights: Float32
    usage: Usage
    scores: Float32
    state: Any
    records: npt.NDArray[np.void] | None = None
    found: UInt8 | None = None
    ages: Int32 | None = None
    arrival_ns: int = 0
    ready_ns: int = 0
    kept: bool = False
    kind: Kind = "rank"


class ScorerTranslator:
    """Requests to tasks, scores to items, for one scorer and catalog.

    layout: of the user's block. wall: gives the seconds since 1970, for requests that do not say when they are asked.
    """

    def __init__(
        self,
        name: str,
        catalog: Catalog,
        needs: Needs,
        layout: BufferLayout,
        config: Config,
        *,
        revision: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.catalog = catalog
        catalog.index()  # now, and not on the event loop
        self._needs, self._layout, self._wall = needs, layout, wall
        self._blank = new_block(layout)[0]
        self._dtype = layout.dtype
        self._slots = {f"slot{at}": (at, values) for at, values in enumerate(needs.slots)}
        self._reject_unknown = config.server.unknown_items == "reject"
        self.info = ModelInfo(
            id=name,
            version=f"{name}@{revision}" if revision else name,
            settings=settings_digest(config),
            catalog_version=catalog.version,
            catalog_items=catalog.n_items,
            depth=catalog.depth,
            normalize=config.beam.normalize,
            beam_width=0,
            max_beam_width=0,
            max_candidates=config.server.max_candidates,
            timed=needs.timed,
            tasks=list(needs.tasks) if len(needs.tasks) > 1 else [],
            scenarios=needs.scenarios,
            context={name: values for name, (_, values) in self._slots.items()},
            action_bits=needs.actions,
            max_history=config.server.max_history,
            max_filter_items=0,
            segments=[],
            max_history_in_prompt=needs.max_items,
        )

    def prepare(self, request: Asked, tenant: str = "", read: None = None) -> ScorerTask:
        """Check a request and make its task. tenant: whose the user's cache entries are.

        Raises RequestError, which names the field that the catalog, a limit or the model refuses.
        """
        if not isinstance(request, RankRequest | Prefill):
            raise invalid("model", f"model {self.info.id!r} ranks candidates: ask /v1/rank")
        self._refuse_useless(request)
        rows, given = NO_ROWS, None
        if isinstance(request, RankRequest):
            rows = known_candidates(request, self.catalog, self.info.max_candidates)
            given = request.task_weights
        history, unknown = known_history(request, self.catalog, self.info.max_history, self._reject_unknown)
        needs = self._needs
        block, kept = self._user(request, history, unknown)
        key = known_by(self._layout, needs, block) if needs.timed else block
        user = user_entry(request.user_id, tenant)
        if not user:
            user = f"{tenant}history:{hashlib.sha256(key.tobytes()).hexdigest()}"
        tokens = kept + len(needs.slots)
        usage = Usage(
            layout=SINGLE_USER_MULTI_ITEM.name,
            prompt_tokens=tokens,
            computed_tokens=tokens,
            history_items=kept,
            unknown_items=len(unknown),
            unknown_item_ids=[item_id[:MAX_QUOTED_CHARS] for item_id in unknown[:MAX_LISTED_IDS]],
            candidates=len(rows),
            parts=0,
        )
        weights, scores = (
            self._weights(given),
            np.zeros((len(rows), len(needs.tasks)), np.float32),
        )
        task = ScorerTask(request, rows, block, key, user, weights, usage, scores, state=block)
        if needs.repeats:  # of the history that the model reads, which may be the end of a longer one
            task.ages = buckets_of(block.view(self._dtype)[0]["rows"], rows)
        return task

    def items(self, task: ScorerTask) -> list[Item]:
        """The answer's items, best first. ValueError for a score that is not finite, a fault."""
        scores = task.scores
        if not np.isfinite(scores).all():
            raise ValueError("the executor returned a score that is not finite")
        weighed = scores @ task.weights
        request = task.request
        assert isinstance(request, RankRequest)
        order = best_first(weighed, request.top_k)
        ids, tasks = self.catalog.item_ids, self._needs.tasks
        rows = task.rows[order].tolist()
        best = enumerate(zip(rows, weighed[order].tolist(), strict=True), 1)
        items = [Item(item_id=ids[row], score=score, rank=rank) for rank, (row, score) in best]
        if len(tasks) > 1:
            for item, by_task in zip(items, scores[order].tolist(), strict=True):
                item.scores = dict(zip(tasks, by_task, strict=True))
        if request.include_metadata:
            for item, row in zip(items, rows, strict=True):
                item.metadata = self.catalog.metadata[row]
        return items

    def explain(self, task: ScorerTask, kept: bool) -> list[Reuse]:
        """Where the user's part came from."""
        usage = task.usage
        return [
            Reuse(segment="user", tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, kept=kept)
        ]

    def spans(self, task: ScorerTask) -> list[ExplainedSpan]:
        """How many of the user's tokens, with the slots of context, were kept on the device, and how many were
        computed. Candidates have none."""
        cached, computed = task.usage.cached_tokens, task.usage.computed_tokens
        sources: tuple[tuple[int, Source], ...] = (cached, "device"), (computed, "computed")
        return [
            ExplainedSpan(
                kind="user",
                name="history",
                tokens=tokens,
                cached_tokens=tokens if source == "device" else 0,
                source=source,
            )
            for tokens, source in sources
            if tokens
        ]

    def _refuse_useless(self, request: RankRequest | Prefill) -> None:
        needs = self._needs
        used = {
            "layout": False,
            "reuse_budget": False,
            "history_texts": False,
            "history_times": needs.timed,
            "time": needs.timed,
            "history_actions": needs.actions > 0,
            "context": bool(needs.slots),
            "task_weights": len(needs.tasks) > 1,
        }
        for name, useful in used.items():
            if not useful and getattr(request, name, None) is not None:
                raise invalid(name, f"{name}: model {self.info.id!r} has no use for it")
        if request.scenario and needs.scenarios == 1:
            raise invalid("scenario", f"scenario: model {self.info.id!r} has no use for it")
        if request.scenario >= needs.scenarios:
            raise invalid(
                "scenario", f"scenario is {request.scenario}; the model has {needs.scenarios}, from 0"
            )

    def _user(self, request: RankRequest | Prefill, rows: Int32, unknown: list[str]) -> tuple[UInt8, int]:
        """The block, and how many events are in it. rows: of the history's items that the catalog has; unknown: the
        others."""
        last = slice(-self._needs.max_items, None)
        known = list(range(len(request.history)))[last]
        if unknown:
            missing = set(unknown)
            known = [at for at, item in enumerate(texts(request.history)) if item not in missing][last]
        block = self._blank.copy()
        views = block.view(self._dtype)[0]
        views["rows"][: len(known)] = rows[last]
        if self._needs.timed:
            views["times"][: len(known)], views["now"][0] = self._times(request, known)
        if request.history_actions is not None:
            views["actions"][: len(known)] = self._actions(request, request.history_actions)[known]
        for name, value in (request.context or {}).items():
            views["context"][self._slot(name, value)] = value
        if self._needs.scenarios > 1:
            views["scenario"][0] = request.scenario
        return block, len(known)

    def _times(self, request: RankRequest | Prefill, known: list[int]) -> tuple[Int32, int]:
        """When the kept events came, and now."""
        given = request.history_times
        if given is None:
            raise invalid("history_times", f"history_times is required: model {self.info.id!r} reads times")
        _require_one_each("history_times", given, request)
        times = np.array(given, np.int64)
        if (falls := np.flatnonzero(np.diff(times) < 0)).size:
            at = int(falls[0]) + 1
            raise invalid(
                f"history_times[{at}]",
                f"history_times[{at}] is {given[at]}, before {given[at - 1]}: times must ascend",
            )
        if request.time is not None and request.time < given[-1]:
            raise invalid("time", f"time is {request.time}, before the history's last event at {given[-1]}")
        now = max(int(self._wall()), given[-1]) if request.time is None else request.time
        origin = int(times[known[0]]) // WEEK * WEEK
        if now - origin > LONGEST_S:
            raise invalid("history_times", f"history_times: from {times[known[0]]} to {now} is over 68 years")
        return (times[known] - origin).astype(np.int32), now - origin

    def _actions(self, request: RankRequest | Prefill, given: list[int]) -> Int32:
        _require_one_each("history_actions", given, request)
        actions = np.array(given, np.int64)
        limit = 1 << self._needs.actions
        if (beyond := np.flatnonzero(actions >= limit)).size:
            at = int(beyond[0])
            raise invalid(
                f"history_actions[{at}]",
                f"history_actions[{at}] is {given[at]}; the model knows {self._needs.actions} bits, below {limit}",
            )
        return actions.astype(np.int32)

    def _slot(self, name: str, value: int) -> int:
        """The number of the slot of that name. Raises RequestError where `value` is not one of its values."""
        if name not in self._slots:
            near = nearest(name, self._slots)
            raise invalid(
                f"context.{name[:MAX_QUOTED_CHARS]}",
                f"context: the model has no slot {quoted(name)}; the nearest is {near!r}",
            )
        at, values = self._slots[name]
        if value >= values:
            raise invalid(f"context.{name}", f"context.{name} is {value}; it has {values} values, from 0")
        return at

    def _weights(self, given: Mapping[str, float] | None) -> Float32:
        tasks = self._needs.tasks
        weights = np.zeros(len(tasks), np.float32)
        if given is None:
            weights[0] = 1.0
            return weights
        for name, weight in given.items():
            if name not in tasks:
                near = nearest(name, tasks)
                raise invalid(
                    f"task_weights.{name[:MAX_QUOTED_CHARS]}",
                    f"task_weights: the model has no task {quoted(name)}; the nearest is {near!r}",
                )
            if abs(weight) > MAX_WEIGHT:
                raise invalid(f"task_weights.{name}", f"task_weights.{name} must be within {MAX_WEIGHT:g}")
            weights[tasks.index(name)] = weight
        if not weights.any():
            raise invalid("task_weights", "task_weights: no task has a weight other than 0")
        return weights


def best_first(scores: Float32, k: int | None) -> Int64:
    """The places of the k highest of [n] scores, of all where k is None; equal scores keep the caller's order."""
    falling, near = -scores, np.arange(len(scores))
    if k is not None and k < len(scores):  # the others need no sorting
        near = np.flatnonzero(falling <= np.partition(falling, k - 1)[k - 1])
    order: Int64 = near[np.argsort(falling[near], kind="stable")[:k]]
    return order


def _require_one_each(name: str, given: list[Any], request: RankRequest | Prefill) -> None:
    if len(given) != len(request.history):
        raise invalid(name, f"{name} has {len(given)} values, the history {len(request.history)} items")
