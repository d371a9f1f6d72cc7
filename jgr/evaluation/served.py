# SPDX-License-Identifier: Apache-2.0
"""What an evaluation asks: a model that is served, by an engine of this process or by a running server.

Both are asked the same (`Query.fields`), so both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jgr.catalog import Catalog
from jgr.config import UserError
from jgr.data.interactions import Examples
from jgr.serving.api import ModelInfo

Int32 = npt.NDArray[np.int32]


class EvaluationError(UserError):
    """An evaluation that cannot be made; the message names the example, flag or field."""


@dataclass(frozen=True)
class Query:
    """What is asked for every example. beam_width: None for the default of the model that is served."""

    top_k: int
    beam_width: int | None = None
    exclude_history: bool = False

    def fields(self, catalog: Catalog, info: ModelInfo, history: Int32) -> dict[str, Any]:
        """The request by the fields of /v1/recommend. history: rows, oldest first."""
        if not self.exclude_history:
            # Longer ones are refused; what lies before the prompt's items changes nothing else in an answer.
            history = history[-info.max_history :]
        return {
            "history": [catalog.item_ids[row] for row in history],
            "top_k": self.top_k,
            "beam_width": self.beam_width,
            "exclude_history": self.exclude_history,
        }


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

    def latencies_s(self, examples: Examples, queries: Sequence[Query]) -> list[list[float]]:
        """Seconds that each answer took, by query, asked for one after the other: every example with each query in
        turn, so that whatever slows the machine down meets all queries alike.
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
