# SPDX-License-Identifier: Apache-2.0
"""The runs that a decoder's cost model is fitted to: programs of other shapes than those it serves with (SIM-10).

Kinds of work are `recommend` and `rank`, of rows, and `recommend_packed` and `rank_packed`, of packed rows, whose
prompts go on from cached tokens. Shapes reach from a part of the largest configured one up to it, so that the model
predicts between them. Works fill their shapes, which is the most that a run of one takes; only what of the context is
cached varies within a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jgr.models import decoder_costs, generator_costs, lazy_decoder_costs
from jgr.models.beam import CatalogTables
from jgr.models.costs import Cost
from jgr.models.decoder import DecoderConfig
from jgr.models.generator_costs import Level, Prefill, Work
from jgr.models.generators import GeneratorConfig
from jgr.ops.constrained_topk import packed_capacity
from jgr.prompt.layouts import Kind
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.decoders.paged_executor import DecoderExecutors, PagedExecutor
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.work import RankWork, RecommendWork, SegmentsWork
from jgr.serving.decoders.work import Work as Asked
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.cost_profile import Trial, choose, spaced
from jgr.serving.policies.jobs import Profile
from jgr.serving.policies.sources import Compute, PlannedPrompt, PlannedSegment, Reuse

MOST_PROGRAMS = 18
"""The most programs of one kind that are compiled."""
LEAST_TOKENS = 16
"""The shortest prompts, or packed rows, where the configured ones are not shorter."""


def cost(cfg: GeneratorConfig, works: Sequence[Work], itemsize: int, weight_size: int | None = None) -> Cost:
    """What a generator's works cost together. weight_size: see jgr.models.decoder_costs.cost."""
    total = Cost()
    for work in works:
        if isinstance(cfg, DecoderConfig):
            total = total.plus(decoder_costs.cost(cfg, work, itemsize, weight_size))
        else:
            total = total.plus(lazy_decoder_costs.cost(cfg, work, itemsize, weight_size))
    return total


def levels(tables: CatalogTables) -> tuple[Level, ...]:
    """The sizes of a catalog's levels; nodes that pad a table have no children."""
    found = []
    for level in range(tables.depth):
        degrees = np.diff(np.asarray(tables.offsets[level]))
        nodes, children = int((degrees > 0).sum()), int(degrees.sum())
        found.append(Level(int(tables.head[level].shape[0]), nodes, children, int(degrees.max(initial=0))))
    return tuple(found)


def grid(profiles: Sequence[Profile], most: int = MOST_PROGRAMS) -> tuple[Profile, ...]:
    """Shapes for each kind of these profiles, up to the largest of each of their sizes; at most `most` of a kind."""
    found: list[Profile] = []
    for kind, packed in dict.fromkeys((profile.kind, profile.packed) for profile in profiles):
        own = [profile for profile in profiles if (profile.kind, profile.packed) == (kind, packed)]
        batch, tokens, width, context = (
            max(getattr(profile, name) for profile in own) for name in ("batch", "tokens", "width", "context")
        )
        # A packed row has all its requests: their number, and that of candidates, is the largest shape's.
        axes = (
            (batch,) if packed else spaced(batch, 3),
            spaced(tokens, 4, min(LEAST_TOKENS, tokens)),
            (width,) if packed and kind == "rank" else spaced(width, 3),
            spaced(context, 3) if packed else (0,),
        )
        for b, t, w, c in choose(axes, most):
            found.append(Profile(kind, b, t, w, packed, c))
    return tuple(found)


def trials(executors: DecoderExecutors, progress: Progress, most: int = MOST_PROGRAMS) -> list[Trial]:
    """Compile the grid's programs beside those of the executors, and give the runs to time."""
    plain = executors.plain.with_profiles(grid(executors.plain.profiles, most))
    paged = executors.paged
    paged = None if paged is None else paged.with_profiles(grid(paged.profiles, most))
    own = DecoderExecutors(plain, paged)
    own.warm_up(progress)
    found = [_row_trial(plain, profile) for profile in plain.profiles]
    if paged is not None:
        found += [trial for profile in paged.profiles for trial in _packed_trials(plain, paged, profile)]
    return found


def _row_trial(executor: RowExecutor, profile: Profile) -> Trial:
    cfg, tables, _ = executor.model
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, cfg.vocab_size, (profile.batch, profile.tokens), np.int32)
    works: list[Asked] = [RecommendWork(prompt, profile.width) for prompt in prompts]
    if profile.kind == "rank":
        leaves = draw.integers(0, tables.n_leaves, (profile.batch, profile.width), np.int32)
        works = [RankWork(*row) for row in zip(prompts, leaves, strict=True)]
    prefill = generator_costs.prefill(profile.batch, profile.tokens)
    counted = (prefill, *_after(executor, profile, profile.tokens))
    label = f"{profile.batch}x{profile.tokens} width {profile.width}"
    return _trial(executor, executor, profile, works, counted, label)


def _packed_trials(plain: RowExecutor, executor: PagedExecutor, profile: Profile) -> Iterator[Trial]:
    """A prompt that ranks an item, or as many to go on from as the profile takes, after no cached tokens, half of those
    that are compiled and all of them, as far as the pool has so many."""
    is_rank = profile.kind == "rank"
    requests = 1 if is_rank else max(1, min(profile.batch, profile.tokens // 2))
    new, kv = profile.tokens // requests, executor.kv
    most = min(profile.context, executor.pool.pages * kv.slots // kv.parts) // requests
    whole = profile.tokens + profile.context
    if not is_rank:
        whole = min(executor.longest, whole)
        new = min(new, whole)
        most = min(most, whole - new)
    most = most // kv.tokens * kv.tokens
    for cached in sorted({0, most // 2, most}):
        works = [_prompt(executor, profile, at, new, cached) for at in range(requests)]
        pairs = requests * (new * cached + new * (new + 1) // 2)
        read = profile.width if is_rank else requests
        # All slots of the compiled context are gathered, whatever stands in them.
        prefill = Prefill(profile.tokens, profile.context, pairs, read, requests * (cached + new))
        after = () if is_rank else _after(plain, profile, whole)
        label = f"{profile.tokens} after {requests * cached} of {profile.context} width {profile.width}"
        yield _trial(plain, executor, profile, works, (prefill, *after), label)


def _after(executor: RowExecutor, profile: Profile, context: int) -> tuple[Work, ...]:
    """The works after the prompt."""
    cfg, tables, normalize = executor.model
    tree, full = levels(tables), 0
    if normalize == "full":
        full = cfg.vocab_size
    if profile.kind == "rank":
        return generator_costs.score(profile.batch, profile.width, context, tree, full)
    return generator_costs.search(profile.batch, profile.width, context, tree, packed_capacity, full)


def _trial(
    plain: RowExecutor,
    executor: RowExecutor | PagedExecutor,
    profile: Profile,
    works: Sequence[Any],
    counted: Sequence[Work],
    label: str,
) -> Trial:
    cfg, tables, _ = plain.model
    kind = f"{profile.kind}_packed" if profile.packed else profile.kind
    found = cost(cfg, counted, int(tables.head[0].dtype.itemsize), plain.weight_size)
    return Trial(
        kind,
        label,
        found,
        len(works),
        partial(executor.launch, profile, works),
        executor.collect,
        lambda pending: jax.tree.leaves(pending.outputs),
    )


def _prompt(executor: PagedExecutor, profile: Profile, number: int, new: int, cached: int) -> SegmentsWork:
    """The batch's request of this number: `new` tokens after `cached` ones, which stand in cells of its own."""
    token = np.zeros(1, np.int32)
    items = [(0, Content.of(token))] if profile.kind == "rank" else []
    own = max(0, new - 1 - len(items))
    cells = -(-cached // executor.kv.tokens) * executor.kv.parts
    prompt = make_prompt(Content.of(np.zeros(cached + own, np.int32)), token, items)
    user = (Reuse(cached, tuple(range(number * cells, (number + 1) * cells))), Compute(own))
    segments = [PlannedSegment(Kind.USER, user)]
    plan = PlannedPrompt.of(
        "user_prefix", [*segments, *(PlannedSegment(segment.kind, (Compute(1),)) for segment in prompt[1:])]
    )
    if items:
        return SegmentsWork(prompt, columns=token, plan=plan)
    return SegmentsWork(prompt, beam_width=profile.width, plan=plan)
