# SPDX-License-Identifier: Apache-2.0
"""`/v1/rerank` in the shape of Jina and Cohere, `/v1/score` in vLLM's: other words for the request of `/v1/rank`.

The one idea: a query is a user's history and a document is an item id, since no model here reads free text. A body
becomes a RankRequest, the engine's Answer becomes the other shape, and an error gets the names that the caller used.

A text in a place of ids gets a 400 `not_an_item_id`. The same document may stand in a list twice, as elsewhere: it is
scored once. Scores are the model's own (log-likelihoods of a generator), not shares of 1.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from jgr.serving.api import (
    Answer,
    Context,
    Deadline,
    History,
    HistoryActions,
    HistoryTimes,
    IncludeMetadata,
    ModelName,
    PriorityField,
    RankRequest,
    Scenario,
    Time,
    UserId,
)
from jgr.serving.errors import RequestError, invalid
from jgr.serving.http.decoding import UNREADABLE, refusal

R = TypeVar("R", "RerankRequest", "ScoreRequest")

_encode = msgspec.json.Encoder().encode


class Query(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The user for whom items are scored, with what a model may read of a user besides the history."""

    history: History
    user_id: UserId = None
    history_times: HistoryTimes = None
    time: Time = None
    history_actions: HistoryActions = None
    context: Context = None
    scenario: Scenario = 0


ItemIds = Annotated[
    list[str | int],
    Meta(min_length=1, description="Ids of items of the catalog.", examples=[["B00C", "B00D"]]),
]
_USER = (
    "The user: a history, which is a list of item ids, oldest first, or an object with it. A text gets a 400, since no "
    "model reads one."
)
_ITEMS = "Ids of the items to score, each in the catalog; one that comes twice is scored once."


class RerankRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Asks for documents, which are items of the catalog, to be scored for a query, which is a user's history."""

    query: Annotated[History | Query, Meta(description=_USER)]
    documents: Annotated[
        list[str | int],
        Meta(
            min_length=1,
            description=f"{_ITEMS} A text that is no item's id gets a 400.",
            examples=[["B00C", "B00D"]],
        ),
    ]
    model: ModelName = None
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Number of results, the best ones; null, 0 or more than there are documents: all."),
    ] = None
    return_documents: Annotated[bool, Meta(description="Repeat the document in each result.")] = True
    include_metadata: IncludeMetadata = False
    deadline_ms: Deadline = None
    priority: PriorityField = "interactive"


class ScoreRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Asks for the score of each item for one user: queries with items or documents, or text_1 with text_2."""

    queries: Annotated[History | Query | None, Meta(description=_USER)] = None
    items: Annotated[ItemIds | str | int | None, Meta(description=_ITEMS)] = None
    documents: Annotated[ItemIds | str | int | None, Meta(description="Another name of items.")] = None
    text_1: Annotated[History | Query | None, Meta(description="Another name of queries.")] = None
    text_2: Annotated[ItemIds | str | int | None, Meta(description="What text_1 has in place of items.")] = (
        None
    )
    model: ModelName = None
    deadline_ms: Deadline = None
    priority: PriorityField = "interactive"


PAIRS = (("queries", "items"), ("queries", "documents"), ("text_1", "text_2"))
"""The names of user and items that go together in a ScoreRequest."""


class TokenUsage(Struct, kw_only=True):
    """The tokens that a request cost, as other APIs count them."""

    prompt_tokens: Annotated[int, Meta(description="Number of tokens in the prompt, without padding.")]
    total_tokens: Annotated[int, Meta(description="The same number: nothing is generated.")]
    cached_tokens: Annotated[int, Meta(description="Prompt tokens with keys and values from the cache.")]


class Document(Struct, kw_only=True, gc=False):
    """A document of the request."""

    text: Annotated[str, Meta(description="The item's id.")]
    metadata: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="The item's metadata in the catalog; only if include_metadata is true."),
    ] = UNSET


class RerankResult(Struct, kw_only=True, gc=False):
    """One document with its score."""

    index: Annotated[int, Meta(ge=0, description="Place of the document in the request, from 0.")]
    relevance_score: Annotated[
        float,
        Meta(
            description="The score that results are ordered by, highest first: the model's own, as of /v1/rank."
        ),
    ]
    document: Annotated[
        Document | UnsetType, Meta(description="The document; absent if return_documents is false.")
    ] = UNSET


class RerankAnswer(Struct, kw_only=True):
    """The documents, best first."""

    id: Annotated[str, Meta(description="The request's id: X-Request-Id, or one that the server made.")]
    model: Annotated[str, Meta(description="Version of the model that computed the scores.")]
    results: Annotated[list[RerankResult], Meta(description="The documents, best first.")]
    usage: Annotated[TokenUsage, Meta(description="What the request cost.")]


class Score(Struct, kw_only=True, gc=False):
    """The score of one item."""

    index: Annotated[int, Meta(ge=0, description="Place of the item in the request, from 0.")]
    object: Annotated[Literal["score"], Meta(description="The kind of this object.")] = "score"
    score: Annotated[float, Meta(description="The model's own score, as of /v1/rank.")]


class ScoreAnswer(Struct, kw_only=True):
    """The items' scores, in the request's order."""

    id: Annotated[str, Meta(description="The request's id: X-Request-Id, or one that the server made.")]
    object: Annotated[Literal["list"], Meta(description="The kind of this object.")] = "list"
    created: Annotated[int, Meta(description="Time of the answer, in seconds since 1970.")]
    model: Annotated[str, Meta(description="Version of the model that computed the scores.")]
    data: Annotated[list[Score], Meta(description="The scores, in the request's order.")]
    usage: Annotated[TokenUsage, Meta(description="What the request cost.")]


@dataclass(frozen=True)
class Translated:
    """A body as the engine takes it. encode: makes the answer's body. refused: an error in the body's own terms."""

    request: RankRequest
    encode: Callable[[Answer], bytes]
    refused: Callable[[RequestError], RequestError]


Most = Callable[[str | None], int]
"""How many documents the model of that name takes. Raises RequestError where there is none."""
Translate = Callable[[bytes, Most], Translated]
"""Reads the body of a request in another shape. Raises RequestError for one that is none, and for one with more
documents than its model takes: each is told in the answer, also those that come twice, which the engine does not see.
"""

_rerank = msgspec.json.Decoder(RerankRequest)
_score = msgspec.json.Decoder(ScoreRequest)


def rerank(body: bytes, most: Most) -> Translated:
    """A body of /v1/rerank. Raises RequestError, which names the field at fault."""
    given = _decoded(_rerank, body, RerankRequest)
    asked = _Asked(given, "query", "documents", given.query, given.documents, most)

    def encode(answer: Answer) -> bytes:
        results = []
        for item in answer.items:
            document: Document | UnsetType = UNSET
            if given.return_documents:
                document = Document(text=item.item_id, metadata=item.metadata)
            for index in asked.places(item.item_id):
                results.append(RerankResult(index=index, relevance_score=item.score, document=document))
        found = results[: given.top_n or None]
        return _encode(RerankAnswer(id=answer.id, model=answer.model, results=found, usage=_usage(answer)))

    top_k = min(given.top_n, len(asked.unique)) if given.top_n else None
    return Translated(asked.request(top_k, given.include_metadata), encode, asked.refused)


def score(body: bytes, most: Most) -> Translated:
    """A body of /v1/score. Raises RequestError, which names the field at fault."""
    given = _decoded(_score, body, ScoreRequest)
    names = [
        name
        for name in ("queries", "text_1", "items", "documents", "text_2")
        if getattr(given, name) is not None
    ]
    if tuple(names) not in PAIRS:
        found = ", ".join(names) or "none of them"
        raise invalid(
            names[-1] if names else "queries",
            f"give queries with items, queries with documents, or text_1 with text_2; there is {found}",
        )
    user, items = names
    listed = getattr(given, items)
    listed = listed if isinstance(listed, list) else [listed]
    asked = _Asked(given, user, items, getattr(given, user), listed, most)

    def encode(answer: Answer) -> bytes:
        by_index = [(index, item.score) for item in answer.items for index in asked.places(item.item_id)]
        scores = [Score(index=index, score=value) for index, value in sorted(by_index)]
        return _encode(
            ScoreAnswer(
                id=answer.id, created=int(time.time()), model=answer.model, data=scores, usage=_usage(answer)
            )
        )

    return Translated(asked.request(None, False), encode, asked.refused)


class _Asked:
    """What a body asks for. user, items: the names of these two fields in it."""

    def __init__(
        self,
        given: RerankRequest | ScoreRequest,
        user: str,
        items: str,
        query: list[str | int] | Query,
        documents: Sequence[str | int],
        most: Most,
    ) -> None:
        self._given, self._user, self._items = given, user, items
        self._query = Query(history=query) if isinstance(query, list) else query
        self._history = user if isinstance(query, list) else f"{user}.history"
        limit = most(given.model)
        if len(documents) > limit:  # before they are looked at, one by one on the event loop
            raise invalid(items, f"{items} has {len(documents)} items; the limit is {limit}")
        self._at: dict[str, list[int]] = {}
        for index, document in enumerate(documents):
            self._at.setdefault(str(document), []).append(index)
        self.unique: list[str | int] = list(self._at)
        """The item ids, each once, in the request's order."""

    def places(self, item_id: str) -> list[int]:
        """Where an item stands in the request."""
        return self._at[item_id]

    def request(self, top_k: int | None, include_metadata: bool) -> RankRequest:
        return RankRequest(
            candidates=self.unique,
            model=self._given.model,
            top_k=top_k,
            deadline_ms=self._given.deadline_ms,
            priority=self._given.priority,
            include_metadata=include_metadata,
            **{name: getattr(self._query, name) for name in Query.__struct_fields__},
        )

    def refused(self, error: RequestError) -> RequestError:
        """An engine's error about the RankRequest, about the fields that the body has."""
        field = error.field
        if field is None:
            return error
        if unknown := re.fullmatch(r"candidates\[(\d+)\]", field):
            named = f"{self._items}[{self._at[str(self.unique[int(unknown[1])])][0]}]"
            return _no_id(named, f"{named}: {error.message}")
        name = re.split(r"[.[]", field)[0]
        ours = {"candidates": self._items, "history": self._history, "top_k": "top_n"}
        if name not in Query.__struct_fields__ and name not in ours:
            return error
        named = ours.get(name, f"{self._user}.{name}") + field[len(name) :]
        if error.message.startswith(field):
            message = named + error.message[len(field) :]
        else:
            message = f"{named}: {error.message}"
        return RequestError(
            error.type,
            message,
            named,
            predicted_ms=error.predicted_ms,
            retry_after_s=error.retry_after_s,
        )


def _usage(answer: Answer) -> TokenUsage:
    tokens = answer.usage.prompt_tokens
    return TokenUsage(prompt_tokens=tokens, total_tokens=tokens, cached_tokens=answer.usage.cached_tokens)


def _decoded(decoder: msgspec.json.Decoder[R], body: bytes, type: Any) -> R:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        refused = refusal(error, body, type)
    field = refused.field or ""
    text = field in ("query", "queries", "text_1") and ", not text" in refused.message
    if text or re.match(r"(documents|items|text_2)\[", field):
        raise _no_id(field, refused.message)
    raise refused


def _no_id(field: str, message: str) -> RequestError:
    return RequestError(
        "not_an_item_id", f"{message}; item ids are expected, since no model of this server reads text", field
    )
