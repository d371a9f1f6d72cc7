# SPDX-License-Identifier: Apache-2.0
"""The number of replicas as Ray's controller asks for it, with Ray's own configuration and context."""

from __future__ import annotations

from typing import Any

import pytest

from jgr.config import ConfigError, FleetConfig

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def context(target: int, waits_ms: dict[str, float]) -> Any:
    from ray.serve.config import AutoscalingContext

    names = (
        "deployment_id", "deployment_name", "app_name", "current_num_replicas", "target_num_replicas",
        "running_replicas", "total_num_requests", "total_queued_requests", "aggregated_metrics", "raw_metrics",
        "capacity_adjusted_min_replicas", "capacity_adjusted_max_replicas", "policy_state", "last_scale_up_time",
        "last_scale_down_time", "current_time", "config",
    )  # fmt: skip
    given = {"target_num_replicas": target, "aggregated_metrics": {"wait_ms": waits_ms} if waits_ms else {}}
    return AutoscalingContext(**{name: given.get(name) for name in names})


def test_the_policy_reaches_rays_controller_and_follows_the_waits() -> None:
    from jgr.serving.cluster.scaling import autoscaling

    fleet = FleetConfig(replicas=2, min_replicas=1, max_replicas=6, target_wait_ms=100)
    config = autoscaling(fleet)
    assert config is not None
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 6)
    sent = type(config.policy).from_serialized_policy_def(
        {"policy_function": config.policy.policy_function, "policy_kwargs": config.policy.policy_kwargs},
        config.policy.get_serialized_policy_def(),
    )
    asked = sent.get_policy()(**sent.policy_kwargs)
    assert asked(context(2, {"a": 250.0, "b": 150.0})) == (4, {})
    assert asked(context(2, {"a": 20.0, "b": 10.0})) == (1, {})
    assert asked(context(2, {})) == (2, {}), "nobody has told anything yet"


def test_without_a_bound_the_number_is_fixed() -> None:
    from jgr.serving.cluster.scaling import autoscaling

    assert autoscaling(FleetConfig(replicas=3)) is None
    with pytest.raises(ConfigError, match="from min_replicas, 1, to max_replicas, 2, not 3"):
        FleetConfig(replicas=3, max_replicas=2)
    with pytest.raises(ConfigError, match=r"fleet\.min_replicas, 4, is more than the 3 of fleet\.replicas"):
        FleetConfig(replicas=3, min_replicas=4)


def test_each_node_has_a_front_where_there_are_enough() -> None:
    from jgr.serving.cluster.application import fronts_per_node

    found = {
        (fronts, nodes): fronts_per_node(fronts, nodes) for fronts in (1, 2, 5) for nodes in (0, 1, 2, 3)
    }
    limits = {(2, 2): 1, (2, 3): 1, (5, 2): 3, (5, 3): 2}
    assert found == {each: limits.get(each) for each in found}, (
        "one node alone, or none that is known, has no limit"
    )
