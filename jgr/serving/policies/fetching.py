# SPDX-License-Identifier: Apache-2.0
"""Whether a missing item is fetched from the node that holds it or computed: whichever costs less (BAT-7, BAT-12).

A fetch takes a latency and a time for each byte, which every fetch from that node corrects. Computing takes what the
policy's measured costs say. A node that did not answer well is left alone for a while, twice as long each time.

Pure: times are arguments in integer ns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Fetching = Literal["cheaper", "always", "never"]

RATE = 1 / 8
FIRST_NS_PER_BYTE, FIRST_LATENCY_NS = 0.8, 500_000.0
"""What is believed of a link that was never used: 10 Gb/s, and half a millisecond."""
CLOSED_NS, LONGEST_CLOSED_NS = 250_000_000, 30_000_000_000


class Missing(NamedTuple):
    """What a request needs of one node. compute_ns: what computing it instead takes."""

    nbytes: int
    compute_ns: int


@dataclass
class _Link:
    latency_ns: float = FIRST_LATENCY_NS
    ns_per_byte: float = FIRST_NS_PER_BYTE
    failures: int = 0
    closed_until_ns: int = 0
    used: bool = False


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

    def bytes_per_s(self) -> float | None:
        """The mean speed of the links that were used; None: none was."""
        used = [1e9 / link.ns_per_byte for link in self._links.values() if link.used and link.ns_per_byte > 0]
        return sum(used) / len(used) if used else None

    def observe(self, node: Hashable, nbytes: int, took_ns: int) -> None:
        """A fetch ended well. What it took is put down to the bytes and to the latency as they were predicted."""
        link = self._of(node)
        link.failures, link.used = 0, True
        predicted = max(1.0, link.latency_ns + nbytes * link.ns_per_byte)
        # By factors, so that neither becomes 0; of a short one mostly the latency is learnt, of a long one the speed.
        share, ratio = nbytes * link.ns_per_byte / predicted, max(1, took_ns) / predicted
        link.ns_per_byte *= 1 + RATE * share * (min(ratio, 16.0) - 1)
        link.latency_ns *= 1 + RATE * (1 - share) * (min(ratio, 16.0) - 1)

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
        missing: Mapping[Hashable, Missing],
        now_ns: int,
        most_ns: int,
        fetching: Fetching = "cheaper",
    ) -> tuple[Hashable, ...]:
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
            link = self._links[node] = _Link(ns_per_byte=self._first)
        return link
