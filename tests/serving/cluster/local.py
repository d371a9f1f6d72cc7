# SPDX-License-Identifier: Apache-2.0
"""Several replicas in one process and on one event loop, as their coordinator and a front see them, without Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jgr.serving.cluster.hints import glance
from jgr.serving.cluster.placements import Placements
from jgr.serving.cluster.record import NoOthers
from jgr.serving.cluster.relay import Asked
from jgr.serving.cluster.replica import Replica, Source

RANK = "/v1/rank"
ADMIN = [(b"authorization", b"Bearer 4dm1n")]


class LocalReplica(Replica):
    """A replica that Ray does not end."""

    def __del__(self) -> None:  # type: ignore[override]
        """It was closed."""


class LocalFleet:
    """replicas: by name; the last ones are `beyond` fleet.replicas. gone: names of those that do not answer."""

    def __init__(self, folder: Path, settings: Sequence[str], count: int = 2, beyond: int = 0) -> None:
        self.source = Source((str(folder),), assignments=(*settings, f"fleet.replicas={count}"))
        names = "abcdefgh"[: count + beyond]
        self.replicas = {name: LocalReplica(self.source, name, NoOthers()) for name in names}
        self.placements = Placements(self, self.source.configs()[0].fleet)
        self.gone: set[str] = set()

    async def start(self) -> None:
        for replica in self.replicas.values():
            await replica.start()

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.end()

    async def items(self, name: str, what: str, *arguments: Any) -> Any:
        if name in self.gone:
            raise ConnectionError(name)
        return (await self.replicas[name].items(glance("/", b""), what, *arguments))[1]

    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]:
        there = [name for name in self.replicas if name not in self.gone]
        answered = {name: await self.items(name, what, *arguments) for name in there}
        return {name: answer for name, answer in answered.items() if answer is not None}

    async def rank(self, name: str, history: Sequence[str], candidates: Sequence[str], **more: Any) -> Any:
        """One replica's answer to a request."""
        body = json.dumps({"history": list(history), "candidates": list(candidates), **more}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        asked = Asked("POST", RANK, b"", headers, body)
        answered = await self.replicas[name].answer(glance(RANK, body), asked)
        assert answered.status == 200, answered.body
        return json.loads(answered.body)

    async def call(self, name: str, method: str, path: str, body: bytes = b"") -> Any:
        """One replica's answer to any request."""
        answered = await self.replicas[name].answer(glance(path, body), Asked(method, path, b"", ADMIN, body))
        assert answered.status < 300, answered.body
        return json.loads(answered.body)

    async def series(self, name: str, series: str) -> dict[tuple[str, ...], float]:
        """The values of a replica's series, by its labels' values."""
        text = self.replicas[name].models.render_metrics().decode()
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == series
        }
