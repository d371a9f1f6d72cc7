# SPDX-License-Identifier: Apache-2.0
"""Intervals for means over queries: the percentile bootstrap, paired.

The one idea: a resample draws n of the n queries with replacement, once for *all* series, so a difference of two
series is resampled as a difference. Queries with equal values in all series are interchangeable, and there are few
kinds of them (a metric of one target has k + 1 values): a resample is how often it drew each kind, and the means of
all series are one product of matrices, in blocks that bound the memory.

The interval is that between the quantiles of the resampled means (linear interpolation), as
`scipy.stats.bootstrap(paired=True, method="percentile")` has it; the same seed draws the same resamples.

Letters: n queries, s series, r resamples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

CONFIDENCE = 0.95
_COUNTS_PER_BLOCK = 1 << 22


def resampled_means(values: Float64, resamples: int, seed: int) -> Float64:
    """[n, s] values, n >= 1 -> [r, s], each row the means of one resample."""
    n = len(values)
    rng = np.random.default_rng(seed)
    kinds, kind = np.unique(values, axis=0, return_inverse=True)
    kind = kind.reshape(n)
    means = np.empty((resamples, values.shape[1]))
    step = max(1, _COUNTS_PER_BLOCK // len(kinds))
    for at in range(0, resamples, step):
        block = means[at : at + step]
        drawn = [np.bincount(kind[rng.integers(0, n, n)], minlength=len(kinds)) for _ in block]
        block[:] = np.array(drawn, np.float64) @ kinds / n
    return means


def interval(means: Float64, confidence: float = CONFIDENCE) -> tuple[Float64, Float64]:
    """[r, s] resampled means -> the lower and upper end of each series' interval, [s] both."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
