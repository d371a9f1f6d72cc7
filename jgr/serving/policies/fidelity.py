# SPDX-License-Identifier: Apache-2.0
"""How faithful approximate scores are to those of the whole prompt, and when they are not faithful enough (RcLLM).

A ranking is what its order says, so agreement is counted by order: Kendall's tau, the overlap of the first ten, and the
divergence of the scores as a distribution over the request's candidates. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.floating]

SAMPLES = 200
"""The mean is over so many last samples."""
FEWEST = 20
"""Samples before anything is decided: one odd request is no drift."""
FIRST = 10
"""How many of the first candidates overlap."""


class Agreement(NamedTuple):
    """tau: Kendall's tau-b, -1 to 1; 0 where the approximate scores are all equal. overlap: the share of the first ten
    (of all, where there are fewer) that both have. kl: the divergence of the approximate scores' softmax from the exact
    ones', in nats."""

    tau: float
    overlap: float
    kl: float


def agreement(exact: Float, approximate: Float) -> Agreement | None:
    """How an answer's scores, [n], agree with exact ones of the same candidates, [n]. None where there is no order to
    agree on: a single candidate, or exact scores that are all equal; and for scores that are no numbers."""
    exact, approximate = exact.astype(np.float64), approximate.astype(np.float64)
    if len(exact) < 2 or not (np.isfinite(exact).all() and np.isfinite(approximate).all()):
        return None
    concordance, untied_exact, untied_approximate = 0.0, 0, 0
    for at in range(len(exact) - 1):
        one, other = np.sign(exact[at + 1 :] - exact[at]), np.sign(approximate[at + 1 :] - approximate[at])
        concordance += float(one @ other)
        untied_exact += int(np.count_nonzero(one))
        untied_approximate += int(np.count_nonzero(other))
    if not untied_exact:
        return None
    tau = concordance / np.sqrt(untied_exact * untied_approximate) if untied_approximate else 0.0
    return Agreement(float(tau), _overlap(exact, approximate), _divergence(exact, approximate))


class Watch:
    """Decides whether answers may be approximate: not once the mean of 1 - tau over the last samples exceeds `most`,
    until it is below half of that.

    most: at most 2, which is a reversed order; None: nothing is decided.
    """

    def __init__(self, most: float | None) -> None:
        self._most = most
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.fell_back = False
        """Whether answers are to be computed whole."""

    @property
    def mean(self) -> float:
        """The mean of 1 - tau over the last samples; 0 before there are any."""
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    def observe(self, tau: float) -> bool:
        """Take a sample: Kendall's tau of an approximate answer. Whether `fell_back` changes by it."""
        self._samples.append(1 - tau)
        if self._most is None or len(self._samples) < FEWEST:
            return False
        before = self.fell_back
        self.fell_back = self.mean >= self._most / 2 if before else self.mean > self._most
        return self.fell_back != before


def _overlap(exact: Float, approximate: Float) -> float:
    count = min(FIRST, len(exact))
    ours, theirs = (np.argsort(-scores, kind="stable")[:count] for scores in (exact, approximate))
    return float(np.isin(ours, theirs).mean())


def _divergence(exact: Float, approximate: Float) -> float:
    p, q = _log_softmax(exact), _log_softmax(approximate)
    return max(0.0, float(np.exp(p) @ (p - q)))


def _log_softmax(scores: Float) -> Float:
    shifted = scores - scores.max()
    found: Float = shifted - np.log(np.exp(shifted).sum())
    return found
