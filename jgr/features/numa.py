# SPDX-License-Identifier: Apache-2.0
"""Binds threads to the NUMA node of their memory and accelerator (FLAME-5), which it finds in sysfs.

Linux puts memory on the node of the thread that first writes to it, so bind a thread before it makes its buffers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

_log = logging.getLogger(__name__)

SYSFS = Path("/sys")
_DISPLAY_OR_ACCELERATOR = ("0x03", "0x12")  # PCI classes


def nodes(sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """The CPUs of each node that has any; {} if the system does not tell."""
    found = {}
    for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist"):
        cpus = cpu_list(path.read_text())
        if cpus:
            found[int(path.parent.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def cpu_list(text: str) -> frozenset[int]:
    """Parse a set of CPUs in the kernel's form, such as "0-3,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def accelerator_node(sysfs: Path = SYSFS) -> int | None:
    """The node of the first NVIDIA device by PCIe address; None if there is no device, or it has no node."""
    for device in sorted(sysfs.glob("bus/pci/devices/*")):
        kind, vendor = (device / "class").read_text(), (device / "vendor").read_text().strip()
        if kind.startswith(_DISPLAY_OR_ACCELERATOR) and vendor == "0x10de":
            node = int((device / "numa_node").read_text())
            return node if node >= 0 else None
    return None


def choose(
    found: dict[int, frozenset[int]], near: int | None, allowed: Collection[int]
) -> tuple[int, frozenset[int]] | None:
    """The node to bind to, with its allowed CPUs: the accelerator's node, else the one with most allowed CPUs.

    found: the CPUs of each node. near: the accelerator's node. allowed: CPUs that the process may use. None if there
    are fewer than two nodes, or none with an allowed CPU.
    """
    usable = {node: cpus & frozenset(allowed) for node, cpus in found.items()}
    usable = {node: cpus for node, cpus in usable.items() if cpus}
    if len(found) < 2 or not usable:
        return None
    node = near if near in usable else max(usable, key=lambda node: (len(usable[node]), -node))
    assert node is not None
    return node, usable[node]


def bind_thread(sysfs: Path = SYSFS) -> int | None:
    """Bind the calling thread to a node and return the node; None, and no binding, on a machine with one node."""
    found = nodes(sysfs)
    chosen = choose(found, accelerator_node(sysfs), os.sched_getaffinity(0)) if len(found) > 1 else None
    if chosen is None:
        _log.debug("threads are not bound: %d NUMA node(s)", len(found))
        return None
    node, cpus = chosen
    os.sched_setaffinity(0, cpus)
    _log.info("a thread was bound to NUMA node %d, of %d CPUs", node, len(cpus))
    return node
