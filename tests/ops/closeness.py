# SPDX-License-Identifier: Apache-2.0
"""A tolerance that calibrates itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def assert_as_close_as_naive(
    got: npt.ArrayLike, exact: npt.ArrayLike, naive: npt.ArrayLike, slack: float = 3.0
) -> None:
    """Fail unless `got` is at most `slack` times as far from `exact` as the naive form of the same dtype is.

    One ulp of the largest value is granted besides, so that a naive form that happens to be exact sets no trap.
    """
    got64, exact64, naive64 = (np.asarray(a, np.float64) for a in (got, exact, naive))
    if not np.isfinite(got64).all():
        raise AssertionError("not all values are finite")
    dtype = np.asarray(naive).dtype
    ulp = float(np.abs(exact64).max(initial=0.0)) * float(
        np.finfo(dtype).eps if dtype.kind == "f" else 2.0**-8
    )
    error, allowed = np.abs(got64 - exact64).max(initial=0.0), np.abs(naive64 - exact64).max(initial=0.0)
    if error > slack * allowed + ulp:
        raise AssertionError(f"error {error:.3g} exceeds {slack} x naive {allowed:.3g} + ulp {ulp:.3g}")
