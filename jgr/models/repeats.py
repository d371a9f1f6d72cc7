# SPDX-License-Identifier: Apache-2.0
"""A learnt weight for items of the history, by how long ago they stand there: train.repeats.

    score(user, c) += GAIN * weights[bucket(a)]      a: how many events of the window came after c's latest one

and nothing for a c that is not in the window. A retriever finds the items that are like a history, and its own items
are the most alike: so it ranks first what was taken already, whether people take such things again or not. With a
weight for each age it learns which of the two they do, and how long after. RepeatNet (Ren et al., 2019) has a network
of its own that first decides whether to repeat; here it is a bias, learnt by the loss that there is, with everything
else.

Buckets of ages are two to an octave: 0, 1, 2, 3 to 4, 5 to 6, 7 to 10, 11 to 14, 15 to 22, and so on.

Letters: B batch, T places of a window, n items of the catalog, m candidates, K buckets.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.models.params import Spec

GAIN = 4.0
"""A score is a product of vectors, and moves by many numbers at once while a weight is one: with this the optimizer's
steps move both about as far."""

Int32 = npt.NDArray[np.int32]


class Window(NamedTuple):
    """Histories, and until when each event is the latest of its item.

    rows: [B, T] int32, -1 on the right. until: [B, T] int32, the place of the same item's next event, T where there is
    none.
    """

    rows: jax.Array
    until: jax.Array


def buckets(places: int) -> Int32:
    """The bucket of each age, [places] int32 from 0."""
    x = np.arange(1, places + 1)
    octave = np.frexp(x)[1] - 1  # exact, unlike a logarithm
    half = x >> np.maximum(octave - 1, 0) & 1
    return np.where(octave == 0, 0, 2 * octave + half - 1).astype(np.int32)


def spec(max_items: int) -> Spec:
    """The declaration of the weights [K] of windows with max_items places."""
    return Spec((int(buckets(max_items)[-1]) + 1,), ("bucket",), "zeros")


def window(rows: jax.Array) -> Window:
    """The window of histories [B, T]."""
    places = jnp.arange(rows.shape[1], dtype=jnp.int32)
    again = (rows[:, :, None] == rows[:, None, :]) & (places[:, None] < places)
    return Window(rows, jnp.where(again, places, rows.shape[1]).min(axis=2))


def latest(window: Window, place: jax.Array) -> jax.Array:
    """Whether each event of a window is its item's latest one as seen from a place, [..., T] bool.

    window: [..., T] each. place: [...] int32, the newest event that is seen.
    """
    places = jnp.arange(window.rows.shape[-1], dtype=jnp.int32)
    seen = places <= place[..., None]
    return seen & (place[..., None] < window.until) & (window.rows >= 0)


def by_event(weights: jax.Array, window: Window, place: jax.Array) -> jax.Array:
    """What each event adds to the score of its item, [..., T] float32: 0 for all but the latest ones, see `latest`."""
    places = jnp.arange(window.rows.shape[-1], dtype=jnp.int32)
    of_age = GAIN * weights[buckets(window.rows.shape[-1])]
    ages = jnp.maximum(place[..., None] - places, 0)
    return jnp.where(latest(window, place), of_age[ages], 0.0)


def add_to_all(scores: jax.Array, weights: jax.Array, window: Window, place: jax.Array) -> jax.Array:
    """Scores of all items with what the window adds to them, [..., n]: T numbers are added for each place, at most.

    scores: [..., n]. window: [..., T] each. place: [...] int32, see `latest`.
    """
    added = by_event(weights, window, place)
    flat, items = scores.reshape(-1, scores.shape[-1]), window.rows.reshape(-1, window.rows.shape[-1])
    at = jnp.where(latest(window, place).reshape(items.shape), items, scores.shape[-1])
    owners = jnp.arange(len(flat))[:, None]
    return flat.at[owners, at].add(added.reshape(at.shape), mode="drop").reshape(scores.shape)


def of_drawn(weights: jax.Array, window: Window, drawn: jax.Array) -> jax.Array:
    """What is added to the scores of drawn items at every place, [B, T, M]. drawn: [M] int32."""
    found: jax.Array = _everywhere(weights, window) @ (window.rows[..., None] == drawn).astype(jnp.float32)
    return found


def of_targets(weights: jax.Array, window: Window, targets: jax.Array) -> jax.Array:
    """What is added to the score of each place's target, [B, T]. targets: [B, T] int32."""
    same = targets[..., None] == window.rows[:, None, :]
    return jnp.where(same, _everywhere(weights, window), 0.0).sum(axis=-1)


def _everywhere(weights: jax.Array, window: Window) -> jax.Array:
    """`by_event` as seen from every place, [B, T, T]."""
    places = jnp.arange(window.rows.shape[1], dtype=jnp.int32)[None]
    seen = Window(window.rows[:, None], window.until[:, None])
    return by_event(weights, seen, jnp.broadcast_to(places, window.rows.shape))


def of_candidates(weights: jax.Array, ages: jax.Array) -> jax.Array:
    """What is added to the scores of candidates, from their buckets as `buckets_of` gives them; the same shape."""
    return jnp.where(ages >= 0, GAIN * weights[jnp.maximum(ages, 0)], 0.0)


def buckets_of(history: Int32, candidates: Int32) -> Int32:
    """The bucket of each candidate's age, [m] int32, -1 for one that is not in the history.

    history: [T] int32 rows, oldest first, -1 on the right. candidates: [m] int32 rows. Takes m log T steps: no more
    memory than the candidates, whatever the catalog holds.
    """
    newest_first = history[history >= 0][::-1]
    if not len(newest_first):
        return np.full(len(candidates), -1, np.int32)
    items, ages = np.unique(newest_first, return_index=True)
    at = np.minimum(np.searchsorted(items, candidates), len(items) - 1)
    of_item = buckets(len(newest_first))[ages]
    return np.where(items[at] == candidates, of_item[at], -1).astype(np.int32)
