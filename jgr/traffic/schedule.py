# SPDX-License-Identifier: Apache-2.0
"""A load as plain data: which requests are sent, and when, in seconds from the start.

The one idea: a schedule is made before anything is sent, so that no answer can change when the next request goes out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from jgr.config import UserError
from jgr.files import read_lines

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

MAX_TRACE_MS = 24 * 3600 * 1000


class LoadError(UserError):
    """A load that cannot be made: a bad trace, too many requests, or no server at the address."""


class Request(NamedTuple):
    """A POST of a JSON body. kind, group: where the report counts it. deadline_ms: its own limit, if it has one."""

    path: str
    body: bytes
    kind: str = ""
    group: str = ""
    deadline_ms: float | None = None


@dataclass(frozen=True, eq=False)
class Schedule:
    """Requests and their times.

    at_s: [n] ascending seconds. which: [n] index into `requests`. length_s: the seconds that the n requests stand for,
    0 where they all come at once.
    """

    at_s: Float64
    which: Int32
    requests: Sequence[Request]
    length_s: float

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def offered_per_s(self) -> float | None:
        """The requests per second that are asked for; None where all come at once."""
        return len(self) / self.length_s if self.length_s > 0 else None

    def part(self, number: int, parts: int) -> Schedule:
        """Every parts-th request from the one with this number; all parts together are the whole."""
        return Schedule(self.at_s[number::parts], self.which[number::parts], self.requests, self.length_s)


def draw(at_s: Float64, length_s: float, mix: Mix, rng: np.random.Generator) -> Schedule:
    """Draw a request of the mix at random for each time."""
    return Schedule(at_s, mix.draw(len(at_s), rng), mix.requests, length_s)


@dataclass(frozen=True, eq=False)
class Mix:
    """Requests to draw from. share: [m] the probability of each; it adds up to 1."""

    requests: Sequence[Request]
    share: Float64

    def draw(self, count: int, rng: np.random.Generator) -> Int32:
        """Indices of `count` requests, drawn with repeats, [count]."""
        return rng.choice(len(self.requests), count, p=self.share).astype(np.int32)


class _TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    at_ms: Annotated[float, Meta(ge=0, le=MAX_TRACE_MS)]
    path: Annotated[str, Meta(pattern=r"\A/[!-~]*\Z")]
    body: msgspec.Raw


class _Deadline(msgspec.Struct):
    deadline_ms: float | None = None


def read_trace(path: Path, max_requests: int) -> tuple[Float64, list[Request]]:
    """Read JSON lines of {at_ms, path, body}, in any order: the times in seconds, ascending, and their requests.

    A request's class in the report is the last part of its path. Raises LoadError, naming the line that cannot be used,
    or where there are more than max_requests.
    """
    decode = msgspec.json.Decoder(_TraceLine).decode
    lines: list[tuple[float, Request]] = []
    for number, text in read_lines(path, LoadError):
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LoadError(f"{path}:{number}: {error}") from None
        if len(lines) == max_requests:
            raise LoadError(f"{path}: holds more than {max_requests} requests")
        kind = re.split(r"[/?]", line.path.partition("?")[0])[-1] or "/"
        request = Request(line.path, bytes(line.body), kind, kind, _deadline_ms(line.body))
        lines.append((line.at_ms / 1e3, request))
    lines.sort(key=lambda line: line[0])
    return np.array([at_s for at_s, _ in lines], np.float64), [request for _, request in lines]


def _deadline_ms(body: msgspec.Raw) -> float | None:
    """The body's own deadline; None for a body that the server will refuse anyway."""
    try:
        return msgspec.json.decode(body, type=_Deadline).deadline_ms
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
