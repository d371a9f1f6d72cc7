# SPDX-License-Identifier: Apache-2.0
"""The application of Ray Serve: what is deployed, and how Ray runs it.

`fleet` is the import path for `serve build`, `serve run` and KubeRay: jgr.serving.cluster.application:fleet, whose
arguments are `models`, `configs` and `settings`, each a list as for `jgr serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from jgr.config import UserError
from jgr.serving.cluster.coordinator import COORDINATOR, REPLICA, Coordinator
from jgr.serving.cluster.front import Front
from jgr.serving.cluster.protocol import spoken
from jgr.serving.cluster.replica import Replica, Source
from jgr.serving.cluster.router import FleetRouter as FleetRouter
from jgr.serving.cluster.scaling import autoscaling
from jgr.serving.cluster.secret import require_closed

NAME, FRONT = "jgr", "Front"
LIGHT_S = 5.0
"""A front or the coordinator has so long at least to say how it is: they ask for no core, so a busy machine may let
them wait, and one that is replaced ends what it has in hand."""
SPARE = 256
"""Calls that a replica takes beyond its queue: what it refuses itself, it refuses well."""
ROUTER = f"{__name__}.FleetRouter"
"""Ray sends the module that it is named with by value: named with its own, each process would have the names of the
one that deployed, not its own."""
ARGUMENTS = ("models", "configs", "settings")


class Parts(NamedTuple):
    """What an application is made of, for benchmarks that measure more than the live parts do."""

    replica: type[Replica] = Replica
    front: Any = Front
    router: str = ROUTER


LIVE = Parts()


def application(source: Source, parts: Parts = LIVE) -> Application:
    """The application that serves `source`. Raises ConfigError for what cannot be served."""
    configs = source.configs()
    first, fleet = configs[0], configs[0].fleet
    scaling = autoscaling(fleet)
    queue = sum(config.batching.max_queue for config in configs)
    replica = serve.deployment(
        parts.replica,
        name=REPLICA,
        num_replicas=None if scaling else fleet.replicas,
        autoscaling_config=scaling,
        max_ongoing_requests=queue + SPARE,
        user_config={},
        graceful_shutdown_timeout_s=first.server.drain_timeout_s + 10,
        health_check_period_s=fleet.health_s,
        health_check_timeout_s=fleet.health_s,
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=parts.router,
            request_router_kwargs={
                "rule": fleet.routing,
                "bits": fleet.digest_bits,
                "load": fleet.load,
                "share": fleet.share,
                "affinity": fleet.affinity,
            },
            request_routing_stats_period_s=fleet.report_s,
        ),
    )
    many = max(fleet.replicas, fleet.max_replicas) * (queue + SPARE)
    spread = fronts_per_node(fleet.fronts, _nodes())
    light: dict[str, Any] = {
        "health_check_period_s": fleet.health_s,
        "health_check_timeout_s": max(LIGHT_S, fleet.health_s),
        "ray_actor_options": {"num_cpus": 0},
    }
    replicas = replica.bind(source)
    coordinator = serve.deployment(
        Coordinator,
        name=COORDINATOR,
        num_replicas=1,
        max_ongoing_requests=64,
        user_config={},
        **light,
    )
    front = serve.deployment(
        parts.front,
        name=FRONT,
        num_replicas=fleet.fronts,
        **({} if spread is None else {"max_replicas_per_node": spread}),  # `serve build` takes no None
        max_ongoing_requests=many,
        **light,
    )
    most = max(config.catalog.max_upload_bytes for config in configs)
    kept = max(config.catalog.max_versions for config in configs)
    coordinated = coordinator.bind(tuple(spoken()), replicas, source.key, kept, fleet)
    built: Application = front.bind(tuple(spoken()), first, most, replicas, coordinated)
    return built


def fronts_per_node(fronts: int, nodes: int) -> int | None:
    """The most fronts that one node may have, so that each has one where there are enough: Ray puts what needs no core
    anywhere. None: any number. nodes: of the cluster; 0: that is not known."""
    return -(-fronts // nodes) if nodes > 1 < fronts else None


def _nodes() -> int:
    """How many nodes there are; 0 where no cluster is there yet, as for `serve build`."""
    return sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 0


def fleet(arguments: Mapping[str, Any]) -> Application:
    """The application by the arguments of a Serve configuration file. Raises UserError for what is not one, and for a
    Ray cluster that asks nobody for a secret."""
    if ray.is_initialized():  # else nothing is deployed, as by `serve build`
        require_closed(ray.get_runtime_context().gcs_address)
    unknown = sorted(arguments.keys() - ARGUMENTS)
    if unknown:
        raise UserError(f"args: there is no {', '.join(unknown)}; there are {', '.join(ARGUMENTS)}")
    for name, given in arguments.items():
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise UserError(f"args: {name}: must be a list of texts, not {given!r}")
    models, configs, settings = (tuple(arguments.get(name, ())) for name in ARGUMENTS)
    return application(Source(models, configs, settings))
