# SPDX-License-Identifier: Apache-2.0
"""The arguments of the op, as all its forms take them."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Arguments(NamedTuple):
    """A call of turned_heads; see there for the fields."""

    x: jax.Array
    cos: jax.Array
    sin: jax.Array
    bias: jax.Array | None
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    kv_heads: int
    head: int
    eps: float

    @property
    def heads(self) -> int:
        """H, of queries."""
        return self.x.shape[-1] // self.head - 2 * self.kv_heads
