# SPDX-License-Identifier: Apache-2.0
"""The softmax over a whole vocabulary as a loss, without holding the scores of all positions at once.

Scores [B, N, V] take most of the time and memory of a small recommender's training, and many positions of a batch have
no target. So positions are sorted, those with a target first, and computed CHUNK at a time; chunks without a target are
skipped. The loss is a sum, so its gradient is known up to one factor before the backward pass begins: each chunk
computes it together with its value, while its scores are in the cache, and only the gradient is kept.

Letters: B batch, N positions of a row, V vocabulary, D hidden, G groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.models import repeats as of_history
from jgr.ops.dispatch import target_platform

CHUNK = 512
"""Positions whose scores are held at once, in all groups together: so many stay in a CPU's cache."""
GPU_CHUNK = 8192
"""The same on a GPU, where a loop's turn costs more than memory does."""


class Repeats(NamedTuple):
    """Weights of the history's items by their age, see `jgr.models.repeats`: weights [K], window [B, N] each."""

    weights: jax.Array
    window: of_history.Window


class _Chunk(NamedTuple):
    """What is known of each position, sorted and cut: [chunks, G, positions], or of one chunk.

    at: its number in its group's part of the batch, row by row; None where nobody asks.
    """

    targets: jax.Array
    weights: jax.Array
    at: jax.Array | None


class _Shared(NamedTuple):
    """What all positions learn together: outputs [V, D], bias [V] and weights of repeats [K], or None."""

    outputs: jax.Array
    bias: jax.Array | None
    repeats: jax.Array | None


def softmax_nats(
    hidden: jax.Array,
    outputs: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    repeats: Repeats | None = None,
    groups: int = 1,
) -> jax.Array:
    """The sum over all positions of weight * (logsumexp(scores) - score of the target), [] float32.

    hidden: [B, N, D] float32; a position's scores are hidden @ outputs.T + bias. outputs: [V, D]. bias: [V]. targets:
    [B, N] int32 below V. weights: [B, N] bool or float32, without gradient. repeats: what is added to the
    scores of the items that stand in a row at the position or before it. groups: into how many equal parts the batch is
    divided for sorting; if it is spread over devices, their number.
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
    at = window = None
    if repeats is not None:
        # Each chunk makes what is added from its rows of the window: for all positions it would be [B, N, N].
        rows, length = hidden.shape[0] // groups, hidden.shape[1]
        at = listed(jnp.tile(jnp.arange(rows * length), groups).reshape(hidden.shape[:2]))
        window = of_history.Window(*(x.reshape(groups, rows, length) for x in repeats.window))
    shared = _Shared(outputs, bias, None if repeats is None else repeats.weights)
    return _total(listed(hidden), shared, _Chunk(listed(targets), listed(weights), at), window)


def _of_chunk(
    hidden: jax.Array, shared: _Shared, chunk: _Chunk, window: of_history.Window | None
) -> jax.Array:
    scores = hidden @ shared.outputs.T
    scores = scores if shared.bias is None else scores + shared.bias
    if window is not None and chunk.at is not None and shared.repeats is not None:
        row, place = jnp.divmod(chunk.at, window.rows.shape[-1])
        own = of_history.Window(*(jnp.take_along_axis(x, row[..., None], 1) for x in window))
        scores = of_history.add_to_all(scores, shared.repeats, own, place)
    taken = jnp.take_along_axis(scores, chunk.targets[..., None], axis=-1)[..., 0]
    return (chunk.weights * (jax.nn.logsumexp(scores, axis=-1) - taken)).sum()


Gradients = tuple[jax.Array, _Shared]
"""Gradients with respect to the sorted hidden states [chunks, G, positions, D], and to what is shared."""


def _value_and_gradients(
    hidden: jax.Array, shared: _Shared, chunks: _Chunk, window: of_history.Window | None
) -> tuple[jax.Array, Gradients]:
    differentiate = jax.value_and_grad(_of_chunk, (0, 1))

    def step(total: Any, chunk: tuple[jax.Array, _Chunk]) -> tuple[Any, jax.Array]:
        h, rest = chunk

        def add(total: Any) -> tuple[Any, jax.Array]:
            nats, (of_hidden, of_shared) = differentiate(h, shared, rest, window)
            return jax.tree.map(jnp.add, total, (nats, of_shared)), of_hidden

        def nothing(total: Any) -> tuple[Any, jax.Array]:
            return total, jnp.zeros_like(h)

        result: tuple[Any, jax.Array] = jax.lax.cond((rest.weights != 0).any(), add, nothing, total)
        return result

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, shared))
    (nats, of_shared), of_hidden = jax.lax.scan(step, zero, (hidden, chunks))
    return nats, (of_hidden, of_shared)


@jax.custom_vjp
def _total(hidden: jax.Array, shared: _Shared, chunks: _Chunk, window: of_history.Window | None) -> jax.Array:
    return _value_and_gradients(hidden, shared, chunks, window)[0]


def _backward(gradients: Gradients, cotangent: jax.Array) -> tuple[Any, ...]:
    return (*jax.tree.map(lambda g: g * cotangent, gradients), None, None)


_total.defvjp(_value_and_gradients, _backward)
