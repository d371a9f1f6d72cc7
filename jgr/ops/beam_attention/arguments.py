# SPDX-License-Identifier: Apache-2.0
"""A call of beam attention as all its forms take it."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Arguments(NamedTuple):
    """The arguments of beam_attention; see there for the fields."""

    q: jax.Array
    context_k: jax.Array
    context_v: jax.Array
    lengths: jax.Array
    beam_k: jax.Array
    beam_v: jax.Array
    ancestors: jax.Array | None
    widths: jax.Array | None = None

    @property
    def groups(self) -> int:
        """Query heads of one key/value head."""
        return self.q.shape[2] // self.context_k.shape[1]
