# SPDX-License-Identifier: Apache-2.0
"""Whether a missing item is fetched from the node that holds it or computed: whichever costs less (BAT-7, BAT-12).

A fetch takes a latency and a time for each byte, which every fetch from that node corrects. Computing takes what the
policy's measured costs say. A node that did not answer well is left alone for a while, twice as long each time.

Pure: times are arguments in integer ns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

N = TypeVar("N", bound=Hashable)
Fetching = Literal["cheaper", "always", "never"]

RATE = 1 / 8
FIRST_NS_PER_BYTE, FIRST_LATENCY_NS = 0.8, 500_000.0
"""What is believed of a link that was never used: 10 Gb/s, and half a millisecond."""
BELIEVED_BYTES = 1 << 20
MOST = 16.0
"""A fetch counts as having taken at most so many times what was predicted: a pause is no slow link."""
ALIKE = 1e-4
"""Sizes whose variance is below this share of their mean's square count as one size."""
CLOSED_NS, LONGEST_CLOSED_NS = 250_000_000, 30_000_000_000


class Missing(NamedTuple):
    """What a request needs of one node. compute_ns: what computing it instead takes."""

    nbytes: int
    compute_ns: int


class _Link:
    """What fetches over a link took, as a latency and a time for each byte: the line of least squares through them, of
    which each counts by a RATE less than the one after it. It begins with two points of what is believed."""

    def __init__(self, ns_per_byte: float) -> None:
        self.failures, self.closed_until_ns, self.used = 0, 0, False
        self.latency_ns, self.ns_per_byte = FIRST_LATENCY_NS, ns_per_byte
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for nbytes in (0, BELIEVED_BYTES):
            self._add(nbytes, FIRST_LATENCY_NS + nbytes * ns_per_byte)

    def observe(self, nbytes: int, took_ns: int) -> None:
        predicted = self.latency_ns + nbytes * self.ns_per_byte
        self._add(nbytes, min(took_ns, MOST * predicted))
        self.used = True
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        slope = self.ns_per_byte
        if spread > ALIKE * x * x:  # else all were of one size, and tell nothing of another
            slope = (self._xy / self._weight - x * y) / spread
        self.ns_per_byte = min(max(slope, 0.0), y / x) if x else slope
        self.latency_ns = y - x * self.ns_per_byte

    def _add(self, nbytes: float, took_ns: float) -> None:
        kept = 1 - RATE
        self._weight = kept * self._weight + 1
        self._x, self._y = kept * self._x + nbytes, kept * self._y + took_ns
        self._xx, self._xy = kept * self._xx + nbytes * nbytes, kept * self._xy + nbytes * took_ns


class Links:
    """What is known of the ways to other nodes. ns_per_byte: what is believed of all of them before they were used."""

    def __init__(self, ns_per_byte: float = FIRST_NS_PER_BYTE) -> None:
        self._first = ns_per_byte
        self._links: dict[Hashable, _Link] = {}

    def keep(self, nodes: Iterable[Hashable]) -> None:
        """Forget all other nodes."""
        kept = set(nodes)
        self._links = {node: link for node, link in self._links.items() if node in kept}

    def takes_ns(self, node: Hashable, nbytes: int) -> int:
        """How long a fetch of so many bytes should take."""
        link = self._of(node)
        return round(link.latency_ns + nbytes * link.ns_per_byte)

    def bytes_per_s(self, nodes: Iterable[Hashable]) -> float | None:
        """The mean speed of the links to these nodes that were used; None: none was."""
        links = [self._links[node] for node in nodes if node in self._links]
        used = [1e9 / link.ns_per_byte for link in links if link.used and link.ns_per_byte > 0]
        return sum(used) / len(used) if used else None

    def observe(self, node: Hashable, nbytes: int, took_ns: int) -> None:
        """A fetch ended well."""
        link = self._of(node)
        link.failures = 0
        link.observe(nbytes, max(1, took_ns))

    def failed(self, node: Hashable, now_ns: int) -> None:
        """A fetch came to nothing: the node is left alone for a while."""
        link = self._of(node)
        link.closed_until_ns = now_ns + min(CLOSED_NS << min(link.failures, 16), LONGEST_CLOSED_NS)
        link.failures += 1

    def closed(self, node: Hashable, now_ns: int) -> bool:
        """Whether the node is left alone now."""
        return now_ns < self._of(node).closed_until_ns

    def choose(
        self,
        missing: Mapping[N, Missing],
        now_ns: int,
        most_ns: int,
        fetching: Fetching = "cheaper",
    ) -> tuple[N, ...]:
        """The nodes to fetch from, side by side. most_ns: how long the request can wait."""
        if fetching == "never" or most_ns <= 0:
            return ()
        chosen = []
        for node, of in missing.items():
            takes_ns = self.takes_ns(node, of.nbytes)
            pays = fetching == "always" or (takes_ns < of.compute_ns and takes_ns <= most_ns)
            if pays and not self.closed(node, now_ns):
                chosen.append(node)
        return tuple(chosen)

    def _of(self, node: Hashable) -> _Link:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = _Link(self._first)
        return link
