# SPDX-License-Identifier: Apache-2.0
"""The calls that an engine of this process and a server have in common.

The one idea: a call becomes the body that HTTP would carry, and both sides read it with the same code. So a mistake is
told in the same words, and an answer is the same struct.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

import msgspec

from jgr.client.errors import InvalidRequest
from jgr.serving.api import Answer, Filters, ModelInfo
from jgr.serving.policies.jobs import Priority
from jgr.serving.prefill import Prefilled

Kind = Literal["recommend", "rank", "prefill"]
ItemId = str | int
History = Sequence[ItemId]
Histories = Sequence[list[str]] | Sequence[list[int]] | Sequence[list[ItemId]] | Sequence[tuple[ItemId, ...]]
T = TypeVar("T")

PER_HISTORY = frozenset(("user_id", "history_texts", "history_times", "time", "history_actions", "context"))
"""Fields about one user: with several histories they are lists of one value for each."""


class Array(Protocol):
    """A numpy array, or another object with its method `tolist`."""

    def tolist(self) -> Any: ...


class CommonFields(TypedDict, total=False):
    """Fields of both kinds of request; `/docs` of a server describes them."""

    model: str | None
    user_id: ItemId | Sequence[ItemId | None] | None
    deadline_ms: float | None
    priority: Priority
    include_metadata: bool
    explain: bool


class RecommendFields(CommonFields, total=False):
    history_texts: Sequence[str] | Sequence[Sequence[str]] | None
    beam_width: int | None
    min_beam_width: int | None
    rerank: str | None
    exclude_history: bool
    filters: Filters | dict[str, Any] | None


class RankFields(CommonFields, total=False):
    min_candidates: int | None
    exclude_history: bool
    layout: Literal["user_prefix", "item_prefix", "causal"] | None
    reuse_budget: float | None
    history_texts: Sequence[str] | Sequence[Sequence[str]] | None
    history_times: Sequence[int] | Sequence[Sequence[int]] | None
    time: int | Sequence[int] | None
    history_actions: Sequence[int] | Sequence[Sequence[int]] | None
    context: dict[str, int] | Sequence[dict[str, int]] | None
    scenario: int
    task_weights: dict[str, float] | None


class PrefillFields(TypedDict, total=False):
    """Fields of a hint; `/docs` of a server describes them."""

    model: str | None
    history_times: Sequence[int] | Sequence[Sequence[int]] | None
    time: int | Sequence[int] | None
    history_actions: Sequence[int] | Sequence[Sequence[int]] | None
    context: dict[str, int] | Sequence[dict[str, int]] | None
    scenario: int
    deadline_ms: float | None


class Recommender(ABC):
    """Recommends and ranks, from any thread. A context manager; leaving it closes it.

    One history gives one Answer; a list of histories gives a list of as many Answers in their order, and goes out
    together. With several histories the fields of PER_HISTORY are lists of one value for each, and so may be the
    candidates. Item ids are text; an integer is read as its decimal text. Every method raises a RequestFailed.
    Where several histories are asked, it is that of the first that failed, with its `index`; other answers are dropped.
    """

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The model that is asked, and the limits on its requests."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was asked and refuse what comes later. May be called again."""

    @abstractmethod
    def _ask(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        """The answers to JSON bodies: an Answer each, or Prefilled."""

    @abstractmethod
    async def _aask(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        """The answers of `_ask`, awaited on any event loop."""

    @overload
    def recommend(
        self, history: History, *, top_k: int = ..., **fields: Unpack[RecommendFields]
    ) -> Answer: ...
    @overload
    def recommend(
        self, history: Histories | Array, *, top_k: int = ..., **fields: Unpack[RecommendFields]
    ) -> list[Answer]: ...
    def recommend(self, history: Any, *, top_k: int = 10, **fields: Unpack[RecommendFields]) -> Any:
        """The items of the catalog that may follow a history, best first. fields: those of POST /v1/recommend."""
        bodies, several = _bodies(history, {"top_k": top_k, **fields})
        return _as_asked(self._ask("recommend", bodies), several)

    @overload
    async def arecommend(
        self, history: History, *, top_k: int = ..., **fields: Unpack[RecommendFields]
    ) -> Answer: ...
    @overload
    async def arecommend(
        self, history: Histories | Array, *, top_k: int = ..., **fields: Unpack[RecommendFields]
    ) -> list[Answer]: ...
    async def arecommend(self, history: Any, *, top_k: int = 10, **fields: Unpack[RecommendFields]) -> Any:
        """`recommend`, awaited."""
        bodies, several = _bodies(history, {"top_k": top_k, **fields})
        return _as_asked(await self._aask("recommend", bodies), several)

    @overload
    def rank(
        self,
        history: History,
        candidates: History | Literal["all"],
        *,
        top_k: int | None = ...,
        **fields: Unpack[RankFields],
    ) -> Answer: ...
    @overload
    def rank(
        self,
        history: Histories | Array,
        candidates: History | Histories | Array | Literal["all"],
        *,
        top_k: int | None = ...,
        **fields: Unpack[RankFields],
    ) -> list[Answer]: ...
    def rank(
        self, history: Any, candidates: Any, *, top_k: int | None = None, **fields: Unpack[RankFields]
    ) -> Any:
        """The candidates by how likely each follows a history, best first. top_k: None for all of them.

        Several histories have the same candidates, or a list of candidates each; "all" is the whole catalog. fields:
        those of POST /v1/rank.
        """
        bodies, several = _bodies(history, {"candidates": candidates, "top_k": top_k, **fields})
        return _as_asked(self._ask("rank", bodies), several)

    @overload
    async def arank(
        self,
        history: History,
        candidates: History | Literal["all"],
        *,
        top_k: int | None = ...,
        **fields: Unpack[RankFields],
    ) -> Answer: ...
    @overload
    async def arank(
        self,
        history: Histories | Array,
        candidates: History | Histories | Array | Literal["all"],
        *,
        top_k: int | None = ...,
        **fields: Unpack[RankFields],
    ) -> list[Answer]: ...
    async def arank(
        self, history: Any, candidates: Any, *, top_k: int | None = None, **fields: Unpack[RankFields]
    ) -> Any:
        """`rank`, awaited."""
        bodies, several = _bodies(history, {"candidates": candidates, "top_k": top_k, **fields})
        return _as_asked(await self._aask("rank", bodies), several)

    @overload
    def prefill(self, history: History, *, user_id: ItemId, **fields: Unpack[PrefillFields]) -> Prefilled: ...
    @overload
    def prefill(
        self,
        history: Histories | Array,
        *,
        user_id: Sequence[ItemId],
        **fields: Unpack[PrefillFields],
    ) -> list[Prefilled]: ...
    def prefill(self, history: Any, *, user_id: Any, **fields: Unpack[PrefillFields]) -> Any:
        """Say that a user is about to be ranked, so that the user's part is computed and kept now. fields: those of
        POST /v1/users/{user_id}/prefill."""
        bodies, several = _bodies(history, {"user_id": user_id, **fields})
        return _as_asked(self._ask("prefill", bodies), several)

    @overload
    async def aprefill(
        self, history: History, *, user_id: ItemId, **fields: Unpack[PrefillFields]
    ) -> Prefilled: ...
    @overload
    async def aprefill(
        self,
        history: Histories | Array,
        *,
        user_id: Sequence[ItemId],
        **fields: Unpack[PrefillFields],
    ) -> list[Prefilled]: ...
    async def aprefill(self, history: Any, *, user_id: Any, **fields: Unpack[PrefillFields]) -> Any:
        """`prefill`, awaited."""
        bodies, several = _bodies(history, {"user_id": user_id, **fields})
        return _as_asked(await self._aask("prefill", bodies), several)

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _bodies(history: Any, fields: dict[str, Any]) -> tuple[list[bytes], bool]:
    """A body for each history, and whether there are several histories; InvalidRequest for what is neither."""
    histories = _listed(history)
    if not _is_list(histories):
        raise InvalidRequest(
            f"history must be a list of item ids, or a list of such lists, not {type(history).__name__}",
            "invalid_request",
            field="history",
        )
    several = len(histories) > 0 and _is_list(_listed(histories[0]))
    if not several:
        return [_encode({"history": histories, **fields})], False
    split = {name: _split(name, value, len(histories)) for name, value in fields.items()}
    return [
        _encode({"history": one, **{name: values[at] for name, values in split.items()}})
        for at, one in enumerate(histories)
    ], True


def _split(name: str, value: Any, count: int) -> Sequence[Any]:
    """A field's value for each of several histories."""
    value = _listed(value)
    own = name in PER_HISTORY and value is not None
    if name == "candidates" and _is_list(value) and value:
        own = _is_list(_listed(value[0]))
    if not own:
        return [value] * count
    if not _is_list(value) or len(value) != count:
        raise InvalidRequest(
            f"{name} must be a list with one entry for each of the {count} histories",
            "invalid_request",
            field=name,
        )
    values: Sequence[Any] = value
    return values


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _listed(value: Any) -> Any:
    """An array as lists, a number of numpy's as Python's; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _to_json(value: Any) -> Any:
    listed = _listed(value)
    if listed is value:
        raise TypeError(f"a value of type {type(value).__name__} is no JSON")
    return listed


def _encode(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=_to_json)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}", "invalid_json") from None


def _as_asked(answers: list[Any], several: bool) -> Any:
    return answers if several else answers[0]
