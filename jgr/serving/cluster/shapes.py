# SPDX-License-Identifier: Apache-2.0
"""What the requests of a server's models are like, as routing and fetching reckon with them."""

from __future__ import annotations

from itertools import islice
from typing import Any

from jgr.serving.api import RankRequest, RecommendRequest, Request
from jgr.serving.cluster.reports import Shape
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.errors import RequestError
from jgr.serving.versions.served_models import Models, serves


def shape(models: Models) -> Shape:
    """Tokens of a prompt: of an event of the history, of a candidate, and of all else. Of the first model that ranks,
    else of the first, by its first items, which stand for the others."""
    engine = _typical(models)
    some = min(8, len(engine.served.catalog.item_ids))
    if some < 2:
        return {}
    try:
        one, events, items = (
            _tokens(_prepared(engine, *counts)) for counts in ((1, 1), (some, 1), (1, some))
        )
    except RequestError:  # it needs more of a request, such as times
        return {}
    event, item = (events - one) / (some - 1), (items - one) / (some - 1)
    both = float(_blocks(engine))
    return {
        "event_tokens": event, "item_tokens": item, "other_tokens": max(0.0, one - event - item), "both": both,
    }  # fmt: skip


def _blocks(engine: AnyEngine) -> bool:
    """Whether it reuses the user and the items of one prompt."""
    return isinstance(engine.served, ServedDecoder) and engine.served.config.cache.policy == "blocks"


def ns_per_token(models: Models, events: int, candidates: int) -> float:
    """What a token of such a request takes now where many wait; 0 where that is not known. Of the same model as the
    shape."""
    engine = _typical(models)
    try:
        task = _prepared(engine, max(1, events), max(1, candidates))
    except RequestError:
        return 0.0
    return float(engine.need_ns(task) / max(1, _tokens(task)))


def _typical(models: Models) -> AnyEngine:
    engines: list[AnyEngine] = [deployment.engine for deployment in models.deployments]
    return next((one for one in engines if serves(one.info, "rank")), engines[0])


def _prepared(engine: AnyEngine, events: int, candidates: int) -> Any:
    ids = list(islice(engine.served.catalog.item_ids, max(events, candidates)))
    request: Request = RecommendRequest(history=ids[:events], top_k=1)
    if serves(engine.info, "rank"):
        request = RankRequest(history=ids[:events], candidates=ids[:candidates])
    return engine.served.prepare(request, "")


def _tokens(task: Any) -> int:
    return int(task.usage.prompt_tokens)
