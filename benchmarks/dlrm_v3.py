# SPDX-License-Identifier: Apache-2.0
"""Users, items and events as the generator of MLPerf's DLRMv3 set draws them, from its published description.

Items stand in 128 categories of equal size; a user has four of them. In each of 100 steps a user is active with
probability .7 and then has about a hundred new events. Which of the four an event is of follows a Polya urn, so that
interests narrow slowly; its item is drawn evenly from the part of the category that exists by then, (step + 1) / 100 of
it. So no item is popular beyond its age: what a cache of rows can gain here is little, unlike in the real logs.

A rating is the mean of an item's own (5 to 1) and of the user's level for the category, which drifts with the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.simulation.controller import workload
from jgr.simulation.controller.epochs import Popularity, Traffic, World

CATEGORIES, CHOSEN, STEPS = 128, 4, 100
ACTIVE = 0.7
EVENTS, SPREAD, LEAST = 100.0, 25.0, 33
"""New events of an active step: a normal law, and the fewest."""
URN = (1, 500)
RATINGS, RATED = (5.0, 4.0, 3.0, 2.0, 1.0), (0.2, 0.25, 0.25, 0.2, 0.1)
LEVELS = (4.5, 4.0, 3.0, 2.0)
ITEMS, USERS = 1_000_000_000, 5_000_000
"""Of the full set."""
TABLES = 2
"""Rows that an event reads: its item's and its category's."""
TRAINED = 90
"""Steps before those that are served."""
Int64 = npt.NDArray[np.int64]


class Events(NamedTuple):
    """All events in the order of their steps, [n] each: user, step, category and item int64; rating float64."""

    user: Int64
    step: Int64
    category: Int64
    item: Int64
    rating: npt.NDArray[np.float64]


def generate(
    users: int, items: int, seed: int = 0, steps: int = STEPS, scale: float = 1.0, base: int = 0
) -> Events:
    """The events of so many users. items: a multiple of CATEGORIES. scale: of the events of a step, 1 in the full set.
    base: the step before which everybody is active."""
    random = np.random.default_rng(seed)
    mine = np.argsort(random.random((users, CATEGORIES)), axis=1)[:, :CHOSEN]
    levels = random.permuted(np.tile(LEVELS, (users, 1)), axis=1)
    rated = random.choice(RATINGS, items, p=RATED)
    seen, size = np.zeros((users, CHOSEN)), items // CATEGORIES
    found: list[Events] = []
    for step in range(steps):
        active = (random.random(users) < ACTIVE) | (step == base - 1)
        counts = np.maximum(LEAST * scale, random.normal(EVENTS, SPREAD, users) * scale).round().astype(int)
        counts[~active] = 0
        alpha = random.integers(URN[0], URN[1] + 1, users).astype(float)
        drift = 0.5 * np.cos(step * np.pi / 4)
        for turn in range(int(counts.max(initial=0))):
            who = np.flatnonzero(counts > turn)
            total = seen[who].sum(1)
            weights = (alpha[who, None] / CHOSEN + seen[who]) / (alpha[who] + total)[:, None]
            which = (weights.cumsum(1) < random.random(len(who))[:, None]).sum(1).clip(0, CHOSEN - 1)
            seen[who, which] += 1
            category = mine[who, which]
            alive = max(1, size * (step + 1) // STEPS)
            item = category * size + random.integers(0, alive, len(who))
            rating = (rated[item] + levels[who, which] + drift) / 2
            found.append(Events(who, np.full(len(who), step), category, item, rating))
    return Events(*(np.concatenate(column) for column in zip(*found, strict=True)))


def row_popularity(events: Events, items: int, rows: int = ITEMS) -> Popularity:
    """How often rows are read when histories are, by the age of their items, stretched to so many items.

    Half of the reads are of categories, which are few. An item's place in its category says how old it is; counts of
    single items would show only that they were drawn by chance.
    """
    size, bins = items // CATEGORIES, 2 * workload.BINS - 1
    mass = np.bincount(events.item % size * bins // size, minlength=bins) / len(events.item)
    things = np.concatenate([[CATEGORIES], np.full(bins, rows / bins)])
    shares = np.concatenate([[1.0], np.maximum(mass, 1e-9)]) / TABLES
    return Popularity(things.astype(np.float32), (shares / shares.sum()).astype(np.float32))


def pool(random: np.random.Generator, epochs: int) -> tuple[World, Traffic]:
    """A pool that serves some of the users through the last steps, and its traffic: histories that only grow."""
    items = 1000 * CATEGORIES
    events = generate(1000, items, int(random.integers(1 << 31)), scale=1 / 16)
    served = events.step >= TRAINED
    requests = np.bincount(events.user[served], minlength=1000) + 1e-3
    users = workload.user_popularity(requests, int(random.integers(2_500, 4_000)))
    made = workload.sized(
        workload.world(users, row_popularity(events, items), tables=TABLES), random.uniform(0.6, 0.7), 0.9
    )
    ordered = np.sort(requests)[::-1]
    hot = float(ordered[: round(len(ordered) / 20)].sum() / ordered.sum())
    # Of the full set's lengths: 70 events a step in the mean, up to 7,000.
    course = np.linspace(TRAINED, STEPS, epochs) * ACTIVE * EVENTS
    columns = (np.full(epochs, hot), np.ones(epochs), course)
    return made, Traffic(*(np.asarray(column, np.float32) for column in columns))
