# SPDX-License-Identifier: Apache-2.0
"""Rankings for evaluation, made by the engine that serves: the same prompts, batches and programs as a request's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import Examples
from jgr.serving.api import RecommendRequest
from jgr.serving.engine import Engine

CONCURRENCY = 32  # requests in flight: enough to fill batches, few enough for any queue


async def recommend_all(
    engine: Engine,
    examples: Examples,
    *,
    top_k: int,
    beam_width: int | None = None,
    exclude_history: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> npt.NDArray[np.int32]:
    """The engine's top_k rows for every example's history: [n, top_k] int32, best first, -1 where it gave fewer.

    engine: started. on_answer: called after each answer. Raises what the engine raises for any of the requests.
    """
    catalog = engine.translator.catalog
    ranked = np.full((len(examples), top_k), -1, np.int32)
    todo = iter(range(len(examples)))

    async def worker() -> None:
        for i in todo:
            history: list[str | int] = [catalog.item_ids[row] for row in examples.histories[i]]
            request = RecommendRequest(
                history=history, top_k=top_k, beam_width=beam_width, exclude_history=exclude_history
            )
            answer = await engine.answer(request)
            rows, _ = catalog.rows([item.item_id for item in answer.items])
            ranked[i, : len(rows)] = rows
            on_answer()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(worker())
    return ranked
