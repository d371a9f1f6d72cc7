# SPDX-License-Identifier: Apache-2.0
"""The softmax over a whole vocabulary as a loss, without the scores of all places at once.

Scores [B, N, V] are most of what a small recommender's training computes and holds, and many places of a batch have no
target. So places are sorted, those with a target first, and taken CHUNK at a time; a chunk without any is not computed.
The loss is a sum, whose gradient is known up to one factor before the backward pass begins: each chunk gives it along
with the value, while its scores are in the cache, and nothing is kept for later but the gradient.

Letters: B batch, N places of a row, V vocabulary, D hidden, G groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 512
"""Places whose scores are held at once, of all groups together."""


def softmax_nats(
    hidden: jax.Array,
    outputs: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    groups: int = 1,
) -> jax.Array:
    """The sum over all places of weight * (logsumexp(scores) - score of the target), [] float32.

    hidden: [B, N, D] float32; a place's scores are hidden @ outputs.T + bias. outputs: [V, D]. bias: [V]. targets,
    weights: [B, N] int32 below V and bool or float32; weights have no gradient. groups: places are sorted within each
    of so many equal parts of the batch: where it is spread over devices, their number.
    """

    def listed(x: jax.Array) -> jax.Array:
        """[B, N, ..] -> [chunks, G, places, ..], padded with 0."""
        x = x.reshape(groups, -1, *x.shape[2:])
        order = first.reshape(first.shape + (1,) * (x.ndim - 2))
        short = -x.shape[1] % places
        x = jnp.pad(jnp.take_along_axis(x, order, 1), [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(groups, -1, places, *x.shape[2:]), 1, 0)

    places = max(1, CHUNK // groups)
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
"""Of the listed hidden states [chunks, G, places, D], of outputs and of bias."""


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
