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

from jgr.ops.exponential import exp_negative

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


def best_tokens(logits: jax.Array, scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best continuations of W beams by any of V tokens: by score + log-probability, whose softmax is over all V.

    logits: [B, W, V] float32; scores: [B, W] float32, -inf for dead beams. Returns the new scores [B, k], descending,
    -inf where there are fewer, and [B, k] int32, beam * V + token, in 0 .. W * V - 1. Of equal ones the lower is first.
    """
    batch, beams, vocabulary = logits.shape
    blocks, rest = divmod(vocabulary, BLOCK)
    whole = logits[..., : blocks * BLOCK].reshape(batch, beams, blocks, BLOCK)
    maxima = whole.max(axis=-1, initial=-jnp.inf)
    if rest:  # padding would copy all logits
        last = logits[..., blocks * BLOCK :].max(axis=-1, keepdims=True)
        maxima = jnp.concatenate([maxima, last], axis=-1)
    most, per_beam = maxima.max(axis=-1), maxima.shape[-1]
    norm = most + jnp.log(exp_negative(logits - most[..., None]).sum(axis=-1))
    flat = logits.reshape(batch, -1)

    def values(chosen: jax.Array) -> jax.Array:
        beam, token = chosen // per_beam, (chosen % per_beam)[..., None] * BLOCK + jnp.arange(BLOCK)
        at = beam[..., None] * vocabulary + jnp.minimum(token, vocabulary - 1)
        x = jnp.take_along_axis(flat, at.reshape(batch, -1), axis=1).reshape(at.shape)
        score, mass = (jnp.take_along_axis(v, beam, axis=1)[..., None] for v in (scores, norm))
        return jnp.where(token < vocabulary, score + (x - mass), -jnp.inf)

    best = scores[..., None] + (maxima - norm[..., None])
    found, at = top_of_blocks(best.reshape(batch, -1), values, BLOCK, k)
    beam, token = at // (per_beam * BLOCK), at % (per_beam * BLOCK)
    return found, beam * vocabulary + jnp.minimum(token, vocabulary - 1)
