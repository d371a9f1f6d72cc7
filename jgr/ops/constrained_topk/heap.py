# SPDX-License-Identifier: Apache-2.0
"""The paper's early sorting termination (XGR-10) on the host: a heap, and how many candidates it had to look at.

The device's form is tested and measured against this one. A beam's candidates are sorted, so the first that does not
enter a full heap ends the beam.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Heaped(NamedTuple):
    """The result. scores [m], descending, m <= width; indices [m], beam * K + child; visited: candidates looked at."""

    scores: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int64]
    visited: int


def top_k(scores: npt.NDArray[np.float32], width: int) -> Heaped:
    """The `width` best of scores [W, K] float32, -inf where there is no candidate. Of equal ones the lower is first."""
    return merge(scores, np.argsort(-scores, axis=1, kind="stable"), width)


def merge(scores: npt.NDArray[np.float32], order: npt.NDArray[np.int64], width: int) -> Heaped:
    """The same as `top_k`, where each beam's candidates are sorted already: order [W, K], the best first."""
    children = scores.shape[1]
    heap: list[tuple[float, int]] = []
    visited = 0
    best = np.take_along_axis(scores, order[:, :1], axis=1)[:, 0]
    for beam in np.argsort(-best, kind="stable").tolist():  # the best beams first: they prune the others
        for child in order[beam]:
            score = float(scores[beam, child])
            if score == -np.inf:
                break
            visited += 1
            entry = (score, -(beam * children + int(child)))
            if len(heap) < width:
                heapq.heappush(heap, entry)
            elif entry > heap[0]:
                heapq.heapreplace(heap, entry)
            else:
                break
    heap.sort(reverse=True)
    return Heaped(
        np.array([score for score, _ in heap], np.float32),
        np.array([-index for _, index in heap], np.int64),
        visited,
    )
