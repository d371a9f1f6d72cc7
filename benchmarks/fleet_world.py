# SPDX-License-Identifier: Apache-2.0
"""A live fleet of measured parts: Ray Serve, HTTP and the routers are real, the replicas' time is that of a clock."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from benchmarks.fleet_clock import Counts
from benchmarks.fleet_parts import ClockedReplica, MeasuredFront
from benchmarks.fleet_parts import MeasuredRouter as MeasuredRouter
from jgr.cli.cluster import LOGGING, free_port
from jgr.serving.cluster.application import NAME, Parts, application
from jgr.serving.cluster.replica import Source
from jgr.serving.policies.routing import Rule

LONG_S = 300.0
HOST = "127.0.0.1"
PARTS = Parts(ClockedReplica, MeasuredFront, f"{__name__}.MeasuredRouter")
"""For the router's name see jgr.serving.cluster.application.ROUTER."""


class Fleet(NamedTuple):
    """A fleet that runs, and its deployments."""

    host: str
    port: int
    replicas: DeploymentHandle
    fronts: DeploymentHandle

    def begin(self, rule: Rule, report_s: float) -> None:
        """A new sequence of runs."""
        self.replicas.broadcast("begin", report_s).results(timeout_s=LONG_S)
        self.fronts.broadcast("begin", rule).results(timeout_s=LONG_S)

    def counts(self) -> Counts:
        """What all replicas have done since they started."""
        found = Counts()
        for each in self.replicas.broadcast("counts").results(timeout_s=LONG_S):
            found = found.plus(Counts(*each))
        return found

    def flown(self) -> dict[str, float]:
        """Token seconds in flight by replica, of all fronts, since the last call."""
        found: dict[str, float] = {}
        for each in self.fronts.broadcast("flown").results(timeout_s=LONG_S):
            for name, sum in each.items():
                found[name] = found.get(name, 0.0) + sum
        return found


@contextmanager
def running(config: Path, settings: Sequence[str]) -> Iterator[Fleet]:
    """A fleet of a configuration's model on a Ray of its own, which ends with it."""
    port = free_port(HOST)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # Ray's sockets have short names
        ray.init(
            address="local", include_dashboard=False, logging_level="WARNING", _temp_dir=folder, num_cpus=8
        )
        try:
            serve.start(http_options={"host": HOST, "port": port}, proxy_location="EveryNode")
            source = Source(files=(str(config),), assignments=tuple(settings))
            serve.run(application(source, PARTS), name=NAME, logging_config=LOGGING)
            handles = [serve.get_deployment_handle(name, NAME) for name in ("Replica", "Front")]
            yield Fleet(HOST, port, *handles)
        finally:
            serve.shutdown()
            ray.shutdown()
