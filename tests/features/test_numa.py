# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes read from a made-up sysfs, and which of them a thread is bound to."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from jgr.features import numa


def machine(folder: Path, cpus: list[str], devices: dict[str, tuple[str, str, int]]) -> Path:
    """A sysfs. cpus: of each node. devices: class, vendor and node by PCI address."""
    for node, text in enumerate(cpus):
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(text + "\n")
    for address, (kind, vendor, node) in devices.items():
        place = folder / f"bus/pci/devices/{address}"
        place.mkdir(parents=True)
        (place / "class").write_text(kind + "\n")
        (place / "vendor").write_text(vendor + "\n")
        (place / "numa_node").write_text(f"{node}\n")
    return folder


DEVICES = {
    "0000:00:01.0": ("0x020000", "0x10de", 0),  # a network card of the same maker
    "0000:17:00.0": ("0x030000", "0x1a03", 0),  # the board's own display
    "0000:a1:00.0": ("0x030200", "0x10de", 1),
    "0000:b1:00.0": ("0x030200", "0x10de", 0),
}


def test_nodes_and_the_accelerator_are_read(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, ["0-3,8", "4-7,9-10", ""], DEVICES)
    assert numa.nodes(sysfs) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7, 9, 10}}  # a node of memory only is none
    assert numa.accelerator_node(sysfs) == 1
    assert numa.nodes(tmp_path / "nothing") == {} and numa.accelerator_node(tmp_path / "nothing") is None


def test_an_accelerator_without_a_node(tmp_path: Path) -> None:
    assert (
        numa.accelerator_node(machine(tmp_path, ["0"], {"0000:01:00.0": ("0x030200", "0x10de", -1)})) is None
    )


@pytest.mark.parametrize(
    ("near", "allowed", "chosen"),
    [
        (1, range(8), (1, {4, 5, 6, 7})),
        (0, {1, 4, 5}, (0, {1})),
        (None, {1, 4, 5}, (1, {4, 5})),  # most of the allowed CPUs
        (None, range(8), (0, {0, 1, 2, 3})),  # equal ones: the first
        (1, {0, 1}, (0, {0, 1})),  # the accelerator's node is closed to us
        (0, {99}, None),
    ],
)
def test_the_node_that_is_chosen(
    near: int | None, allowed: set[int], chosen: tuple[int, set[int]] | None
) -> None:
    found = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    assert numa.choose(found, near, allowed) == chosen
    assert numa.choose({0: found[0]}, near, allowed) is None


def test_a_thread_is_bound_and_no_other(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    others = ",".join(map(str, [*sorted(before - {cpu}), 4000]))  # never nothing
    sysfs = machine(tmp_path, [others, str(cpu)], {"0000:01:00.0": ("0x030200", "0x10de", 1)})
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend((numa.bind_thread(sysfs), os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    assert seen == [1, {cpu}]
    assert os.sched_getaffinity(0) == before


def test_one_node_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.DEBUG, "jgr.features.numa"):
        assert numa.bind_thread(machine(tmp_path, ["0-3"], {})) is None
    assert caplog.messages == ["threads are not bound: 1 NUMA node(s)"]
    assert os.sched_getaffinity(0) == before
