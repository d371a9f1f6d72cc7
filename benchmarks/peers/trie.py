# SPDX-License-Identifier: Apache-2.0
"""The catalog's prefix tree for peers, and one beam step over it; numpy alone.

Scores are normalized over the legal continuations (normalize="valid").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Beam(NamedTuple):
    """tokens: what was generated; node: where that is in its level of the tree; score: its log-likelihood."""

    tokens: tuple[int, ...] = ()
    node: int = 0
    score: float = 0.0


class Trie:
    """See jgr.catalog.prefix_tree; arrays: of catalog.npz."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.depth = arrays["sequences"].shape[1]
        levels = range(self.depth)
        self._first = [arrays[f"offsets_{level}"].tolist() for level in levels]
        tokens = [arrays[f"tokens_{level}"][arrays[f"codes_{level}"]] for level in levels]
        self._tokens: list[list[int]] = [of_level.tolist() for of_level in tokens]

    def children(self, beam: Beam) -> list[int]:
        """The tokens that may follow."""
        level = len(beam.tokens)
        first, end = self._first[level][beam.node : beam.node + 2]
        return self._tokens[level][first:end]

    def step(self, beams: Sequence[Beam], logprobs: Sequence[Mapping[int, float]], width: int) -> list[Beam]:
        """The best `width` continuations, best first.

        logprobs: for each beam, of each of its children that can be among them, normalized over all its children.
        """
        found = []
        for beam, of_beam in zip(beams, logprobs, strict=True):
            first = self._first[len(beam.tokens)][beam.node]
            for at, token in enumerate(self.children(beam)):
                if token in of_beam:
                    found.append(Beam((*beam.tokens, token), first + at, beam.score + of_beam[token]))
        found.sort(key=lambda beam: -beam.score)  # stable: ties keep their order
        return found[:width]
