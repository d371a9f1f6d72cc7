# SPDX-License-Identifier: Apache-2.0
"""The wheel with `jgr[cluster]` in an environment of its own: one command starts two replicas that answer.

The environment's packages are those of this one, by links, so nothing is downloaded; `make fleet-wheel` does the same
with the registry's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.installed import Environment, asked
from tools.packages import closure
from tools.try_fleet import try_fleet


@pytest.mark.ray
@pytest.mark.slow
def test_one_command_of_the_wheel_starts_two_replicas(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packages = closure(*asked(wheel), *asked(wheel, "cluster"))
    assert "ray" in packages
    environment = Environment(tmp_path_factory.mktemp("env"), packages, wheel)
    assert (environment.check.returncode, environment.check.stdout) == (0, "No broken requirements found.\n")
    with tempfile.TemporaryDirectory(
        prefix="r", dir="/tmp"
    ) as folder:  # the names of Ray's sockets must be short
        told = try_fleet(environment.bin / "jgr", Path(folder), environment.env)
    assert told["ready"] == {"status": "ready", "replicas": 2, "of": 2}
    assert told["replicas"] == ["ready", "ready"]
    assert len(set(told["items"])) == 3
