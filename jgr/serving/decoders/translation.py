# SPDX-License-Identifier: Apache-2.0
"""From a request to an executor's work, and from its outcome to an answer.

The one idea: everything that knows item ids stands here; what follows knows rows, leaves and tokens only.
Pure functions of the request, the catalog and the configuration: no clock, no queue, no device.

Items that share a semantic id share a leaf. So the search enters a leaf as long as one of its items may be returned;
the others are dropped here, when leaves become items again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType, structs

from jgr.cache.entries import Move
from jgr.catalog.catalog import Catalog
from jgr.catalog.item_filters import NO_FILTER, ItemFilter, ItemFilters, catalog_segments
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, ConfigError
from jgr.ops import native
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import CAUSAL, LAYOUTS, USER_PREFIX, Kind
from jgr.prompt.segments import Content, Part, Prompt, arrange, count_tokens, make_prompt
from jgr.serving.api import (
    Answer,
    Filters,
    Item,
    ModelInfo,
    RankRequest,
    RecommendRequest,
    Request,
    Reuse,
    Usage,
)
from jgr.serving.decoders.explaining import explain_levels, planned_spans, unplanned_spans
from jgr.serving.decoders.library import Found, Library
from jgr.serving.decoders.reading import Read, found_in_prompt
from jgr.serving.decoders.work import (
    Outcome,
    RankOutcome,
    RankWork,
    RecommendOutcome,
    RecommendWork,
    SegmentsWork,
    Work,
)
from jgr.serving.engine.settings import settings_digest
from jgr.serving.errors import MAX_QUOTED_CHARS, invalid, quoted
from jgr.serving.explanations import (
    ExplainedLevel,
    ExplainedSpan,
    ExplainRecommend,
    Explanation,
    RankExplanation,
    RecommendExplanation,
)
from jgr.serving.known_items import MAX_LISTED_IDS, known_candidates, known_history, texts, user_entry
from jgr.serving.policies.jobs import Kind as RequestKind
from jgr.serving.policies.sources import (
    ALL_ITEM_TOKENS,
    Approximate,
    PlannedPrompt,
    PlannedSegment,
    Repair,
    UnplannedPrompt,
)
from jgr.serving.prefill import Asked, Prefill

Int32 = npt.NDArray[np.int32]

NOTHING = np.zeros(0, np.int32)
SCORER_FIELDS = ("history_times", "time", "history_actions", "context", "scenario", "task_weights")
"""Fields of a request to rank that only scorers read; a decoder refuses them."""


class Prompts(Protocol):
    """Makes prompts; jgr.prompt.tokens.PromptBuilder is one. suffix: [t] int32 tokens that follow the history."""

    suffix: Int32

    def build(self, rows: Int32) -> Int32:
        """The prompt of a history, [t] int32 tokens. rows: [h] int32 catalog rows, oldest first."""

    def user(self, rows: Int32) -> Int32:
        """The tokens of `build` without the suffix."""

    def user_with(self, rows: Int32, reviews: Sequence[Int32]) -> tuple[Int32, tuple[Part, ...]]:
        """The same with a text for each item, [t] int32 tokens, and what its tokens are."""


@dataclass(eq=False)
class Task:
    """A validated request on its way through the engine.

    rows: int32, the history's known items (recommend), or the candidates (rank). prompt: the prompt to be planned,
    where it may be cached, else None. plan: the prompt's plan, once the task's batch has started; moves: what was moved
    for that batch. outcome: what the executor gave, once the batch has ended. parts: of the history, where it has texts
    of its own. whole: its approximate prompt, where all is computed in place of that. width: beam width, or number of
    candidates. tokens: the most tokens that the device computes for it.
    """

    request: Asked
    work: Work
    usage: Usage
    rows: Int32
    prompt: UnplannedPrompt | None = None
    plan: PlannedPrompt | None = None
    moves: tuple[Move, ...] = ()
    outcome: Outcome | None = None
    whole: UnplannedPrompt | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        work, prompt = self.work, self.prompt
        ranks = isinstance(work, RankWork) or (isinstance(work, SegmentsWork) and not work.beam_width)
        self.kind: RequestKind = "rank" if ranks else "recommend"
        self.width = len(self.rows) if isinstance(work, RankWork) else work.beam_width or len(self.rows)
        self.tokens = self.usage.prompt_tokens if prompt is None else prompt.computed_at_most


class Translator:
    """Requests to tasks, outcomes to items, for one model and catalog.

    max_beam_width, max_candidates: what the compiled profiles hold; 0 where the kind is not served.
    ConfigError where the default beam width fits no profile.
    """

    def __init__(
        self,
        name: str,
        catalog: Catalog,
        tree: PrefixTree,
        prompts: Prompts,
        config: Config,
        *,
        max_beam_width: int,
        max_candidates: int,
        revision: str = "",
        segments: SegmentPrompts | None = None,
        cached: bool = False,
        library: Library | None = None,
    ) -> None:
        if 0 < max_beam_width < config.beam.width:
            raise ConfigError(
                f"beam.width is {config.beam.width}, but the largest of profiles.widths is {max_beam_width}: "
                "give that too"
            )
        self.catalog = catalog
        catalog.index()  # now, and not on the event loop
        self._tree = tree
        self._prompts, self._segments, self._cached, self._library = prompts, segments, cached, library
        self._repair, self._plain = Repair.of(config.cache), config.cache.policy == "blocks"
        self._reject_unknown = config.server.unknown_items == "reject"
        self._items_per_id = config.beam.items_per_id
        self._filters = ItemFilters(tree, catalog_segments(catalog, config.catalog.segments))
        self.info = ModelInfo(
            id=name,
            version=f"{name}@{revision}" if revision else name,
            settings=settings_digest(config),
            catalog_version=catalog.version,
            catalog_items=catalog.n_items,
            depth=catalog.depth,
            normalize=config.beam.normalize,
            beam_width=config.beam.width,
            max_beam_width=max_beam_width,
            max_candidates=min(config.server.max_candidates, max_candidates),
            kernels=native.describe(),
            max_history=config.server.max_history,
            max_filter_items=config.server.max_filter_items,
            segments=list(self._filters.segments),
            max_history_in_prompt=config.prompt.max_items,
        )

    def prepare(self, request: Asked, tenant: str = "", read: Read | None = None) -> Task:
        """Check a request and make its task. tenant: whose the user's cache entries are. read: its texts.

        Raises RequestError, which names the field that the catalog or a limit refuses.
        """
        if isinstance(request, RecommendRequest):
            return self._recommend(request, tenant, read)
        if isinstance(request, Prefill):
            return self._prefill(request, tenant)
        return self._rank(request, tenant, read)

    def items(self, task: Task, outcome: Outcome) -> list[Item]:
        """The answer's items, best first. ValueError for a score that is not finite: an executor's fault."""
        if not np.isfinite(outcome.scores).all():
            raise ValueError("the executor returned a score that is not finite")
        if isinstance(outcome, RecommendOutcome):
            return self._recommended(task, outcome)
        return self._ranked(task, outcome)

    def explain(self, task: Task) -> list[Reuse]:
        """The sources of the prompt's parts, once its batch was planned; empty where the prompt is not planned."""
        if task.prompt is None or task.plan is None:
            return []
        placed = arrange(task.prompt.prompt, LAYOUTS[task.plan.layout])
        told: list[Reuse] = []
        for segment, planned in zip(placed, task.plan.segments, strict=True):
            if segment.kind == Kind.USER:
                told.append(_reuse("user", len(segment), planned))
            elif segment.kind == Kind.ITEM and isinstance(segment.key, int):
                told.append(_reuse("item", len(segment), planned, self.catalog.item_ids[segment.key]))
        return told

    def explanation(self, task: Task, answer: Answer) -> Explanation:
        """How the answer of a task came about. ValueError for scores that are no numbers."""
        spans = self._spans(task)
        if isinstance(task.request, RecommendRequest):
            return RecommendExplanation(answer=answer, levels=self._levels(task, answer.items), spans=spans)
        return RankExplanation(answer=answer, spans=spans)

    def _levels(self, task: Task, items: list[Item]) -> list[ExplainedLevel]:
        outcome = task.outcome
        assert isinstance(outcome, RecommendOutcome)
        if outcome.levels is None:  # of an executor without a model
            return []
        ids = [item.item_id for item in items]
        leaves = self._tree.leaf_of_row[self.catalog.rows(ids)[0]].tolist()
        answered: dict[int, list[str]] = {}
        for item_id, leaf in zip(ids, leaves, strict=True):
            answered.setdefault(leaf, []).append(item_id)
        return explain_levels(self._tree, self.catalog.symbols, outcome.levels, answered)

    def _spans(self, task: Task) -> list[ExplainedSpan]:
        if task.prompt is None or task.plan is None:
            instruction = len(self._prompts.suffix)
            return unplanned_spans(task.usage.prompt_tokens - instruction, instruction, task.parts)
        placed = arrange(task.prompt.prompt, LAYOUTS[task.plan.layout])
        return planned_spans(placed, task.plan, task.moves, self.catalog.item_ids, task.parts)

    def _recommend(self, request: RecommendRequest, tenant: str, read: Read | None) -> Task:
        info = self.info
        if request.rerank is not None:  # the server takes it away, where it can
            raise invalid("rerank", "rerank: only /v1/recommend of a server takes it")
        width = request.beam_width or info.beam_width
        if width > info.max_beam_width:
            raise invalid("beam_width", f"beam_width is {width}; the largest served is {info.max_beam_width}")
        if request.top_k > width:
            raise invalid("top_k", f"top_k is {request.top_k}; it can be at most beam_width, here {width}")
        if request.top_k > info.catalog_items:
            raise invalid("top_k", f"top_k is {request.top_k}; the catalog has {info.catalog_items} items")
        rows, unknown = known_history(request, self.catalog, self.info.max_history, self._reject_unknown)
        chosen, unknown_filtered = self._filter(request, rows)
        explained = isinstance(request, ExplainRecommend)
        work: Work
        unplanned = None
        if self._cached:
            history, parts, _ = self._history(request, rows, unknown, read)
            user = Content.of(history)
            prompt = make_prompt(user, self._prompts.suffix, key=_user_key(request, user, tenant))
            work = SegmentsWork(prompt, beam_width=width, filter=chosen, explained=explained)
            unplanned, tokens = UnplannedPrompt(prompt, "user_prefix"), count_tokens(prompt)
        else:
            whole, parts = self._whole(request, rows, unknown, read)
            work = RecommendWork(whole, width, chosen, explained)
            tokens = len(work.prompt)
        usage = self._usage(tokens, rows, unknown)
        usage.beam_width = width
        if request.filters is not None:
            usage.unknown_filter_items = unknown_filtered
        return Task(request, work, usage, rows, unplanned, parts=parts)

    def _whole(
        self, request: Request, rows: Int32, unknown: list[str], read: Read | None
    ) -> tuple[Int32, tuple[Part, ...]]:
        """A prompt of a history alone, and what the history's tokens are where it has texts of its own."""
        if read is None and request.history_texts is None:
            return self._prompts.build(rows), ()
        history, parts, _ = self._history(request, rows, unknown, read)
        return np.concatenate((history, self._prompts.suffix)), parts

    def _history(
        self, request: Request, rows: Int32, unknown: list[str], read: Read | None
    ) -> tuple[Int32, tuple[Part, ...], Found | None]:
        """The prompt up to the end of the history; where it has texts of its own, what its tokens are, and what a
        library has for these."""
        if read is None:
            if request.history_texts is not None:
                raise invalid("history_texts", f"history_texts: model {self.info.id!r} has no use for it")
            return self._prompts.user(rows), (), None
        missing = set(unknown)
        known = [at for at, item_id in enumerate(texts(request.history)) if item_id not in missing]
        tokens, parts = self._prompts.user_with(rows, [read.reviews[at] for at in known])
        if read.found is None:
            return tokens, parts, None
        have = [read.found[at] for at in known if len(read.reviews[at])]
        kept = sum(part.kind == "review" for part in parts)  # of a history that was cut, the last ones
        return tokens, parts, found_in_prompt(have[len(have) - kept :], parts)

    def _filter(self, request: RecommendRequest, history: Int32) -> tuple[ItemFilter, int]:
        """What may be returned, and how many ids of the request's filters the catalog lacks."""
        hidden = history if request.exclude_history else history[:0]
        filters = request.filters
        if filters is None:
            return (self._filters.choose(hidden, None, ()) if len(hidden) else NO_FILTER), 0
        self._check_filters(filters)
        denied, unknown = self.catalog.rows(texts([*filters.exclude, *filters.deny]))
        allowed = None
        if filters.allow is not None:
            allowed, unknown_allowed = self.catalog.rows(texts(filters.allow))
            unknown += unknown_allowed
        chosen = self._filters.choose(np.concatenate([hidden, denied]), allowed, filters.segments)
        if not chosen.n_items:
            raise invalid("filters", "filters: nothing of the catalog is left to recommend")
        return chosen, len(unknown)

    def _check_filters(self, filters: Filters) -> None:
        count, limit = 0, self.info.max_filter_items
        for name in ("exclude", "deny", "allow"):
            count += len(getattr(filters, name) or ())
            if count > limit:
                raise invalid(
                    f"filters.{name}",
                    f"filters.{name}: the filters have more than {limit} items, all lists together",
                )
        known = self._filters.segments
        for at, name in enumerate(filters.segments):
            if name not in known:
                near = self._filters.nearest(name)
                there = "the catalog has none" if near is None else f"the nearest is {quoted(near)}"
                field = f"filters.segments[{at}]"
                raise invalid(field, f"{field}: there is no segment {quoted(name)}; {there}")

    def _rank(self, request: RankRequest, tenant: str, read: Read | None) -> Task:
        self._refuse_useless(request)
        candidates = known_candidates(request, self.catalog, self.info.max_candidates)
        rows, unknown = known_history(request, self.catalog, self.info.max_history, self._reject_unknown)
        work: Work
        unplanned = None
        if self._segments is not None:
            history, parts, found = self._history(request, rows, unknown, read)
            user = Content.of(history)
            key = _user_key(request, user, tenant)
            layout = request.layout
            if layout is None and (self._plain or self._segments.labels):
                layout = "causal"
            plain = layout == CAUSAL.name
            prompt = self._segments.prompt(user, candidates, int(rows[-1]), key, labelled=plain)
            written = len(candidates) if self._segments.writes_lists else 0
            if written or plain:
                _check_positions(prompt, layout or USER_PREFIX.name, self._segments.max_position, written)
            work = SegmentsWork(prompt, *self._segments.columns(candidates))
            repair = self._repair_of(request)
            near = None
            if found is not None and self._library is not None and repair != ALL_ITEM_TOKENS:
                near = self._library.near(found, repair.share, request.reuse_budget)
            unplanned = UnplannedPrompt(prompt, layout, repair=repair, near=near)
            tokens = count_tokens(prompt)
        elif request.layout is not None or request.reuse_budget is not None:
            field = "layout" if request.layout is not None else "reuse_budget"
            raise invalid(
                field, f"{field}: this server ranks by likelihood, without candidates in the prompt"
            )
        else:
            whole, parts = self._whole(request, rows, unknown, read)
            work = RankWork(whole, self._tree.leaf_of_row[candidates])
            tokens = len(work.prompt)
        usage = self._usage(tokens, rows, unknown)
        usage.candidates = len(candidates)
        return Task(request, work, usage, candidates, unplanned, parts=parts)

    def _repair_of(self, request: RankRequest) -> Repair:
        """What is repaired of the request's candidates."""
        budget = request.reuse_budget
        if budget is None:
            return self._repair
        if not (self._plain and self._repair.share):
            raise invalid(
                "reuse_budget",
                "reuse_budget: needs a server with cache.policy=blocks and cache.repair_share above 0",
            )
        return ALL_ITEM_TOKENS if budget == 1 else structs.replace(self._repair, share=budget)

    def _prefill(self, request: Prefill, tenant: str) -> Task:
        """The user alone: as a prompt without candidates where these are in the prompt, else as one to go on from."""
        self._refuse_useless(request)
        rows, unknown = known_history(request, self.catalog, self.info.max_history, self._reject_unknown)
        user = Content.of(self._prompts.user(rows))
        prompt = make_prompt(user, NOTHING, key=_user_key(request, user, tenant))
        work = SegmentsWork(prompt, beam_width=int(self._segments is None))
        keeps = self._cached or self._segments is not None
        unplanned = UnplannedPrompt(prompt, "user_prefix", hint=True) if keeps else None
        return Task(request, work, self._usage(len(user), rows, unknown), NOTHING, unplanned)

    def _refuse_useless(self, request: RankRequest | Prefill) -> None:
        for name in SCORER_FIELDS:
            if getattr(request, name, None):
                raise invalid(name, f"{name}: model {self.info.id!r} has no use for it")

    def _usage(self, tokens: int, rows: Int32, unknown: list[str]) -> Usage:
        return Usage(
            prompt_tokens=tokens,
            computed_tokens=tokens,
            layout="causal",
            history_items=min(len(rows), self.info.max_history_in_prompt),
            unknown_items=len(unknown),
            unknown_item_ids=[item_id[:MAX_QUOTED_CHARS] for item_id in unknown[:MAX_LISTED_IDS]],
        )

    def _recommended(self, task: Task, outcome: RecommendOutcome) -> list[Item]:
        request, work = task.request, task.work
        assert isinstance(request, RecommendRequest) and not isinstance(work, RankWork)
        task.usage.dead_beams = work.beam_width - len(outcome.leaves)
        items: list[Item] = []
        # Every leaf that was entered has an item to return, so that so many leaves are enough.
        leaves, scores = outcome.leaves[: request.top_k], outcome.scores.tolist()
        each = self._tree.rows_of_each(leaves)
        if work.filter is not NO_FILTER:
            each = _kept(work.filter, each)
        for rows, score in zip(each, scores, strict=False):
            for row in rows[: min(self._items_per_id, request.top_k - len(items))]:
                items.append(self._item(row, score, len(items) + 1, request.include_metadata))
            if len(items) == request.top_k:
                break
        return items

    def _ranked(self, task: Task, outcome: RankOutcome) -> list[Item]:
        # Stable, so that equal scores keep the caller's order.
        request = task.request
        assert isinstance(request, RankRequest)
        order = (-outcome.scores).argsort(kind="stable")[: request.top_k]
        rows, scores = task.rows[order].tolist(), outcome.scores[order].tolist()
        ranked = enumerate(zip(rows, scores, strict=True), 1)
        return [self._item(row, score, rank, request.include_metadata) for rank, (row, score) in ranked]

    def _item(self, row: int, score: float, rank: int, with_metadata: bool) -> Item:
        item = Item(item_id=self.catalog.item_ids[row], score=score, rank=rank)
        if with_metadata:
            item.metadata = self.catalog.metadata[row]
        return item


def shadow(task: Task, repair: Repair | None = None) -> Task:
    """A copy of the task that is computed without the cache, in the same layout. repair: what to; None: the same."""
    assert task.prompt is not None and task.plan is not None
    near = task.prompt.near if repair is None else None
    repair = task.prompt.repair if repair is None else repair
    prompt = structs.replace(task.prompt, layout=task.plan.layout, fresh=True, repair=repair, near=near)
    return replace(task, usage=copy(task.usage), prompt=prompt)


def computed_whole(task: Task) -> Task:
    """The task with all of its prompt computed, in place of an approximate answer; others as they are."""
    prompt = task.prompt
    if task.kind != "rank" or prompt is None or prompt.hint:
        return task
    if prompt.repair == ALL_ITEM_TOKENS and prompt.near is None:
        return task
    return replace(task, prompt=structs.replace(prompt, repair=ALL_ITEM_TOKENS, near=None), whole=prompt)


def _kept(chosen: ItemFilter, each: list[list[int]]) -> list[list[int]]:
    """The rows of each leaf that a filter keeps."""
    flat = list(itertools.chain.from_iterable(each))
    left = set(itertools.compress(flat, chosen.keeps(np.array(flat, np.int32)).tolist()))
    return [[row for row in rows if row in left] for rows in each]


def _user_key(request: Asked, user: Content, tenant: str) -> str:
    """What the user's cache entry is called; a user without an id is known by the history."""
    return user_entry(request.user_id, tenant) or f"{tenant}history:{user.digest.hex()}"


def _check_positions(prompt: Prompt, layout: str, limit: int, written: int) -> None:
    """Candidates in causal order, and letters after them, take positions that the check at start-up does not count."""
    needed = max(segment.offset + len(segment) for segment in arrange(prompt, LAYOUTS[layout])) + written
    if needed > limit:
        raise invalid(
            "layout",
            f"layout: as {layout} the prompt needs {needed} positions; the model was made for {limit}",
        )


def _of_library(user: PlannedSegment) -> int | UnsetType:
    """Tokens of a history that are as a prototype of a library."""
    return sum(span.tokens for span in user.spans if isinstance(span, Approximate)) or UNSET


def _reuse(
    segment: Literal["user", "item"], tokens: int, planned: PlannedSegment, item_id: str | UnsetType = UNSET
) -> Reuse:
    return Reuse(
        segment=segment,
        item_id=item_id,
        tokens=tokens,
        cached_tokens=planned.cached,
        repaired_tokens=planned.repaired or UNSET,
        approximate_tokens=_of_library(planned) if segment == "user" else UNSET,
        kept=planned.write is not None,
    )
