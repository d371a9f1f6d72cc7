# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of a request that it has accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jgr.serving.policies.jobs import Start


class ClientGone(Exception):
    """Ends the future of a request that nobody waits for."""


@dataclass(eq=False)
class Ticket:
    """A request on its way. Times are the engine's clock, in ns; started_ns and ended_ns span its runs, the first of
    which was planned at planned_ns and handed to the device at launched_ns.

    answer: gets an Answer, of a hint a Prefilled. start: its last run. compare: for a shadow, which computes again what
    an answer reused: takes what comes of it. Nobody awaits its answer.
    """

    job_id: int
    request_id: str
    task: Any
    answer: asyncio.Future[Any]
    arrival_ns: int
    submitted_ns: int
    planned_ns: int = 0
    started_ns: int = 0
    launched_ns: int = 0
    ended_ns: int = 0
    committed_ns: int = 0
    encoded_ns: int = 0
    start: Start | None = None
    deadline_ns: int | None = None
    predicted_ns: int | None = None
    fetching: asyncio.Task[None] | None = None
    compare: Callable[[Any], None] | None = None
