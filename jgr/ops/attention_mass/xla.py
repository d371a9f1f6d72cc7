# SPDX-License-Identifier: Apache-2.0
"""Attention mass over the pairs of a query block and a key block in which something is seen, as in segment attention.

Twice: a query's weights are known when all of its scores are, and only those of one pair exist at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention.visibility import Arguments, pad_tokens, prepare, visible
from jgr.ops.segment_attention.xla import Pairs, seen_pairs

BLOCK = 128
"""Tokens of a block. Smaller ones leave out more of what is not seen, larger ones are faster products."""
_MASKED = -1e30


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    q = call.q
    batch, count, heads, dim = q.shape
    queries, (source,) = prepare(call)
    k = jnp.where(source.keys.request[:, None, :, None] >= 0, source.k, jnp.zeros((), source.k.dtype))
    kv_heads, block = k.shape[1], min(BLOCK, count)
    queries, keys = pad_tokens(queries, block), pad_tokens(source.keys, block)
    q = jnp.pad(q * jnp.asarray(dim**-0.5, q.dtype), ((0, 0), (0, -count % block), (0, 0), (0, 0)))
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -count % block), (0, 0)))
    q = q.reshape(batch, -1, block, kv_heads, heads // kv_heads, dim).transpose(1, 0, 3, 4, 2, 5)
    pairs, number = seen_pairs(queries, keys, block, block)

    def scored(pair: Pairs) -> tuple[jax.Array, jax.Array]:
        """The scores [B, K, G, t, s] of a pair of blocks, and what is seen [B, t, s]."""
        i, j, _ = pair

        def cut(x: jax.Array, at: Any, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, at * block, block, axis)

        rows = jax.tree.map(lambda x: cut(x, i, 1)[:, :, None], queries)
        seen = visible(rows, jax.tree.map(lambda x: cut(x, j, 1)[:, None], keys))
        scores = jnp.einsum("bkgtd,bksd->bkgts", q[i], cut(k, j, 2), preferred_element_type=jnp.float32)
        return jnp.where(seen[:, None, None], scores, _MASKED), seen

    def over(step: Any, start: Any) -> Any:
        return jax.lax.fori_loop(
            0, number, lambda at, x: step(x, jax.tree.map(lambda p: p[at], pairs)), start
        )

    def add_up(running: tuple[jax.Array, jax.Array], pair: Pairs) -> tuple[jax.Array, jax.Array]:
        top, total = running
        scores, _ = scored(pair)
        old = top[pair[0]]
        new = jnp.maximum(old, scores.max(-1))
        sums = total[pair[0]] * jnp.exp(old - new) + jnp.exp(scores - new[..., None]).sum(-1)
        return top.at[pair[0]].set(new), total.at[pair[0]].set(sums)

    top = jnp.full(q.shape[:-1], _MASKED, jnp.float32)
    top, total = over(add_up, (top, jnp.zeros_like(top)))

    def give(found: tuple[jax.Array, jax.Array], pair: Pairs) -> tuple[jax.Array, jax.Array]:
        mass, seen_by = found
        i, j, _ = pair
        scores, seen = scored(pair)
        weights = jnp.exp(scores - top[i][..., None]) * (1 / jnp.maximum(total[i], 1e-30))[..., None]
        weights = jnp.where(seen[:, None, None], weights, 0.0)
        return mass.at[j].add(weights.sum((1, 2, 3))), seen_by.at[j].add(seen.sum(1, dtype=jnp.int32))

    shape = (q.shape[0], batch, block)
    mass, seen_by = over(give, (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)))
    found: jax.Array = (mass / jnp.maximum(seen_by, 1)).swapaxes(0, 1)
    return found.reshape(batch, -1)[:, :count]
