# SPDX-License-Identifier: Apache-2.0
"""The softmax over a whole vocabulary as a loss, without holding the scores of all positions at once.

Scores [B, N, V] take most of the time and memory of a small recommender's training, and many positions of a batch have
no target. So positions are sorted, those with a target first, and computed CHUNK at a time; chunks without a target are
skipped. The loss is a sum, so its gradient is known up to one factor before the backward pass begins: each chunk
computes it together with its value, while its scores are in the cache, and only the gradient is kept.

Letters: B batch, N positions of a row, V vocabulary, D hidden, G groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops.dispatch import target_platform

CHUNK = 512
"""Positions whose scores are held at once, in all groups together: so many stay in a CPU's cache."""
GPU_CHUNK = 8192
"""The same on a GPU, where a loop's turn costs more than memory does."""


def softmax_nats(
    hidden: jax.Array,
    outputs: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    groups: int = 1,
) -> jax.Array:
    """The sum over all positions of weight * (logsumexp(scores) - score of the target), [] float32.

    hidden: [B, N, D] float32; a position's scores are hidden @ outputs.T + bias. outputs: [V, D]. bias: [V]. targets:
    [B, N] int32 below V. weights: [B, N] bool or float32, without gradient. groups: into how many equal parts the batch
    is divided for sorting; if it is spread over devices, their number.
    """

    def listed(x: jax.Array) -> jax.Array:
        """Sort and cut x, [B, N, ..], into [chunks, G, positions, ..], padded with 0."""
        x = x.reshape(groups, -1, *x.shape[2:])
        order = first.reshape(first.shape + (1,) * (x.ndim - 2))
        short = -x.shape[1] % places
        x = jnp.pad(jnp.take_along_axis(x, order, 1), [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(groups, -1, places, *x.shape[2:]), 1, 0)

    at_once = GPU_CHUNK if target_platform() == "gpu" else CHUNK
    places = max(1, min(at_once // groups, hidden.shape[0] * hidden.shape[1] // groups))
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    first = jnp.argsort(weights.reshape(groups, -1) == 0, axis=1)
    return _total(listed(hidden), outputs, bias, listed(targets), listed(weights))


def _of_chunk(
    hidden: jax.Array, outputs: jax.Array, bias: jax.Array | None, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    scores = hidden @ outputs.T
    scores = scores if bias is None else scores + bias
    taken = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return (weights * (jax.nn.logsumexp(scores, axis=-1) - taken)).sum()


Gradients = tuple[jax.Array, jax.Array, jax.Array | None]
"""Gradients with respect to the sorted hidden states [chunks, G, positions, D], the outputs and the bias."""


def _value_and_gradients(
    hidden: jax.Array, outputs: jax.Array, bias: jax.Array | None, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Gradients]:
    differentiate = jax.value_and_grad(_of_chunk, (0, 1, 2))

    def step(total: Any, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        h, t, w = chunk

        def add(total: Any) -> tuple[Any, jax.Array]:
            nats, (of_hidden, *of_rest) = differentiate(h, outputs, bias, t, w)
            return jax.tree.map(jnp.add, total, (nats, *of_rest)), of_hidden

        def nothing(total: Any) -> tuple[Any, jax.Array]:
            return total, jnp.zeros_like(h)

        result: tuple[Any, jax.Array] = jax.lax.cond((w != 0).any(), add, nothing, total)
        return result

    zero = (jnp.zeros(()), *jax.tree.map(jnp.zeros_like, (outputs, bias)))
    (nats, of_outputs, of_bias), of_hidden = jax.lax.scan(step, zero, (hidden, targets, weights))
    return nats, (of_hidden, of_outputs, of_bias)


@jax.custom_vjp
def _total(
    hidden: jax.Array, outputs: jax.Array, bias: jax.Array | None, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    return _value_and_gradients(hidden, outputs, bias, targets, weights)[0]


def _backward(gradients: Gradients, cotangent: jax.Array) -> tuple[Any, ...]:
    return (*jax.tree.map(lambda g: g * cotangent, gradients), None, None)


_total.defvjp(_value_and_gradients, _backward)
