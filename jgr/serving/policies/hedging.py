# SPDX-License-Identifier: Apache-2.0
"""When a request is sent to a second node because the first one is silent, and which nodes are left out for a while.

A node that hangs has accepted requests and says nothing: no error tells of it. A request that waits much longer than it
should is sent to another node too, and whichever answers first counts. So few are, that a fleet which is slow as a
whole does not double its own work. A node that has answered nobody since is left out, but for a request now and then
which finds out whether it is back.

Pure: time is an argument, in ns.
"""

from __future__ import annotations

SHARE = 0.05
"""So many of the requests are sent twice at most."""
BURST = 32.0
"""So many may be at once, where few were lately."""
LEAST_NS = 20_000_000
"""A node may be silent so long, whatever was predicted: the host has pauses."""
FIRST_NS = 1_000_000_000
"""The same while nothing was answered yet."""
RATE = 1 / 16
"""The weight of one answer in the average."""
LEFT_OUT_NS = 1_000_000_000
"""A silent node is left out so long; then one request may go there in each such time."""
NODES = 4096
"""So many nodes are remembered at most, those of the last answers."""


class Hedging:
    """multiple: a request may take so many times what it should; 0: as long as it likes."""

    def __init__(self, multiple: float, least_ns: int = LEAST_NS, first_ns: int = FIRST_NS) -> None:
        self._multiple, self._least_ns, self._first_ns = multiple, least_ns, first_ns
        self._left = BURST
        self._beyond_ns: float | None = None  # what answers took beyond their prediction, in the mean
        self._answered_ns: dict[str, int] = {}  # by node
        self._until_ns: dict[str, int] = {}  # how long each silent node is left out

    def came(self) -> None:
        """A request has come."""
        self._left = min(BURST, self._left + SHARE)

    def wait_ns(self, predicted_ns: float) -> int | None:
        """How long a node may be silent with a request that should take so long there, 0 where that is not known; None:
        for ever."""
        if not self._multiple:
            return None
        if self._beyond_ns is None:
            return max(self._first_ns, round(self._multiple * predicted_ns))
        return max(self._least_ns, round(self._multiple * (predicted_ns + self._beyond_ns)))

    def silent(self, name: str, sent_ns: int, now_ns: int) -> bool:
        """A node has been silent for too long with a request that was sent to it then. Whether the request is sent to
        another one too."""
        self.late(name, sent_ns, now_ns)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def late(self, name: str, sent_ns: int, now_ns: int) -> None:
        """The deadline of a request that was sent to a node then has passed, or the node has failed it."""
        if self._multiple and self._answered_ns.get(name, sent_ns) <= sent_ns:
            _put(self._until_ns, name, now_ns + LEFT_OUT_NS)

    def answered(self, name: str, took_ns: int, predicted_ns: float, now_ns: int) -> None:
        """A node has answered, and not that it failed or was late."""
        beyond_ns = max(0.0, took_ns - predicted_ns)
        before_ns = beyond_ns if self._beyond_ns is None else self._beyond_ns
        self._beyond_ns = before_ns + RATE * (beyond_ns - before_ns)
        _put(self._answered_ns, name, now_ns)
        self._until_ns.pop(name, None)

    def lost(self, name: str) -> None:
        """A node is gone: nothing of it is remembered."""
        self._answered_ns.pop(name, None)
        self._until_ns.pop(name, None)

    @property
    def suspects(self) -> tuple[str, ...]:
        """The nodes that were silent and have not answered since."""
        return tuple(self._until_ns)

    def left_out(self, now_ns: int) -> tuple[str, ...]:
        """The nodes that the next request is not meant for."""
        found = tuple(name for name, until_ns in self._until_ns.items() if until_ns > now_ns)
        for name in self._until_ns.keys() - set(found):
            self._until_ns[name] = now_ns + LEFT_OUT_NS  # this request may find out
        return found


def _put(into: dict[str, int], name: str, ns: int) -> None:
    into.pop(name, None)
    into[name] = ns
    if len(into) > NODES:
        del into[next(iter(into))]
