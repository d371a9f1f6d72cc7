# SPDX-License-Identifier: Apache-2.0
"""`"rerank"` in a request of /v1/recommend: one model's beam finds the items, another model of the server orders them.

The one idea: it is two requests in one call, the second a rank request for what the first found. Both have the deadline
that counts from the call's arrival, the caller's key and its priority, and each goes through its own model's queue. So
an answer is exactly what a client would get that asked /v1/recommend and then /v1/rank, but for one trip.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import UNSET
from msgspec.structs import replace

from jgr.serving.api import Answer, Item, RankRequest, RecommendRequest, Timing
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.errors import RequestError, invalid

Ask = Callable[[AnyEngine, RecommendRequest | RankRequest], Awaitable[Answer]]
"""Asks an engine within the same call. Raises RequestError."""


async def reranked(
    ask: Ask, finder: AnyEngine, find_ranker: Callable[[], AnyEngine], request: RecommendRequest
) -> Answer:
    """The items of the finder's beam in the ranker's order, with its scores.

    find_ranker: gives the engine that serves now; by the time that the items are found it may be another. Raises
    RequestError where there is none.

    As many items are ranked as the beam may find, beam_width, and no more than the ranker takes. Raises RequestError;
    what is wrong with the second request is told of the field rerank.
    """
    ranker = find_ranker()
    width = request.beam_width or finder.info.beam_width
    depth = min(width, ranker.info.max_candidates, finder.info.catalog_items)
    if request.top_k > ranker.info.max_candidates:
        raise invalid(
            "rerank", f"rerank: {ranker.info.id!r} ranks at most {ranker.info.max_candidates} items"
        )
    first = replace(request, rerank=None, top_k=max(depth, request.top_k))
    found = await ask(finder, first)
    if not found.items:
        return found
    second = RankRequest(
        history=request.history,
        candidates=[item.item_id for item in found.items],
        user_id=request.user_id,
        top_k=min(request.top_k, len(found.items)),
        deadline_ms=request.deadline_ms,
        priority=request.priority,
    )
    del ranker  # a reload meanwhile frees it
    ranker = find_ranker()
    try:
        ranked = await ask(ranker, second)
    except RequestError as error:
        if error.type != "invalid_request":
            raise
        raise invalid(
            "rerank", f"rerank: {ranker.info.id!r} cannot order these items: {error.message}"
        ) from None
    return merged(found, ranked)


def merged(found: Answer, ranked: Answer) -> Answer:
    """The first answer, with the second one's order and scores, and the time of both."""
    of = {item.item_id: item for item in found.items}
    items = [
        Item(
            item_id=item.item_id,
            score=item.score,
            rank=item.rank,
            scores=item.scores,
            metadata=of[item.item_id].metadata,
        )
        for item in ranked.items
    ]
    took, then = found.timing_ms, ranked.timing_ms
    timing = Timing(
        queue=took.queue + then.queue,
        # The second one's counts from the call's arrival, as its total does.
        prepare=took.prepare + max(0.0, then.prepare - took.total),
        device=took.device + then.device,
        total=then.total,
    )
    usage = replace(found.usage, candidates=ranked.usage.candidates)
    return replace(
        found, reranked_by=ranked.model, normalize=UNSET, items=items, usage=usage, timing_ms=timing
    )
