# SPDX-License-Identifier: Apache-2.0
"""The memory that a process may have: the host's, or what its control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jgr.models.room import free_bytes, host_bytes

MB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


def system(root: Path, groups: str, files: dict[str, str], swap_mb: int = 0) -> Path:
    """A system with 1000 MB available, its groups as in /proc/self/cgroup, and files under /sys/fs/cgroup."""
    memory = f"MemTotal: 4096000 kB\nMemAvailable: {1000 << 10} kB\nSwapFree: {swap_mb << 10} kB\n"
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {**files, "proc/meminfo": memory, "proc/self/cgroup": groups}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, most: str, used_mb: int, cached_mb: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": most,
        f"{folder}memory.current": f"{used_mb * MB}\n",
        f"{folder}memory.stat": f"anon 1\ninactive_file {cached_mb * MB}\n",
    }


def v1(folder: str, most: int, used_mb: int, cached_mb: int = 0) -> dict[str, str]:
    return {
        f"memory/{folder}memory.limit_in_bytes": f"{most}\n",
        f"memory/{folder}memory.usage_in_bytes": f"{used_mb * MB}\n",
        f"memory/{folder}memory.stat": f"cache 1\ntotal_inactive_file {cached_mb * MB}\n",
    }


V1 = "12:cpuset:/\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "free_mb"),
    [
        ("0::/\n", {}, 1000),
        ("", {}, 1000),
        ("0::/\n", v2("", f"{500 * MB}\n", 300), 200),
        ("0::/\n", v2("", f"{500 * MB}\n", 300, cached_mb=100), 300),
        ("0::/\n", v2("", "max\n", 300), 1000),
        ("0::/\n", v2("", f"{5000 * MB}\n", 300), 1000),
        ("0::/\n", v2("", f"{500 * MB}\n", 600), -100),
        ("0::/a/b\n", v2("a/b/", "max\n", 300) | v2("a/", f"{700 * MB}\n", 100), 600),
        ("0::/a/b\n", v2("a/b/", f"{400 * MB}\n", 300) | v2("a/", f"{700 * MB}\n", 100), 100),
        ("0::/a/b\n", v2("a/b/", "what?\n", 300), 1000),
        (V1, v1("docker/abc/", 800 * MB, 500, cached_mb=50) | v1("", UNLIMITED_V1, 900), 350),
        (V1, v1("", 800 * MB, 500), 300),  # a container sees its own group where the others' root would be
        (V1, v1("", UNLIMITED_V1, 500), 1000),
        ("2:cpu,memory:/x\n", {f"cpu,{name}": text for name, text in v1("x/", 800 * MB, 500).items()}, 300),
    ],
)
def test_what_is_free_is_what_the_host_and_all_groups_leave(
    tmp_path: Path, groups: str, files: dict[str, str], free_mb: int
) -> None:
    assert free_bytes(system(tmp_path, groups, files)) == free_mb * MB


def test_swap_counts_and_a_system_that_does_not_say_is_not_guessed_at(tmp_path: Path) -> None:
    assert free_bytes(system(tmp_path, "0::/\n", v2("", f"{500 * MB}\n", 300), swap_mb=50)) == 250 * MB
    assert free_bytes(tmp_path / "nowhere") is None


def test_all_memory_is_that_of_the_smallest_group(tmp_path: Path) -> None:
    whole = host_bytes(tmp_path / "nowhere")
    assert host_bytes(system(tmp_path / "one", "0::/\n", v2("", "max\n", 1))) == whole > 500 * MB
    assert host_bytes(system(tmp_path / "two", "0::/a\n", v2("a/", f"{500 * MB}\n", 1))) == 500 * MB
