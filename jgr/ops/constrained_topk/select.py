# SPDX-License-Identifier: Apache-2.0
"""Exact top-k with early termination on a device (XGR-10): only the best blocks of candidates are ever sorted.

The k best candidates lie in the k blocks with the largest maxima: a candidate in another block comes after all of those
k maxima. So one streaming pass takes the maxima, they are ranked, and then the candidates of k blocks are ranked;
the rest is never looked at again. This is exact with ties, too: blocks are consecutive, so of equal candidates the one
with the lower index stands in the lower block, and both rankings take the lower first.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

BLOCK = 128


def top_of_blocks(
    maxima: jax.Array, values_of: Callable[[jax.Array], jax.Array], block: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """The k best of N blocks of `block` candidates each.

    maxima: [B, N], the largest candidate of each block. values_of: blocks [B, n] int32 -> their candidates
    [B, n, block]. Returns values [B, k], descending, -inf where there are fewer, and their indices [B, k] int32 among
    the N * block candidates. Of equal ones the lower index comes first.
    """
    batch, blocks = maxima.shape
    _, chosen = jax.lax.top_k(maxima, min(k, blocks))
    chosen = jnp.sort(chosen, axis=-1)
    values = values_of(chosen).reshape(batch, -1)
    values = jnp.pad(values, ((0, 0), (0, max(0, k - values.shape[1]))), constant_values=-jnp.inf)
    best, at = jax.lax.top_k(values, k)
    which = jnp.minimum(at // block, chosen.shape[1] - 1)
    return best, jnp.take_along_axis(chosen, which, axis=-1) * block + at % block


def top_k(values: jax.Array, k: int, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """The k best of values [B, N], as jax.lax.top_k gives them; N is a multiple of `block`."""
    blocks = values.reshape(values.shape[0], -1, block)
    return top_of_blocks(
        blocks.max(axis=-1),
        lambda chosen: jnp.take_along_axis(blocks, chosen[..., None], axis=1),
        block,
        k,
    )
