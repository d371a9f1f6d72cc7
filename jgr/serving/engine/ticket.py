# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of a request that it has accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jgr.serving.api import ModelInfo
from jgr.serving.policies.jobs import Start
from jgr.serving.prefill import Prefilled


class ClientGone(Exception):
    """Ends the future of a request that nobody waits for."""


@dataclass(eq=False)
class Ticket:
    """A request on its way. Times are the engine's clock, in ns; started_ns and ended_ns span its runs, the first of
    which was planned at planned_ns, handed to the device at launched_ns, and had its lane for itself at begun_ns.
    device_s: its share of the time of the runs that have ended.

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
    begun_ns: int = 0
    launched_ns: int = 0
    ended_ns: int = 0
    committed_ns: int = 0
    encoded_ns: int = 0
    device_s: float = 0.0
    start: Start | None = None
    deadline_ns: int | None = None
    predicted_ns: int | None = None
    fetching: asyncio.Task[None] | None = None
    compare: Callable[[Any], None] | None = None

    def prefilled(self, info: ModelInfo, kept: bool, tokens: int, cached: int) -> Prefilled:
        """The answer to a hint. tokens: those that were computed for it; cached: those that were there."""
        return Prefilled(
            id=self.request_id,
            model=info.version,
            catalog_version=info.catalog_version,
            kept=kept,
            tokens=tokens,
            cached_tokens=cached,
        )
