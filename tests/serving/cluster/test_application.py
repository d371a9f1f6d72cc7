# SPDX-License-Identifier: Apache-2.0
"""How Ray is told to run the parts of a fleet, as the built application has it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def deployments(*settings: str) -> dict[str, Any]:
    """Ray's configuration of each deployment, by name."""
    from ray.serve import Application

    from jgr.serving.cluster.application import application
    from jgr.serving.cluster.replica import Source

    front = application(Source(assignments=settings, null=True))._bound_deployment
    parts = [each._bound_deployment for each in front.init_args if isinstance(each, Application)]
    return {each.name: each._deployment_config for each in (front, *parts)}


@pytest.mark.parametrize(("health_s", "light_s"), [(2.0, 5.0), (7.0, 7.0)])
def test_whoever_hangs_is_found_soon(health_s: float, light_s: float) -> None:
    """Ray itself would wait for half a minute, three times."""
    found = {
        name: (config.health_check_period_s, config.health_check_timeout_s)
        for name, config in deployments(f"fleet.health_s={health_s}").items()
    }
    assert found == {
        "Replica": (health_s, health_s),
        "Coordinator": (health_s, light_s),
        "Front": (health_s, light_s),
    }
