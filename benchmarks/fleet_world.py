# SPDX-License-Identifier: Apache-2.0
"""A live fleet of measured parts: Ray Serve, HTTP and the routers are real, the replicas' time is that of a clock."""

from __future__ import annotations

import asyncio
import tempfile
from asyncio import AbstractEventLoop
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from benchmarks.fleet_clock import Counts
from benchmarks.fleet_parts import ClockedReplica, MeasuredFront
from benchmarks.fleet_parts import MeasuredRouter as MeasuredRouter
from jgr.cli.cluster import LOGGING, own_port
from jgr.serving.cluster.application import NAME, Parts, application
from jgr.serving.cluster.replica import Source

LONG_S = 300.0
HOST = "127.0.0.1"
PARTS = Parts(ClockedReplica, MeasuredFront, f"{__name__}.MeasuredRouter")
"""For the router's name see jgr.serving.cluster.application.ROUTER."""


class Fleet:
    """A fleet that runs. loop: on which its deployments are asked; it runs in another thread."""

    def __init__(
        self, port: int, replicas: DeploymentHandle, fronts: DeploymentHandle, loop: AbstractEventLoop
    ) -> None:
        self.host, self.port = HOST, port
        self._replicas, self._fronts, self._loop = replicas, fronts, loop

    def begin(self, rule: str, report_s: float) -> None:
        """A new sequence of runs."""
        self._ask(self._replicas, "begin", report_s)
        self._ask(self._fronts, "begin", rule)

    def counts(self) -> Counts:
        """What all replicas have done since they started."""
        found = Counts()
        for each in self._ask(self._replicas, "counts"):
            found = found.plus(Counts(*each))
        return found

    def flown(self) -> dict[str, float]:
        """Token seconds in flight by replica, of all fronts, since the last call."""
        found: dict[str, float] = {}
        for each in self._ask(self._fronts, "flown"):
            for name, sum in each.items():
                found[name] = found.get(name, 0.0) + sum
        return found

    def _ask(self, handle: DeploymentHandle, method: str, *given: Any) -> list[Any]:
        async def ask() -> list[Any]:
            found: list[Any] = await handle.broadcast(method, *given).results_async(timeout_s=LONG_S)
            return found

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result()


@contextmanager
def running(config: Path, settings: Sequence[str]) -> Iterator[Fleet]:
    """A fleet of a configuration's model on a Ray of its own, which ends with it."""
    port = own_port(HOST)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # Ray's sockets have short names
        ray.init(
            address="local", include_dashboard=False, logging_level="WARNING", _temp_dir=folder, num_cpus=8
        )
        loop = asyncio.new_event_loop()  # Ray tells the handles on it of what changes, until the end
        Thread(target=loop.run_forever, daemon=True).start()
        try:
            serve.start(http_options={"host": HOST, "port": port}, proxy_location="EveryNode")
            source = Source(files=(str(config),), assignments=tuple(settings))
            serve.run(application(source, PARTS), name=NAME, logging_config=LOGGING)
            replicas, fronts = (serve.get_deployment_handle(name, NAME) for name in ("Replica", "Front"))
            yield Fleet(port, replicas, fronts, loop)
        finally:
            serve.shutdown()
            ray.shutdown()
            loop.call_soon_threadsafe(loop.stop)
