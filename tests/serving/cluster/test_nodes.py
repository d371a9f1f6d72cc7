# SPDX-License-Identifier: Apache-2.0
"""What a node does with a view of who holds what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jgr.placement.transport import Peer
from jgr.serving.cluster.nodes import Node, View


class Watched:
    """A transport that notes who is there."""

    def __init__(self) -> None:
        self.kept: list[set[Peer]] = []

    def keep(self, peers: Iterable[Peer]) -> None:
        self.kept.append(set(peers))


def test_what_is_open_to_others_than_those_of_the_view_is_closed() -> None:
    transport: Any = Watched()
    node = Node(0, None, transport, 8)  # type: ignore[arg-type]
    first, replaced = Peer("h", 1, "m"), Peer("h", 2, "m")
    node.see(View({1: first}, 2, b"\xff"))
    node.see(View({1: tuple(replaced)}, 2, b"\xff"))  # type: ignore[dict-item]  # as Ray may bring it
    assert transport.kept == [{first}, {replaced}]
