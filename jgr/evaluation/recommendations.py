# SPDX-License-Identifier: Apache-2.0
"""Rankings for evaluation, made by the engine that serves: the same prompts, batches and programs as a request's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.data.interactions import Examples
from jgr.evaluation.served import EvaluationError, Query, check_catalog, ranks, rows_of
from jgr.serving.api import Answer, Item, ModelInfo, RankRequest, RecommendRequest, Request
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.errors import RequestError

CONCURRENCY = 32  # requests in flight: enough to fill batches, few enough for any queue


async def recommend_all(
    engine: AnyEngine,
    examples: Examples,
    *,
    top_k: int,
    beam_width: int | None = None,
    exclude_history: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> npt.NDArray[np.int32]:
    """The engine's top_k rows for every example's history: [n, top_k] int32, best first, -1 where it gave fewer.

    engine: started. on_answer: called after each answer. EvaluationError names the example that is refused.
    """
    query = Query(top_k, beam_width, exclude_history)
    ranked = np.full((len(examples), top_k), -1, np.int32)

    async def ask(i: int) -> None:
        answer = await _answer(engine, _request(engine, examples, i, query), i)
        rows = rows_of(engine.catalog, [item.item_id for item in answer.items])
        ranked[i, : len(rows)] = rows
        on_answer()

    await _each(len(examples), ask)
    return ranked


async def rank_all(
    engine: AnyEngine, requests: Sequence[dict[str, Any]], on_answer: Callable[[], None]
) -> list[list[Item]]:
    """See Served. engine: started."""
    found: list[list[Item]] = [[] for _ in requests]

    async def ask(i: int) -> None:
        found[i] = (await _answer(engine, RankRequest(**requests[i]), i)).items
        on_answer()

    await _each(len(requests), ask)
    return found


async def _each(count: int, ask: Callable[[int], Awaitable[None]]) -> None:
    """Every number below count, CONCURRENCY of them at a time."""
    todo = iter(range(count))

    async def worker() -> None:
        for i in todo:
            await ask(i)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def latencies_s(engine: AnyEngine, examples: Examples, queries: Sequence[Query]) -> list[list[float]]:
    """See Served. engine: started."""
    seconds: list[list[float]] = [[] for _ in queries]
    for i in range(len(examples)):
        for query, taken in zip(queries, seconds, strict=True):
            request = _request(engine, examples, i, query)
            start = time.perf_counter()
            await _answer(engine, request, i)
            taken.append(time.perf_counter() - start)
    return seconds


class LocalEngine:
    """An engine of this process behind blocking calls, as jgr.evaluation.served.Served.

    A context manager: entering it starts the engine, which compiles; leaving it drains. catalog: the dataset's;
    EvaluationError where the engine serves another. on_compiled: told how many programs are compiled, of how many.
    """

    in_flight = CONCURRENCY

    def __init__(
        self,
        engine: AnyEngine,
        catalog: Catalog,
        drain_timeout_s: float,
        on_compiled: Progress = lambda done, total, label: None,
    ) -> None:
        self.info: ModelInfo = engine.info
        check_catalog("model", {self.info.catalog_version}, catalog)
        self._engine, self._drain_timeout_s, self._on_compiled = engine, drain_timeout_s, on_compiled

    def __enter__(self) -> LocalEngine:
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._engine.start(self._on_compiled))
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with self._runner:
            self._runner.run(self._engine.drain(self._drain_timeout_s))
        self._engine.join(self._drain_timeout_s)

    def recommend_all(
        self, examples: Examples, query: Query, on_answer: Callable[[], None] = lambda: None
    ) -> npt.NDArray[np.int32]:
        """See Served."""
        asked = recommend_all(
            self._engine,
            examples,
            top_k=query.top_k,
            beam_width=query.beam_width,
            exclude_history=query.exclude_history,
            on_answer=on_answer,
        )
        return self._runner.run(asked)

    def rank_all(
        self, requests: Sequence[dict[str, Any]], on_answer: Callable[[], None] = lambda: None
    ) -> list[list[Item]]:
        """See Served."""
        return self._runner.run(rank_all(self._engine, requests, on_answer))

    def latencies_s(self, examples: Examples, queries: Sequence[Query]) -> list[list[float]]:
        """See Served: from the request to the answer, in the event loop."""
        return self._runner.run(latencies_s(self._engine, examples, queries))


def _request(engine: AnyEngine, examples: Examples, i: int, query: Query) -> Request:
    kind = RankRequest if ranks(engine.info) else RecommendRequest
    return kind(**query.of(engine.catalog, engine.info, examples, i))


async def _answer(engine: AnyEngine, request: Request, i: int) -> Answer:
    try:
        return await engine.answer(request)
    except RequestError as error:
        raise EvaluationError(f"example {i}: {error.message}") from None
