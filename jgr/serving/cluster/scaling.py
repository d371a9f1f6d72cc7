# SPDX-License-Identifier: Apache-2.0
"""The number of replicas by the predicted wait, as Ray Serve's autoscaling asks for it.

Each replica tells its predicted wait every second. Ray takes the mean over some seconds, keeps within the bounds, and
waits until the same was wanted for long enough: a replica takes a while to start, and its caches go with it.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from jgr.config import FleetConfig
from jgr.serving.policies.scaling import wanted

WAIT = "wait_ms"
"""The name of the predicted wait in what a replica tells."""
TOLD_S, MEAN_S = 1.0, 5.0
"""A replica tells it so often; the mean is over so long."""
UP_S, DOWN_S = 3.0, 60.0
"""More replicas, or fewer, must be wanted for so long."""


class Scaling:
    """Ray makes one, and calls it about ten times a second."""

    def __init__(self, target_wait_ms: float) -> None:
        self._target_ms = target_wait_ms

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        waits = (context.aggregated_metrics or {}).get(WAIT, {})
        return wanted(context.target_num_replicas, list(waits.values()), self._target_ms), {}


def autoscaling(fleet: FleetConfig) -> AutoscalingConfig | None:
    """Ray's configuration; None where the number of replicas is fixed."""
    if not fleet.max_replicas:
        return None
    return AutoscalingConfig(
        min_replicas=fleet.min_replicas,
        max_replicas=fleet.max_replicas,
        initial_replicas=fleet.replicas,
        metrics_interval_s=TOLD_S,
        look_back_period_s=MEAN_S,
        upscale_delay_s=UP_S,
        downscale_delay_s=DOWN_S,
        policy=AutoscalingPolicy(
            policy_function="jgr.serving.cluster.scaling.Scaling",
            policy_kwargs={"target_wait_ms": fleet.target_wait_ms},
        ),
    )
