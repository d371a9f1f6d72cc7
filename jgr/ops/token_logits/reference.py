# SPDX-License-Identifier: Apache-2.0
"""Logits by XLA's matmul."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """See jgr.ops.token_logits. Differentiable."""
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
