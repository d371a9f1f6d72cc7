# SPDX-License-Identifier: Apache-2.0
"""The epoch model: what a split of the pool does to hit rates and latency, one epoch at a time (SIM-12 b).

The one idea: an epoch is a few fixed points. An LRU's hit rates follow from popularity and capacity alone (Che's
approximation), are approached as fast as the cache turns over, and are lost at once where it shrinks. A request's
service time follows from them, and the latency's tail from an M/G/1 queue of such requests. All are pure functions of
arrays, so `jax.vmap` runs thousands of pools together.

It is a model: its costs are analytic defaults for an A100-like device, or whatever the caller measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any
"""f32, on the host or on the device."""
QUANTILE = 0.99
LENGTHS = (0.54, 0.717, 0.862, 1.02, 1.229, 1.631)
"""Lengths of histories over their mean, in six equal parts of a lognormal law of sigma .4; their mean is 1."""
FULLEST = 0.97
"""The utilisation beyond which a queue is taken for one that grows through the epoch."""
_HALVINGS = 30


class Popularity(NamedTuple):
    """Things by how often they are asked for, in bins: things f32 [b], how many; mass f32 [b], share of the
    requests."""

    things: Array
    mass: Array


class World(NamedTuple):
    """A pool, what competes for it, and what misses cost. Scalars are f32 []; bytes, seconds and requests.

    hot, cold: the users (their masses sum to 1 each). rows: all embedding rows. pool: bytes. event_bytes: of a kept
    event. row_bytes: of an embedding row. tables: rows that an event reads. candidates, fresh: of a request. link,
    refill: bytes/s of the host's link for misses and for filling new pages. start_s, token_s, pair_s: a request, a
    computed token and a visible (query, key) pair. rate: requests/s. epoch_s. limit_s: the latency limit.
    """

    hot: Popularity
    cold: Popularity
    rows: Popularity
    pool: Array
    event_bytes: Array
    row_bytes: Array
    tables: Array
    candidates: Array
    fresh: Array
    link: Array
    refill: Array
    start_s: Array
    token_s: Array
    pair_s: Array
    rate: Array
    epoch_s: Array
    limit_s: Array


class Traffic(NamedTuple):
    """What differs from epoch to epoch, f32 [] or [epochs]: the hot users' share, the load, the mean history length."""

    hot_share: Array
    load: Array
    events: Array


class Hits(NamedTuple):
    """Hit rates: of hot users, of cold users, of embedding rows. f32 []."""

    hot: Array
    cold: Array
    rows: Array

    def users(self, hot_share: Array) -> Array:
        """The hit rate over all users."""
        return hot_share * self.hot + (1.0 - hot_share) * self.cold


class Latency(NamedTuple):
    """p99_s: the 99th percentile in s. late: share of the requests above the limit. busy: utilisation, may exceed 1."""

    p99_s: Array
    late: Array
    busy: Array


def characteristic_time(count: Array, mass: Array, capacity: Array) -> Array:
    """Che's time T of an LRU, in requests: sum over things of 1 - exp(-p T) = capacity.

    count, mass: f32 [b]. capacity: f32 [], in things; at or above all of them T is beyond any request. Returns f32 [].
    """
    each = mass / count

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        below = jnp.sum(-count * jnp.expm1(-each * jnp.exp(middle))) < capacity
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    # At T = capacity at most `capacity` things were asked for; at 40 / the rarest everything was.
    ends = (jnp.log(capacity), jnp.log(40.0 / jnp.min(each)))
    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, ends, unroll=6)
    return jnp.exp(0.5 * (low + high))


def steady_hits(world: World, traffic: Traffic, split: Array) -> Hits:
    """The hit rates that caches of this split reach in the end."""
    per_user = traffic.events * world.event_bytes
    hot_share = jnp.clip(traffic.hot_share, 1e-3, 1.0 - 1e-3)
    count = jnp.concatenate([world.hot.things, world.cold.things])
    mass = jnp.concatenate([world.hot.mass * hot_share, world.cold.mass * (1.0 - hot_share)])
    time = characteristic_time(count, mass, (1.0 - split) * world.pool / per_user)
    found = -jnp.expm1(-mass / count * time)
    cut = world.hot.things.shape[0]
    row_time = characteristic_time(world.rows.things, world.rows.mass, split * world.pool / world.row_bytes)
    each = world.rows.mass / world.rows.things
    return Hits(
        jnp.sum(world.hot.mass * found[:cut]),
        jnp.sum(world.cold.mass * found[cut:]),
        jnp.sum(-world.rows.mass * jnp.expm1(-each * row_time)),
    )


def service_s(world: World, events: Array, kept: Array | float, row_hits: Array) -> Array:
    """Seconds of one request whose history has so many events, of which a share `kept` needs no computing."""
    new = world.fresh + world.candidates + (1.0 - kept) * events
    reach = events + world.fresh
    pairs = new * reach - 0.5 * ((1.0 - kept) * events) ** 2
    missed = new * world.tables * world.row_bytes * (1.0 - row_hits)
    return world.start_s + world.token_s * new + world.pair_s * pairs + missed / world.link


def latency(world: World, traffic: Traffic, hits: Hits) -> Latency:
    """The latency of an epoch in which the hit rates are these: an M/G/1 queue of hits and misses of six lengths.

    The wait's tail is taken as exponential with the queue's mean (Pollaczek and Khinchine).
    """
    lengths = traffic.events * jnp.array(LENGTHS)
    kept = hits.users(traffic.hot_share)
    times = jnp.concatenate(
        [service_s(world, lengths, 1.0, hits.rows), service_s(world, lengths, 0.0, hits.rows)]
    )
    weights = jnp.concatenate([jnp.full(len(LENGTHS), kept), jnp.full(len(LENGTHS), 1.0 - kept)]) / len(
        LENGTHS
    )
    rate = world.rate * traffic.load
    busy = rate * jnp.sum(weights * times)
    used = jnp.minimum(busy, FULLEST)
    wait = rate * jnp.sum(weights * times**2) / (2.0 * (1.0 - used))
    wait = wait + jnp.maximum(0.0, busy - FULLEST) * world.epoch_s

    def above(limit: Array) -> Array:
        spare = limit - times
        return jnp.sum(
            weights * jnp.where(spare < 0, 1.0, used * jnp.exp(-used * jnp.maximum(spare, 0.0) / wait))
        )

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        over = above(middle) > 1.0 - QUANTILE
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    most = jnp.max(times) + wait / used * jnp.log(1.0 / (1.0 - QUANTILE))
    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros(()), most), unroll=6)
    return Latency(0.5 * (low + high), above(world.limit_s), busy)


def steady(world: World, traffic: Traffic, split: Array) -> Latency:
    """The latency of an epoch with caches that are warm at this split: what the oracle compares (HLEM-17)."""
    return latency(world, traffic, steady_hits(world, traffic, split))


def step(world: World, traffic: Traffic, hits: Hits, split: Array) -> tuple[Hits, Hits, Latency]:
    """One epoch at a split: (hits at its end, mean hits in it, latency). hits: those at its begin."""
    goal = steady_hits(world, traffic, split)
    rate = world.rate * traffic.load
    kept = hits.users(traffic.hot_share)
    per_user = traffic.events * world.event_bytes
    users_s = (1.0 - split) * world.pool / (rate * (1.0 - kept) * per_user + 1.0)
    read = world.fresh + world.candidates + (1.0 - kept) * traffic.events
    missed = rate * read * world.tables * world.row_bytes * (1.0 - hits.rows)
    rows_s = split * world.pool / (missed + world.refill)
    pairs = [
        _relaxed(now, then, turnover / world.epoch_s)
        for now, then, turnover in zip(hits, goal, (users_s, users_s, rows_s), strict=True)
    ]
    end, mean = (Hits(*parts) for parts in zip(*pairs, strict=True))
    return end, mean, latency(world, traffic, mean)


def _relaxed(now: Array, goal: Array, turnover: Array) -> tuple[Array, Array]:
    """(value at the end, mean) of an epoch: what is lost is lost at once, the rest comes with the turnover (epochs)."""
    begin = jnp.minimum(now, goal)
    left = jnp.exp(-1.0 / turnover)
    return goal + (begin - goal) * left, goal + (begin - goal) * turnover * (1.0 - left)
