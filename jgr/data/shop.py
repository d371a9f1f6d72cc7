# SPDX-License-Identifier: Apache-2.0
"""A synthetic shop: the demo's data, with a known best possible predictor.

The one idea: people buy along directed paths (a phone, then a case, then a charger; never the other way
round), so the order of a history matters. Since the process is known, so is the best quality that a model can reach.

How a user buys, until the length of the sequence is reached:
- the first item is *browsed*; then with probability FOLLOW the next item is one of the four follow-ups of the
  last one (weights FOLLOW_WEIGHTS), otherwise it is browsed;
- browsing takes the last item's category with probability STAY, else one of the user's three favourite
  categories (weights TASTE_WEIGHTS), and in it an item by popularity (Zipf, exponent ZIPF);
- nobody buys an item twice: such a draw is drawn again.

Three follow-ups of an item are in the next product line, the first in the same colour if there is one; the fourth
is in the third line after it. After a category's last line comes the next category's first.

`Process.probabilities` gives the exact next-item probabilities to one who also knows the user's favourites;
ranking by them is the *oracle*, whose hit rate no predictor exceeds in expectation. At the default size it is
HR@10 = .67.

Semantic ids have three levels: category, line within the category (codes spread over 24 values), colour. No
two items share one.

Letters: n items, u users, b histories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.data.interactions import DataError, Examples, Ragged
from jgr.data.shop_words import CATEGORIES, COLOURS, NAMES

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]

FOLLOW = 0.5
FOLLOW_WEIGHTS = np.array([0.4, 0.25, 0.2, 0.15])
STAY = 0.4
TASTE_WEIGHTS = np.array([0.6, 0.3, 0.1])
ZIPF = 1.0
LINES_PER_CATEGORY = 6
LINE_CODES = 24
LENGTH_MIN, LENGTH_MEAN, LENGTH_MAX = 5, 12, 40
_BATCH = 1024


@dataclass(frozen=True, eq=False)
class Process:
    """The random process by which users buy.

    follow_ups: [n, 4] int32 rows, likeliest first, distinct. category: [n] int32, ascending. popularity: [n] float64,
    adds up to 1 in each category. favourites: [u, 3] int32, each user's favourite categories, the dearest first.
    """

    follow_ups: Int32
    category: Int32
    popularity: Float64
    favourites: Int32

    def probabilities(self, users: Int32, histories: Ragged) -> Float64:
        """The exact probability of every next item: [b, n] float64. Bought items have 0; each row adds up to 1.

        users: [b] int32. histories: b sequences, each with at least one item.
        """
        last = histories.rows[histories.stops - 1]
        everyone = np.arange(len(users))
        by_category = np.zeros((len(users), int(self.category[-1]) + 1))
        for favourites, weight in zip(self.favourites[users].T, TASTE_WEIGHTS, strict=True):
            by_category[everyone, favourites] += (1 - STAY) * weight
        by_category[everyone, self.category[last]] += STAY
        found: Float64 = (1 - FOLLOW) * by_category[:, self.category] * self.popularity
        for follow_ups, weight in zip(self.follow_ups[last].T, FOLLOW_WEIGHTS, strict=True):
            found[everyone, follow_ups] += FOLLOW * weight
        bought, owner = histories.flatten()
        found[owner, bought] = 0.0
        found /= found.sum(axis=1, keepdims=True)
        return found

    def draw(self, users: Int32, last: Int32, rng: np.random.Generator) -> Int32:
        """Draw a next item for each user, [b] int32; it may be one that the user already has.

        users: [b] int32. last: [b] int32, the last item of each, -1 at the start.
        """
        u = rng.random((5, len(users)))
        taste = np.searchsorted(np.cumsum(TASTE_WEIGHTS), u[0] * TASTE_WEIGHTS.sum())
        category = self.favourites[users, np.minimum(taste, len(TASTE_WEIGHTS) - 1)]
        category = np.where((u[1] < STAY) & (last >= 0), self.category[last], category)
        # Rows are sorted by category, so one running sum of the popularity serves every category.
        bound = np.searchsorted(np.cumsum(self.popularity), category + u[2], side="right")
        browsed = np.minimum(bound, np.searchsorted(self.category, category, side="right") - 1)
        place = np.searchsorted(np.cumsum(FOLLOW_WEIGHTS), u[3] * FOLLOW_WEIGHTS.sum(), side="right")
        followed = self.follow_ups[last, np.minimum(place, len(FOLLOW_WEIGHTS) - 1)]
        chosen: Int32 = np.where((u[4] < FOLLOW) & (last >= 0), followed, browsed).astype(np.int32)
        return chosen


@dataclass(frozen=True, eq=False)
class Shop:
    """The items, the users and what they bought.

    catalog: its metadata holds title, category, line and price. names: [u], distinct.
    sequences: u int32 arrays of rows, oldest first. process: the random process that they were drawn from.
    """

    catalog: Catalog
    names: tuple[str, ...]
    sequences: list[Int32]
    process: Process

    def oracle_top_k(self, examples: Examples, k: int) -> Int32:
        """The k likeliest next items of each example, best first: [b, k] int32. `users` index `names`."""
        top = np.empty((len(examples), k), np.int32)
        for at in range(0, len(examples), _BATCH):
            batch = examples.select(slice(at, at + _BATCH))
            likely = self.process.probabilities(batch.users, batch.histories)
            top[at : at + _BATCH] = np.argsort(-likely, axis=1, kind="stable")[:, :k]
        return top


def make_shop(seed: int = 0, n_users: int = 6000, items_per_line: int = 21) -> Shop:
    """Make a shop of 16 categories with 6 lines of items_per_line (5 .. 24) items each, and n_users users.

    Equal seeds give equal shops.
    """
    if n_users < 1 or not 5 <= items_per_line <= len(COLOURS):
        raise DataError(f"shop: needs n_users >= 1 and 5 <= items_per_line <= {len(COLOURS)}")
    rng = np.random.default_rng(seed)
    catalog = _make_catalog(rng, items_per_line)
    process = _make_process(rng, catalog.codes[:, 2].reshape(-1, items_per_line), n_users)
    names = tuple(f"{NAMES[i % len(NAMES)]} {i // len(NAMES) + 1}".removesuffix(" 1") for i in range(n_users))
    return Shop(catalog, names, _make_sequences(rng, process, n_users), process)


def _lines() -> Iterator[tuple[int, str, list[str], str, int]]:
    """Yield (category number, category, its styles, line, usual price) of each line, in row order."""
    for number, (category, styles, lines) in enumerate(CATEGORIES):
        for line in lines.split(", "):
            noun, price = line.rsplit(" ", 1)
            yield number, category, styles.split(), noun, int(price)


def _make_catalog(rng: np.random.Generator, items_per_line: int) -> Catalog:
    symbols: list[list[str]] = []
    metadata: list[dict[str, Any]] = []
    line_codes = np.zeros(0, np.int64)
    for at, (number, category, styles, noun, usual) in enumerate(_lines()):
        if at % LINES_PER_CATEGORY == 0:
            line_codes = rng.permutation(LINE_CODES)
        colours = rng.permutation(len(COLOURS))[:items_per_line]
        looks = rng.integers(0, len(styles), items_per_line)
        prices = np.maximum(np.round(usual * (0.6 + 0.9 * rng.random(items_per_line))), 1) - 0.01
        for colour, look, price in zip(colours, looks, prices.tolist(), strict=True):
            title = f"{COLOURS[colour]} {styles[look]} {noun}"
            symbols.append([f"<a_{number}>", f"<b_{line_codes[at % LINES_PER_CATEGORY]}>", f"<c_{colour}>"])
            metadata.append({"title": title, "category": category, "line": noun, "price": round(price, 2)})
    return Catalog.build([f"S{row:04d}" for row in range(len(symbols))], symbols, metadata)


def _make_process(rng: np.random.Generator, colours: Int32, n_users: int) -> Process:
    """Draw the process. colours: [lines, items per line], the colour of each item, distinct in a line."""
    n_lines, size = colours.shape
    n_categories, per_category = n_lines // LINES_PER_CATEGORY, LINES_PER_CATEGORY * size
    zipf = 1.0 / np.arange(1, per_category + 1) ** ZIPF
    popularity = np.concatenate([rng.permutation(zipf / zipf.sum()) for _ in range(n_categories)])
    follow_ups = np.concatenate([_follow_ups(rng, colours, line) for line in range(n_lines)])
    # Gumbel top 3: draws categories without replacement, with odds that fall slowly down the list.
    odds = -0.5 * np.log(np.arange(1, n_categories + 1))
    keys = odds - np.log(-np.log(rng.random((n_users, n_categories))))
    favourites = np.argsort(-keys, axis=1)[:, :3].astype(np.int32)
    category = np.repeat(np.arange(n_categories, dtype=np.int32), per_category)
    return Process(follow_ups, category, popularity, favourites)


def _follow_ups(rng: np.random.Generator, colours: Int32, line: int) -> Int32:
    """The follow-ups of a line's items: [items, 4] rows."""
    n_lines, size = colours.shape
    onward, further = (line + 1) % n_lines, (line + 3) % n_lines
    places = np.stack([rng.permutation(size) for _ in range(4)], axis=1)
    same = colours[line][:, None] == colours[onward]
    places[:, 0] = np.where(same.any(axis=1), same.argmax(axis=1), places[:, 0])
    # The second and third follow-up move on within their line until the first three differ.
    for place in (1, 2):
        while (clash := (places[:, place, None] == places[:, :place]).any(axis=1)).any():
            places[clash, place] = (places[clash, place] + 1) % size
    places += np.array([onward, onward, onward, further]) * size
    return places.astype(np.int32)


def _make_sequences(rng: np.random.Generator, process: Process, n_users: int) -> list[Int32]:
    extra = -np.log1p(-rng.random(n_users)) * (LENGTH_MEAN - LENGTH_MIN)
    lengths = np.minimum(LENGTH_MIN + extra.astype(np.int64), LENGTH_MAX)
    rows = np.full((n_users, LENGTH_MAX), -1, np.int32)
    bought = np.zeros((n_users, len(process.category)), bool)
    for at in range(LENGTH_MAX):
        waiting = np.flatnonzero(lengths > at).astype(np.int32)
        while len(waiting):
            last = rows[waiting, at - 1] if at else np.full(len(waiting), -1, np.int32)
            drawn = process.draw(waiting, last, rng)
            fresh = ~bought[waiting, drawn]
            rows[waiting[fresh], at] = drawn[fresh]
            bought[waiting[fresh], drawn[fresh]] = True
            waiting = waiting[~fresh]
    return [sequence[:length] for sequence, length in zip(rows, lengths, strict=True)]
