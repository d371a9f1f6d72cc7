# SPDX-License-Identifier: Apache-2.0
"""How good probabilities of yes and no are: area under the curve, of all and within each user, and their log loss.

Conventions, those of scikit-learn and of the papers on click prediction:
- AUC is the share of (yes, no) pairs in which the yes has the higher score; equal scores count half.
- GAUC is the mean of the users' AUCs, weighted by their impressions; users of one label alone are left out.
- Log loss is in nats, of probabilities kept LEAST away from 0 and 1. Normalised entropy is log loss over that of the
  labels' mean, so 1 is a constant's, and less is better.
- A value that the labels do not define (AUC of one label alone) is NaN.

Letters: k impressions, [k] everywhere: scores float, labels 0 or 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]

LEAST = 1e-7


def auc(scores: Floats, labels: Ints) -> float:
    """Area under the ROC curve, by ranks."""
    return float(_grouped(scores, labels, np.zeros(len(labels), np.int64))[0][0]) if len(labels) else np.nan


def gauc(scores: Floats, labels: Ints, users: Ints) -> float:
    """AUC within users, see above. users: [k], any numbers."""
    if not len(labels):
        return np.nan
    _, index = np.unique(users, return_inverse=True)
    found, sizes = _grouped(scores, labels, index)
    there = ~np.isnan(found)
    return float(np.average(found[there], weights=sizes[there])) if there.any() else np.nan


class Areas:
    """The AUC of scores [k] under any weights of the impressions, such as how often a resample drew each."""

    def __init__(self, scores: Floats, labels: Ints) -> None:
        self._order = np.argsort(scores, kind="stable")
        ordered = np.asarray(scores)[self._order]
        self._first = np.flatnonzero(np.append(True, np.diff(ordered) != 0))
        self._yes = np.asarray(labels)[self._order] == 1

    def weighted(self, weights: Ints) -> float:
        """weights: [k], whole numbers from 0. NaN where one label has no weight."""
        given = weights[self._order].astype(np.float64)
        yes = np.add.reduceat(np.where(self._yes, given, 0), self._first)
        no = np.add.reduceat(np.where(self._yes, 0, given), self._first)
        below = np.cumsum(no) - no
        pairs = yes.sum() * no.sum()
        return float((yes * (below + no / 2)).sum() / pairs) if pairs else np.nan


def log_loss(scores: Floats, labels: Ints) -> float:
    """Mean nats."""
    p = np.clip(np.asarray(scores, np.float64), LEAST, 1 - LEAST)
    return float(-np.where(labels == 1, np.log(p), np.log1p(-p)).mean())


def normalised_entropy(scores: Floats, labels: Ints) -> float:
    """Log loss over that of the labels' mean."""
    rate = float(np.mean(labels))
    if rate in (0.0, 1.0):
        return np.nan
    return float(log_loss(scores, labels) / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def _grouped(
    scores: Floats, labels: Ints, group: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The AUC of each group, NaN where it is not defined, and its size. group: [k], 0 to the last without a gap."""
    values = np.asarray(scores, np.float64)
    order = np.lexsort([values, group])
    group, values, yes = group[order], values[order], np.asarray(labels)[order] == 1
    sizes = np.bincount(group)
    begins = np.cumsum(sizes) - sizes
    tied = np.append(True, (np.diff(values) != 0) | (np.diff(group) != 0))
    first = np.flatnonzero(tied)
    last = np.append(first[1:], len(values))
    rank = ((first + last + 1) / 2)[np.cumsum(tied) - 1] - begins[group]  # from 1; the mean of equal ones
    positive = np.bincount(group, yes)
    with np.errstate(invalid="ignore", divide="ignore"):
        above = np.bincount(group, np.where(yes, rank, 0)) - positive * (positive + 1) / 2
        pairs = positive * (sizes - positive)
        return np.where(pairs > 0, above / pairs, np.nan), sizes
