# SPDX-License-Identifier: Apache-2.0
"""The inputs of the KServe models, and how many elements each may have.

The one idea: a tensor tells its number of elements by its shape, so what is too large is refused before anything of its
data is read. Elements are read one by one on the event loop, and a body has room for hundreds of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from jgr.serving.api import MAX_SEGMENTS, ModelInfo
from jgr.serving.errors import invalid, quoted
from jgr.serving.policies.jobs import Kind

Datatype = Literal[
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64", "BYTES"
]  # fmt: skip


class Input(NamedTuple):
    """One input. one: it is a single value. takes: what its elements are. inside: the field that holds the field."""

    name: str
    datatype: Datatype
    one: bool
    takes: Literal["id", "text", "integer", "number", "boolean", "json"]
    inside: str = ""


def _inputs(*given: Input) -> dict[str, Input]:
    return {each.name: each for each in given}


_LAST = (Input("deadline_ms", "FP64", True, "number"), Input("priority", "BYTES", True, "text"))
INPUTS: Mapping[Kind, Mapping[str, Input]] = {
    "recommend": _inputs(
        Input("history", "BYTES", False, "id"),
        Input("user_id", "BYTES", True, "id"),
        Input("top_k", "INT32", True, "integer"),
        Input("beam_width", "INT32", True, "integer"),
        Input("min_beam_width", "INT32", True, "integer"),
        Input("exclude_history", "BOOL", True, "boolean"),
        Input("history_texts", "BYTES", False, "text"),
        Input("exclude", "BYTES", False, "id", "filters"),
        Input("deny", "BYTES", False, "id", "filters"),
        Input("allow", "BYTES", False, "id", "filters"),
        Input("segments", "BYTES", False, "text", "filters"),
        *_LAST,
    ),
    "rank": _inputs(
        Input("history", "BYTES", False, "id"),
        Input("candidates", "BYTES", False, "id"),
        Input("user_id", "BYTES", True, "id"),
        Input("top_k", "INT32", True, "integer"),
        Input("min_candidates", "INT32", True, "integer"),
        Input("exclude_history", "BOOL", True, "boolean"),
        Input("layout", "BYTES", True, "text"),
        Input("reuse_budget", "FP32", True, "number"),
        Input("history_texts", "BYTES", False, "text"),
        Input("history_times", "INT64", False, "integer"),
        Input("time", "INT64", True, "integer"),
        Input("history_actions", "INT64", False, "integer"),
        Input("context", "BYTES", True, "json"),
        Input("scenario", "INT32", True, "integer"),
        Input("task_weights", "BYTES", True, "json"),
        *_LAST,
    ),
}


class Room:
    """What room a request has for its inputs. infos: of the models that may answer it; of several the largest limits
    count, since a request's own model looks at its limits again."""

    def __init__(self, kind: Kind, infos: Iterable[ModelInfo]) -> None:
        found = tuple(infos)
        self._kind = kind
        self._history = max(info.max_history for info in found)
        self._candidates = max(info.max_candidates for info in found)
        self._filter = max(info.max_filter_items for info in found)
        self._seen: set[str] = set()

    def admit(self, name: str, shape: Sequence[int]) -> None:
        """Take one more input. Raises RequestError for a name that is unknown, or comes twice, and for a shape with
        more elements than there may be."""
        known = INPUTS[self._kind].get(name)
        if known is None:
            there = ", ".join(INPUTS[self._kind])
            raise invalid("inputs", f"inputs: {self._kind} has no input {quoted(name)}; it has {there}")
        if name in self._seen:
            raise invalid("inputs", f"inputs: there are two called {name!r}")
        self._seen.add(name)
        count = math.prod(shape)
        if known.one:
            if count != 1:
                raise invalid(name, f"{name}: must have one element, not {count}")
        elif count > (limit := self._limit(known)):
            raise invalid(name, f"{name} has {count} items; the limit is {limit}")

    def _limit(self, known: Input) -> int:
        if known.inside:
            return MAX_SEGMENTS if known.takes == "text" else self._filter
        return self._candidates if known.name == "candidates" else self._history
