# SPDX-License-Identifier: Apache-2.0
"""exp of what is not positive, against float64, and its derivative."""

from __future__ import annotations

import jax
import numpy as np

from jgr.ops.exponential import exp_negative


def test_values_and_derivatives_are_those_of_exp() -> None:
    # Besides, numbers whose quotient by ln 2 is half way between two whole ones.
    x = np.concatenate([np.linspace(-87, 0, 200_001), -np.log(2) * (np.arange(125) + 0.5)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    value, slope = jax.jit(lambda x, by: jax.jvp(exp_negative, (x,), (by,)))(x, np.full_like(x, 2))
    near = x > -10
    np.testing.assert_allclose(value[near], exact[near], rtol=8e-7)
    np.testing.assert_allclose(value, exact, rtol=6e-6)
    np.testing.assert_allclose(slope, 2 * exact, rtol=6e-6)
    least = exp_negative(np.array([-100, -1e30, -np.inf], np.float32))
    np.testing.assert_allclose(least, 2.0**-126, rtol=1e-6)
