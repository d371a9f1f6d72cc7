# SPDX-License-Identifier: Apache-2.0
"""Mixes of requests: classes with weights, each with laws of its lengths, from flags or from a JSON file.

The one idea: a number in a class is the text of a law, the same in a file and in a flag:

- `50`: always 50.
- `uniform:1:100`: each from 1 to 100 alike.
- `lognormal:40:1.2:500`: median 40, sigma 1.2 of its logarithm, rounded, and cut to 1 .. 500.
- `power:1.5:1:500`: from 1 to 500, with a probability proportional to n^-1.5.
- `oneof:8:16:32`: one of these, each alike.

A file holds `{"classes": [{"name": "home", "weight": 3, "kind": "recommend", "history_length": "lognormal:40:1.2:500",
"deadline_ms": 200}, ...]}`; `RequestClass` has all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from jgr.files import read_whole
from jgr.serving.api import MAX_DEADLINE_MS
from jgr.traffic.schedule import LoadError, Mix, Request

N_USERS = 1000
"""How many distinct requests a class has; each stands for one user, who asks again and again."""
FIRST_TIME_S = 1_700_000_000
"""The time of the first item in a history with times, in seconds."""
MAX_LENGTH = 100_000
MAX_CLASSES = 64
MAX_ITEMS = 20_000_000
"""The most item ids in all requests of a mix together; some 10 bytes each."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Law:
    """A law of whole numbers. least, most: what it can give."""

    text: str
    least: int
    most: int
    draw: Callable[[np.random.Generator, int], Int64]


def parse_law(text: str | int, field: str = "length") -> Law:
    """Read a law as the file's docstring says. Raises LoadError, which names the field."""
    name, *rest = str(text).split(":")
    try:
        law = _law(str(text), name, [float(number) for number in rest])
    except (ValueError, OverflowError):
        law = None
    if law is None or not 1 <= law.least <= law.most <= MAX_LENGTH:
        raise LoadError(
            f"{field} '{text}' must be a number from 1 to {MAX_LENGTH}, uniform:LEAST:MOST, "
            f"lognormal:MEDIAN:SIGMA:MOST, power:EXPONENT:LEAST:MOST or oneof:N:N, with such numbers"
        )
    return law


def _law(text: str, name: str, numbers: Sequence[float]) -> Law | None:
    match name, numbers:
        case "uniform", [least, most]:
            low, high = _whole(least, most)
            return Law(text, low, high, lambda rng, n: rng.integers(low, high + 1, n))
        case "lognormal", [median, sigma, most] if median >= 1 and 0 <= sigma <= 10:
            (top,) = _whole(most)
            return Law(text, 1, top, lambda rng, n: _lognormal(rng, n, median, sigma, top))
        case "power", [exponent, least, most] if -10 <= exponent <= 10:
            low, high = _whole(least, most)
            values = np.arange(low, min(high, MAX_LENGTH) + 1)
            weights = (values / low) ** -exponent
            return Law(text, low, high, lambda rng, n: rng.choice(values, n, p=weights / weights.sum()))
        case "oneof", [_, *_]:
            choices = np.array(_whole(*numbers))
            return Law(text, int(choices.min()), int(choices.max()), lambda rng, n: rng.choice(choices, n))
        case _, [] if name.isascii() and name.isdigit():
            value = int(name)
            return Law(text, value, value, lambda rng, n: np.full(n, value))
    return None


def _whole(*numbers: float) -> list[int]:
    """The numbers as whole ones, as law limits must be; ValueError for others."""
    if any(number != int(number) or not 1 <= number <= MAX_LENGTH for number in numbers):
        raise ValueError
    return [int(number) for number in numbers]


def _lognormal(rng: np.random.Generator, n: int, median: float, sigma: float, most: int) -> Int64:
    drawn = median * np.exp(np.minimum(sigma * rng.standard_normal(n), 100.0))
    return drawn.round().clip(1, most).astype(np.int64)


Number = int | str
Positive = Annotated[float, Meta(gt=0, le=1e9)]


class RequestClass(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A class of requests that are alike. Numbers may be laws.

    candidates: of a rank, whose top_k is at most as large. beam_width, deadline_ms, priority, exclude_history: sent
    only where they are set; an answer counts as goodput within deadline_ms. timed: histories have times. fields: more
    fields of the body, as they are.
    """

    name: Annotated[str, Meta(pattern=r"\A[!-~]{1,64}\Z")]
    weight: Positive = 1.0
    kind: Literal["recommend", "rank"] = "recommend"
    history_length: Number = 50
    candidates: Number = 100
    top_k: Number = 10
    beam_width: Number | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS)] | None = None
    priority: Literal["interactive", "batch"] | None = None
    exclude_history: bool | None = None
    timed: bool = False
    fields: dict[str, Any] = {}


class _File(Struct, forbid_unknown_fields=True):
    classes: Annotated[list[RequestClass], Meta(min_length=1, max_length=MAX_CLASSES)]


def read_mix(path: Path) -> list[RequestClass]:
    """Read the classes of a JSON file. Raises LoadError, which names the field that is wrong."""
    try:
        classes = msgspec.json.decode(read_whole(path, LoadError), type=_File).classes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path}: {error}") from None
    if len({c.name for c in classes}) < len(classes):
        raise LoadError(f"{path}: two classes have the same name")
    return classes


def make_mix(classes: Sequence[RequestClass], item_ids: Sequence[str], rng: np.random.Generator) -> Mix:
    """Draw the requests of every class: N_USERS users, each with a history drawn with repeats.

    Raises LoadError where a law gives what cannot be asked: more candidates than the catalog has items, more items than
    beams, too many items in all.
    """
    drawn = [_numbers(each, len(item_ids), rng) for each in classes]
    items = sum(int(n["history_length"].sum() + n["candidates"].sum()) for n in drawn)
    if items > MAX_ITEMS:
        raise LoadError(f"the histories and candidates hold {items} items; at most {MAX_ITEMS} are made")
    requests = []
    for each, numbers in zip(classes, drawn, strict=True):
        for user in range(N_USERS):
            of_user = {name: int(values[user]) for name, values in numbers.items()}
            body = {"user_id": f"{each.name}-{user}", **_body(each, of_user, item_ids, rng)}
            encoded = msgspec.json.encode(body)
            requests.append(Request(f"/v1/{each.kind}", encoded, each.kind, each.name, each.deadline_ms))
    weights = np.repeat([each.weight for each in classes], N_USERS)
    return Mix(requests, weights / weights.sum())


def _numbers(each: RequestClass, n_items: int, rng: np.random.Generator) -> dict[str, Int64]:
    """The numbers of each user's request, [N_USERS] by their names."""
    laws = {
        name: parse_law(text, f"{each.name}: {name}")
        for name in ("history_length", "candidates", "top_k", "beam_width")
        if (text := getattr(each, name)) is not None
    }
    if each.kind == "rank":
        _check_rank(each, laws, n_items)
    else:
        laws["candidates"] = Law("0", 0, 0, lambda rng, n: np.zeros(n, np.int64))
    if "beam_width" in laws and laws["beam_width"].least < laws["top_k"].most:
        least, most = laws["beam_width"].least, laws["top_k"].most
        raise LoadError(f"{each.name}: a beam_width of {least} is below a top_k of {most}")
    written = {"user_id", "history", "history_times", "time", *RequestClass.__struct_fields__}
    if taken := sorted(written & set(each.fields)):
        raise LoadError(f"{each.name}: fields cannot hold {taken[0]}, which the mix writes itself")
    return {name: law.draw(rng, N_USERS) for name, law in laws.items()}


def _check_rank(each: RequestClass, laws: dict[str, Law], n_items: int) -> None:
    if laws["candidates"].most > n_items:
        raise LoadError(
            f"{each.name}: {laws['candidates'].most} candidates were asked for; the catalog has {n_items} items"
        )
    if "beam_width" in laws:
        raise LoadError(f"{each.name}: rank has no beam_width")


def _body(
    each: RequestClass, numbers: dict[str, int], item_ids: Sequence[str], rng: np.random.Generator
) -> dict[str, Any]:
    length = numbers["history_length"]
    body: dict[str, Any] = {
        "history": [item_ids[row] for row in rng.integers(0, len(item_ids), length).tolist()],
        "top_k": numbers["top_k"],
    }
    if each.kind == "rank":
        rows = rng.choice(len(item_ids), numbers["candidates"], replace=False).tolist()
        body["candidates"] = [item_ids[row] for row in rows]
        body["top_k"] = min(body["top_k"], numbers["candidates"])
    if each.timed:
        # The history's items are an hour apart, and the request comes an hour after the last one.
        body["history_times"] = [FIRST_TIME_S + 3600 * at for at in range(length)]
        body["time"] = FIRST_TIME_S + 3600 * length
    if "beam_width" in numbers:
        body["beam_width"] = numbers["beam_width"]
    for name in ("deadline_ms", "priority", "exclude_history"):
        if (value := getattr(each, name)) is not None:
            body[name] = value
    return body | each.fields
