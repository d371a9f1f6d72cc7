# SPDX-License-Identifier: Apache-2.0
"""The sum and its norm by the formula."""

from __future__ import annotations

import jax

from jgr.ops.rms_norm import rms_norm


def add_norm(
    x: jax.Array, added: jax.Array | None, scale: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See jgr.ops.add_norm; x and added are [N, D]."""
    total = x if added is None else x + added
    return total, rms_norm(total, scale, eps)
