# SPDX-License-Identifier: Apache-2.0
"""What an evaluation asks: a model that is served, by an engine of this process or by a running server.

Both are asked the same (`Query.of`), so both give the same numbers. A model that generates is asked for items, one that
ranks to order the whole catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.config import UserError
from jgr.data.interactions import Examples
from jgr.serving.api import Item, ModelInfo

Int32 = npt.NDArray[np.int32]


class EvaluationError(UserError):
    """An evaluation that cannot be made; the message names the example, flag or field."""


@dataclass(frozen=True)
class Query:
    """What is asked for every example. beam_width: None for the default of the model that is served."""

    top_k: int
    beam_width: int | None = None
    exclude_history: bool = False

    def of(self, catalog: Catalog, info: ModelInfo, examples: Examples, i: int) -> dict[str, Any]:
        """The request for the i-th example, by the fields of the endpoint `path(info)`.

        Raises EvaluationError where the model cannot be asked so.
        """
        if ranks(info):
            return self._rank(catalog, info, examples, i)
        return {
            "history": [catalog.item_ids[row] for row in self._history(info, examples, i)],
            "top_k": self.top_k,
            "beam_width": self.beam_width,
            "exclude_history": self.exclude_history,
            "priority": "batch",
        }

    def _rank(self, catalog: Catalog, info: ModelInfo, examples: Examples, i: int) -> dict[str, Any]:
        """All items are candidates."""
        if catalog.n_items > info.max_candidates:
            raise EvaluationError(
                f"the model ranks {info.max_candidates} candidates at most, the catalog has {catalog.n_items} items: "
                "set server.max_candidates"
            )
        fields: dict[str, Any] = {
            "history": [catalog.item_ids[row] for row in self._history(info, examples, i)],
            "candidates": "all",
            "top_k": self.top_k,
            "exclude_history": self.exclude_history,
            "priority": "batch",
        }
        if info.timed:
            if examples.histories.times is None or examples.target_times is None:
                raise EvaluationError("the model depends on times, and the dataset has none")
            fields["history_times"] = examples.histories.times_of(i)[-len(fields["history"]) :].tolist()
            fields["time"] = int(examples.target_times[i])
        return fields

    def _history(self, info: ModelInfo, examples: Examples, i: int) -> Int32:
        """The rows of what is told of the user. Longer ones than max_history are refused, so those are cut, unless the
        items that would be cut off are to be left out too: what lies before the prompt's items changes nothing else.
        """
        history = examples.histories[i]
        return history if self.exclude_history else history[-info.max_history :]


def ranks(info: ModelInfo) -> bool:
    """Whether the model only orders candidates."""
    return info.max_beam_width == 0


def path(info: ModelInfo) -> str:
    """The path of the endpoint that an evaluation asks."""
    return "/v1/rank" if ranks(info) else "/v1/recommend"


class Served(Protocol):
    """A served model. info: its limits. in_flight: requests that `recommend_all` keeps going."""

    info: ModelInfo
    in_flight: int

    def recommend_all(
        self, examples: Examples, query: Query, on_answer: Callable[[], None] = lambda: None
    ) -> Int32:
        """The rows for every example's history: [n, top_k] int32, best first, -1 where there are fewer.

        on_answer: called after each answer, from any thread. A UserError says which request was refused, and why.
        """

    def rank_all(
        self, requests: Sequence[dict[str, Any]], on_answer: Callable[[], None] = lambda: None
    ) -> list[list[Item]]:
        """The items of each answer, by the fields of /v1/rank. on_answer and UserError: see `recommend_all`."""

    def latencies_s(self, examples: Examples, queries: Sequence[Query]) -> list[list[float]]:
        """The seconds that each answer took: a list for each query.

        Requests are sent one after the other, each example with every query in turn, so that a slower moment of the
        machine meets all queries alike.
        """


def rows_of(catalog: Catalog, item_ids: list[str]) -> Int32:
    """The rows of an answer's items. EvaluationError where the catalog lacks one: none may be invented."""
    rows, unknown = catalog.rows(item_ids)
    if unknown:
        raise EvaluationError(f"the model recommended items that the catalog lacks: {unknown[:3]}")
    return rows


def check_catalog(owner: str, versions: set[str], catalog: Catalog) -> None:
    """Raise EvaluationError unless `catalog`, the dataset's, is among those that `owner` has."""
    if catalog.version not in versions:
        raise EvaluationError(
            f"the {owner}'s catalog is {', '.join(sorted(versions))}, the dataset's is {catalog.version}"
        )
