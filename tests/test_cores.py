# SPDX-License-Identifier: Apache-2.0
"""How many cores a process may use, by the files in which Linux says so."""

from pathlib import Path

import pytest

from jgr import cores
from jgr.cli import console
from jgr.config import Config, override
from jgr.cores import cores_here

V1 = "sys/fs/cgroup/cpu,cpuacct"
NAMES_1 = "7:memory:/m\n3:cpu,cpuacct:/docker/a1\n2:cpuset:/docker/a1\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n"}, 8),  # the top has no limit's file
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "rubbish"}, 8),
        (  # the least of a group's and of those that it lies in
            {
                "proc/self/cgroup": "0::/pods/a.slice/b\n",
                "sys/fs/cgroup/pods/a.slice/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pods/a.slice/cpu.max": "300000 50000\n",
                "sys/fs/cgroup/pods/cpu.max": "700000 100000\n",
            },
            6,
        ),
        (  # the host's name of the group, which a container does not have
            {"proc/self/cgroup": "0::/../../pods/b\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"},
            4,
        ),
        (
            {
                "proc/self/cgroup": NAMES_1,
                f"{V1}/docker/a1/cpu.cfs_quota_us": "300000\n",
                f"{V1}/docker/a1/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/m/cpu.max": "100000 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": NAMES_1,
                f"{V1}/cpu.cfs_quota_us": "500000\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": NAMES_1,
                f"{V1}/cpu.cfs_quota_us": "-1\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_the_limit_on_cpu_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], wanted: int
) -> None:
    monkeypatch.setattr(cores, "cores_to_run_on", lambda: 8)
    assert cores_here(system(tmp_path, files)) == wanted


@pytest.mark.parametrize(
    ("limit", "settings", "wanted"),
    [
        (3, [], {"NPROC": "3"}),
        (8, [], {}),
        (3, ["server.host_cores=1"], {"PJRT_NPROC": "2"}),
        (3, ["data_parallel.devices=2"], {"NPROC": "4"}),
    ],
)
def test_xla_has_no_more_threads_than_the_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, limit: int, settings: list[str], wanted: dict[str, str]
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(console.os, "environ", environment)
    monkeypatch.setattr(console, "cores_here", lambda: limit)
    monkeypatch.setattr(console, "cores_to_run_on", lambda: 8)
    console.size_threads([override(Config(), *settings)])
    assert environment == wanted
