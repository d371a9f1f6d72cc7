# SPDX-License-Identifier: Apache-2.0
"""A decoder as the engine serves it: prompts to batches, outcomes to items, shadows of what was reused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
from msgspec import UNSET
from prometheus_client import Histogram

from jgr.cache.meta import CacheMeta
from jgr.cache.neighbours import Neighbours
from jgr.cache.pool import DevicePool
from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config
from jgr.models.quantize import Quantization
from jgr.prompt.layouts import CAUSAL, LAYOUTS
from jgr.serving.api import Answer, Item, ModelInfo, RankRequest, Request, Reuse
from jgr.serving.decoders import translation
from jgr.serving.decoders.caching import Caching, planned
from jgr.serving.decoders.paged_executor import DecoderExecutors
from jgr.serving.decoders.reading import Read, TextReader
from jgr.serving.decoders.translation import Prompts, Task, Translator
from jgr.serving.decoders.work import Outcome, Work
from jgr.serving.degrading import smaller
from jgr.serving.engine.contract import Executors, make_ordering
from jgr.serving.engine.engine import Engine, Rebuild
from jgr.serving.engine.metrics import Metrics
from jgr.serving.errors import RequestError, invalid
from jgr.serving.explanations import Explanation
from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.fidelity import Watch, agreement
from jgr.serving.policies.jobs import Job, Profile, Start
from jgr.serving.policies.run_costs import RunCosts
from jgr.serving.policies.sources import ALL_ITEM_TOKENS
from jgr.serving.prefill import Asked, Prefill

_log = logging.getLogger(__name__)


class ProfiledExecutors(Executors, Protocol):
    """Executors of compiled profiles."""

    profiles: tuple[Profile, ...]

    @property
    def costs(self) -> Mapping[Profile, float]:
        """Seconds of a run of each profile; empty before the warm-up."""

    @property
    def in_flight(self) -> int: ...


@dataclass(eq=False)
class ServedDecoder:
    """See jgr.serving.engine.contract.Served. executors: their profiles bound the prompts, beam widths and numbers of
    candidates that are served. caching: None where nothing is cached. memory: bytes that its parts take. reader: of the
    texts of requests; None: they have none."""

    executors: ProfiledExecutors
    translator: Translator
    config: Config
    metrics: Metrics
    caching: Caching | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    reader: TextReader | None = None

    def __post_init__(self) -> None:
        self.info: ModelInfo = self.translator.info
        self.catalog: Catalog = self.translator.catalog
        self.normalize = self.info.normalize
        self.meta: CacheMeta | Neighbours | None = None if self.caching is None else self.caching.lease.held
        self.pool: DevicePool | None = None if self.caching is None else self.caching.memory.pool
        self._handover_s = 0.0
        self.compares = self.config.cache.shadow > 0
        self.watch = Watch(self.config.cache.max_drift)
        rows = self.config.data_parallel.devices  # of a packed batch
        self._cost_tokens = {
            profile: profile.cost_tokens * (rows if profile.packed else 1)
            for profile in self.executors.profiles
        }

    def prepare(self, request: Asked, tenant: str = "", read: Read | None = None) -> Task:
        task = self.translator.prepare(request, tenant, read)
        counts = None if self.caching is None else self.caching.frequencies
        for_items = (
            counts is not None and tuple(task.rows.tolist()) in counts.own
        )  # the fleet's: they are exact
        return translation.computed_whole(task) if self.watch.fell_back and not for_items else task

    async def read(self, request: Asked) -> Read | None:
        return (
            None if self.reader is None or isinstance(request, Prefill) else await self.reader.read(request)
        )

    def measured(self) -> list[tuple[Profile, float]]:
        return [(profile, s + self._handover_s) for profile, s in self.executors.costs.items()]

    def policy(self, measured: bytes | None = None) -> Batcher:
        costs = self.measured()
        if measured is not None:
            costs = msgspec.json.decode(measured, type=list[tuple[Profile, float]])
        return make_batcher(self.executors, self.config, self.caching, dict(costs))

    def job(self, task: Task, job_id: int, arrival_ns: int, deadline_ns: int | None) -> Job:
        return Job(
            job_id,
            task.kind,
            task.tokens,
            task.width,
            arrival_ns,
            deadline_ns,
            task.prompt,
            priority=task.request.priority,
        )

    def foreseen(self, task: Task, now_ns: int) -> tuple[bool, int] | None:
        if self.caching is None or task.prompt is None:
            return False, 0
        cached = self.caching.groupings[task.kind].cached_user(task.prompt, now_ns)
        if cached is None:
            return False, 0
        return (True, cached) if cached == task.usage.prompt_tokens else None

    def smaller(self, task: Task) -> Request | None:
        if isinstance(task.request, Prefill):
            return None
        profiles = [profile for profile in self.executors.profiles if profile.kind == task.kind]
        together = task.kind == "rank" and profiles[0].packed  # a batch's width is that of all its candidates
        return smaller(task.request, task.width, None if together else [p.width for p in profiles])

    def too_large(self, task: Task) -> RequestError:
        size = f"{task.tokens} tokens with a width of {task.width}"
        return invalid("history", f"the prompt has {size}; no compiled profile takes that")

    async def fetch(self, task: Task, by_ns: int | None) -> None:
        """A decoder's jobs wait for nothing."""

    def begin(self, start: Start, tasks: Sequence[Task]) -> list[Work]:
        assert isinstance(start.shape, Profile)
        caching, shape = self.caching, start.shape
        works = [task.work for task in tasks] if caching is None else planned(start, tasks, caching)
        real_tokens = sum([task.usage.computed_tokens + task.width for task in tasks])
        self.metrics.observe_batch(shape.kind, len(tasks), shape.batch, real_tokens, self._cost_tokens[shape])
        return works

    def take(self, start: Start, tasks: Sequence[Task | None], outcomes: Sequence[Outcome]) -> None:
        for task, outcome in zip(tasks, outcomes, strict=True):
            if task is not None:
                task.outcome = outcome

    def items(self, task: Task) -> list[Item]:
        assert task.outcome is not None
        return self.translator.items(task, task.outcome)

    def explain(self, task: Task) -> list[Reuse]:
        return self.translator.explain(task)

    def explanation(self, task: Task, answer: Answer) -> Explanation:
        return self.translator.explanation(task, answer)

    def shadows(self, task: Task) -> list[tuple[Task, Callable[[Task], None]]]:
        """The task without the cache; and where it was repaired, in causal order among its items too (BAT-15). Where it
        was computed whole in place of that, as it is repaired."""
        assert task.outcome is not None
        compare, metrics = partial(_compare, task.outcome), self.metrics
        drift = metrics.quantize_drift if self.config.cache.quantize else metrics.drift
        shadows: list[tuple[Task, Callable[[Task], None]]] = [
            (translation.shadow(task), partial(compare, drift))
        ]
        if task.usage.repaired_tokens is UNSET:
            return shadows
        if task.whole is not None:
            repaired = translation.shadow(replace(task, prompt=task.whole))
            shadows.append((repaired, partial(self._judge, task)))
        elif task.prompt is not None and task.prompt.repair != ALL_ITEM_TOKENS:
            whole = translation.shadow(task, ALL_ITEM_TOKENS)
            shadows.append((whole, partial(self._judge, task)))
        return shadows

    def _judge(self, answered: Task, again: Task) -> None:
        """Count how far approximate scores are from whole ones; one of the two was the answer."""
        metrics = self.metrics
        exact, approximate = (answered, again) if answered.whole is not None else (again, answered)
        assert exact.outcome is not None and approximate.outcome is not None
        _compare(approximate.outcome, metrics.repair_drift, exact)
        found = agreement(exact.outcome.scores, approximate.outcome.scores)
        if found is None:
            return
        metrics.repair_tau.observe(found.tau)
        metrics.repair_overlap.observe(found.overlap)
        metrics.repair_divergence.observe(found.kl)
        if not self._left_to_us(answered.request):  # what a request asked for says nothing of the others
            return
        changed = self.watch.observe(found.tau)
        if changed:
            said = "prompts are computed whole" if self.watch.fell_back else "prompts are approximated again"
            most = self.config.cache.max_drift
            _log.warning(
                "%s: %s: the order drifts by %.3f, cache.max_drift is %s",
                self.info.version, said, self.watch.mean, most,
            )  # fmt: skip

    def _left_to_us(self, request: Asked) -> bool:
        """Whether a request leaves to the server what is approximated, and in which order."""
        assert isinstance(request, RankRequest)
        own = (None, CAUSAL.name) if self.config.cache.policy == "blocks" else (None, *LAYOUTS)
        return request.reuse_budget is None and request.layout in own

    def lost(self, request: Asked) -> None:
        """Nobody wants to know."""

    def starting(self) -> None:
        """A decoder's pages are taken by requests."""

    def started(self, handover_s: float = 0.0) -> None:
        self._handover_s = handover_s
        if self.caching is not None:
            self.caching.start()
        reader, executors = self.reader, self.executors
        if reader is not None and reader.library is not None and isinstance(executors, DecoderExecutors):
            reader.threads.submit(executors.catch_up)  # so that the first request need not wait for it

    def close(self, idle: bool) -> None:
        if self.reader is not None:
            self.reader.close()
        if idle and self.caching is not None:
            self.caching.close()

    def join(self, timeout_s: float) -> bool:
        return True

    def check(self) -> None:
        """The policy audits the cache."""


def make_batcher(
    executors: ProfiledExecutors, config: Config, caching: Caching | None, costs: Mapping[Profile, float]
) -> Batcher:
    """The policy of a decoder. costs: seconds of a run. ConfigError where profiles and batching do not fit."""
    batching = config.batching
    return Batcher(
        executors.profiles,
        max_tokens=batching.max_tokens,
        max_wait_ns=round(batching.max_wait_ms * 1e6),
        max_queue=batching.max_queue,
        groupings=None if caching is None else caching.groupings,
        shadow_share=config.cache.shadow,
        streams=executors.lanes,
        in_flight=executors.in_flight,
        ordering=make_ordering(config),
        costs=RunCosts(costs),
    )


def decoder_engine(
    name: str,
    catalog: Catalog,
    tree: PrefixTree,
    prompts: Prompts,
    executors: ProfiledExecutors,
    config: Config,
    *,
    metrics: Metrics | None = None,
    clock: Callable[[], int] | None = None,
    revision: str = "",
    rebuild: Rebuild | None = None,
    caching: Caching | None = None,
    memory: Mapping[str, int] | None = None,
    reader: TextReader | None = None,
    quantize: Quantization = "",
) -> Engine[ServedDecoder]:
    """The engine of one decoder over one catalog, not started.

    metrics: may be shared with the engines of other versions. revision: what tells the model's versions apart.
    quantize: how its weights are held. Others as of Engine and ServedDecoder. ConfigError where profiles, batching and
    beam width do not fit.
    """
    batcher = make_batcher(executors, config, caching, executors.costs)
    translator = Translator(
        name,
        catalog,
        tree,
        prompts,
        config,
        revision=revision,
        max_beam_width=batcher.max_width("recommend"),
        max_candidates=batcher.max_width("rank"),
        segments=None if caching is None else caching.segments,
        cached=caching is not None and "recommend" in caching.groupings,
        library=None if reader is None else reader.library,
    )
    translator.info = msgspec.structs.replace(translator.info, quantize=quantize)
    served = ServedDecoder(executors, translator, config, metrics or Metrics(), caching, memory or {}, reader)
    timed = {} if clock is None else {"clock": clock}
    return Engine(
        served, config.server.default_deadline_ms, rebuild=rebuild, journal=config.server.journal, **timed
    )


def _compare(answered: Outcome, drift: Histogram, again: Task) -> None:
    """Count how far the scores of an answer are from those of its shadow."""
    assert again.outcome is not None
    count = min(len(answered.scores), len(again.outcome.scores))
    drift.observe(float(np.abs(answered.scores[:count] - again.outcome.scores[:count]).max(initial=0)))
