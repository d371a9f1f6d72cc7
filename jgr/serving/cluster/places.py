# SPDX-License-Identifier: Apache-2.0
"""Where a process of a fleet runs, as `/v1/models` and traces name it."""

from __future__ import annotations

import socket


def own_node() -> str:
    """The machine's name, and the beginning of its id in Ray's cluster: of several nodes on one machine each has its
    own."""
    import ray

    return f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:8]}"


def place(name: str, node: str) -> dict[str, str]:
    """The attributes of a trace's resource that tell which process of the fleet has written it."""
    return {"service.instance.id": name, "host.name": node.partition("/")[0], "jgr.node": node}
