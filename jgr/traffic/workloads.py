# SPDX-License-Identifier: Apache-2.0
"""Ranking traffic as BAT (ASPLOS '26) describes it: which user comes when, with how many tokens, for which candidates.

The one idea: all laws are per user and per item, so a workload *scaled* by a factor has that many times fewer users,
items and requests per second. The rest stays: token counts, skew, how often a user comes back, and the share of the
other users that come in between. A cache scaled by the same factor sees the same traffic.

From the paper: users, items and mean tokens of Games, Beauty, Books and Industry; 100 candidates; the longest prompt
near 8K tokens; 90 % of the item accesses on the top 10 % of the items; users drawn with replacement by how often they
came, at random intervals; more active users have longer histories; 36 % of Industry's users have fewer than 1000
tokens; over 70 % of the requests on Books have more user tokens than item tokens; over 55 % of the users come at most
once an hour; a naive user cache (LRU) reuses 18 % of Industry's tokens, in memory that holds .19 % of the users'
(4 x 200 GB of 430 TB).

Inferred, to give these figures:
- Popularity is a Zipf law; its exponent is solved so that the *accesses*, distinct in a request, have the share
  (`parameters`). The paper shows this skew for its own trace only; all four have it here by default. Real public
  traces have 40 to 60 %: `replace(GAMES, top10_share=0.5)`. A row is an item's rank in popularity.
- An item has 1 to 2m - 1 tokens, binomial around the mean m. Lengths and popularity are independent.
- User tokens are lognormal, clipped; the spread .61 is the one at which a mean of 1500 leaves 36 % below 1000. The
  mean is over the users, so that the mean over the requests is larger.
- How often a user comes is lognormal with spread .9 (Amazon's 5-core sets have .90 and .95 above their minimum,
  KuaiRand .94) and correlates with the tokens by .82, at which Books has its 70 %.
- A user's visits are a Poisson process. On Industry a visit has 1.4 requests in the mean, geometric, 30 s apart in
  the mean: without them hardly anyone returns while they are cached, and the paper's 18 % cannot be.
  A visit in the other three is one request.
- Requests per user and hour: .8 on Games, whose users the paper calls frequent, .5 on Beauty and Books, .05 on
  Industry. More would break the 55 %, counted here among the users that came in that hour.
- Off by default: with probability `growth` a user who returns has `growth_tokens` more, until the history is full.

Memory: 20 bytes for each user, 24 for each item, and one block of requests, however many are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import DataError
from jgr.traffic.candidates import CandidateDraw, solve_exponent, zipf

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

SECOND = 1_000_000_000
HOUR = 3600
VISIT_GAP = 30.0  # mean seconds between two requests of a visit
_VISITS = 512  # visits in a block of the stream
_SAMPLE = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One ranking request.

    time_ns: time since the trace began; never falls. user: 0 to users - 1. user_tokens: length of the history now.
    items: [c] int32 rows of the candidates, distinct.
    """

    time_ns: int
    user: int
    user_tokens: int
    items: Int32


class Trace(Protocol):
    """Traffic that can be streamed from its beginning any number of times, always the same."""

    @property
    def name(self) -> str: ...
    @property
    def item_tokens(self) -> Int32:
        """The number of tokens of each item, [n]."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The trace's parameters, solved or expected, as plain data."""

    def accesses(self, speed: float = 1.0) -> Iterator[Access]:
        """Yield the requests in order of time. speed: time runs this many times as fast; nothing else changes."""


@dataclass(frozen=True)
class Workload:
    """The laws of a workload; see the file's docstring. Raises DataError, naming the field that is out of range.

    user_tokens, item_tokens: means. hourly: requests per user and hour. visit: mean requests of a visit.
    max_prompt: user tokens are at most this minus the mean tokens of all candidates.
    """

    name: str
    users: int
    items: int
    user_tokens: float
    item_tokens: int
    hourly: float
    visit: float = 1.0
    candidates: int = 100
    top10_share: float = 0.9
    token_spread: float = 0.61
    activity_spread: float = 0.9
    correlation: float = 0.82
    max_prompt: int = 8192
    growth: float = 0.0
    growth_tokens: int = 0

    def __post_init__(self) -> None:
        for field, valid in [
            ("users", self.users >= 1),
            ("items", self.items >= self.candidates),
            ("candidates", self.candidates >= 1),
            ("item_tokens", self.item_tokens >= 1),
            ("user_tokens", 1 <= self.user_tokens < self.max_user_tokens),
            ("hourly", 0 < self.hourly < math.inf),
            ("visit", 1 <= self.visit < math.inf),
            ("top10_share", 0 < self.top10_share < 1),
            ("token_spread", 0 <= self.token_spread <= 3),
            ("activity_spread", 0 <= self.activity_spread <= 3),
            ("correlation", -1 <= self.correlation <= 1),
            ("growth", 0 <= self.growth <= 1),
            ("growth_tokens", self.growth_tokens >= 0),
        ]:
            if not valid:
                raise DataError(f"workload {self.name}: {field}={getattr(self, field)} is out of range")

    @property
    def max_user_tokens(self) -> int:
        return self.max_prompt - self.candidates * self.item_tokens

    @property
    def max_item_tokens(self) -> int:
        """The most tokens that an item can have: an `item_span` of this size cuts none."""
        return 2 * self.item_tokens - 1

    @property
    def rate(self) -> float:
        """Requests per second of the trace's time."""
        return self.users * self.hourly / HOUR

    def scaled(self, factor: float) -> Workload:
        """The same workload with `factor` times fewer users and items.

        Raises DataError if too few items are left for the skew: `items` must be well above 10 x top10_share x
        candidates.
        """
        if not 1 <= factor < math.inf:
            raise DataError(f"workload {self.name}: cannot be scaled by {factor}, only by 1 or more")
        users, items = max(1, round(self.users / factor)), round(self.items / factor)
        smaller = replace(self, name=f"{self.name}/{factor:g}", users=users, items=items)
        solve_exponent(items, self.candidates, self.top10_share)
        return smaller


def industry(items: int = 1_000_000, users: int = 10_000_000) -> Workload:
    """Industry-X: a synthetic workload like the paper's production trace, with X items."""
    name = "industry" if items == 1_000_000 else f"industry-{items}"
    return Workload(name, users, items, 1500, 10, hourly=0.05, visit=1.4)


def books(items: int = 280_000, users: int = 510_000) -> Workload:
    """Books-X: the paper's Books workload with X items."""
    name = "books" if items == 280_000 else f"books-{items}"
    return Workload(name, users, items, 1586, 15, hourly=0.5)


GAMES = Workload("games", 15_000, 8_000, 1245, 11, hourly=0.8)
BEAUTY = Workload("beauty", 22_000, 12_000, 2043, 18, hourly=0.5)
BOOKS = books()
INDUSTRY = industry()
WORKLOADS = {workload.name: workload for workload in (GAMES, BEAUTY, BOOKS, INDUSTRY)}


class Traffic:
    """The users and items of a workload, drawn once; `accesses` streams its requests.

    user_tokens: [users] int32, when the trace begins. item_tokens: [items] int32. Equal seeds give equal traffic.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self.workload, self._seed = workload, seed
        users, items = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
        length = users.standard_normal(workload.users)
        self.user_tokens = _user_tokens(workload, length)
        length *= workload.correlation
        length += math.sqrt(1 - workload.correlation**2) * users.standard_normal(workload.users)
        self._visitors = np.cumsum(np.exp(workload.activity_spread * length))
        trials = 2 * (workload.item_tokens - 1)
        self.item_tokens: Int32 = (1 + items.binomial(trials, 0.5, workload.items)).astype(np.int32)
        self.exponent = solve_exponent(workload.items, workload.candidates, workload.top10_share)
        self._candidates = CandidateDraw(zipf(workload.items, self.exponent), workload.candidates)

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def parameters(self) -> dict[str, Any]:
        """The solved exponent, the share of accesses expected from it, and figures over all users and items."""
        return {
            "zipf_exponent": self.exponent,
            "expected_top10_share": self._candidates.share(),
            "mean_user_tokens": float(self.user_tokens.mean()),
            "users_below_1000_tokens": float((self.user_tokens < 1000).mean()),
            "mean_item_tokens": float(self.item_tokens.mean()),
            "requests_per_second": self.workload.rate,
        }

    def accesses(self, speed: float = 1.0) -> Iterator[Access]:
        """Yield requests without end, in order of time; see Trace."""
        workload = self.workload
        rng, growing = np.random.default_rng((self._seed, 3)), np.random.default_rng((self._seed, 4))
        grows = workload.growth > 0 and workload.growth_tokens > 0
        tokens = self.user_tokens.copy() if grows else self.user_tokens
        came = np.zeros(workload.users if grows else 0, bool)
        for seconds, users in self._arrivals():
            items = self._candidates.draw(len(users), rng)
            times = (seconds * (SECOND / speed)).astype(np.int64).tolist()
            more = growing.random(len(users)) < workload.growth
            for at, (time_ns, user) in enumerate(zip(times, users.tolist(), strict=True)):
                if grows:
                    if more[at] and came[user]:
                        tokens[user] = min(tokens[user] + workload.growth_tokens, workload.max_user_tokens)
                    came[user] = True
                yield Access(time_ns, user, int(tokens[user]), items[at])

    def _arrivals(self) -> Iterator[tuple[Float64, Int64]]:
        """Yield blocks of times in seconds, ascending, with their users.

        A block holds the visits that begin in it; requests that come after its end go to the next block.
        """
        rng, workload, now = np.random.default_rng((self._seed, 2)), self.workload, 0.0
        times, users = np.zeros(0), np.zeros(0, np.int64)
        while True:
            begins = now + np.cumsum(rng.exponential(workload.visit / workload.rate, _VISITS))
            now = float(begins[-1])
            drawn = rng.random(_VISITS) * self._visitors[-1]
            visitors = np.searchsorted(self._visitors, drawn, side="right")
            sizes = rng.geometric(1 / workload.visit, _VISITS)
            waits = np.cumsum(np.where(_firsts(sizes), 0.0, rng.exponential(VISIT_GAP, sizes.sum())))
            waits -= np.repeat(waits[np.cumsum(sizes) - sizes], sizes)
            times = np.append(times, np.repeat(begins, sizes) + waits)
            users = np.append(users, np.repeat(visitors, sizes))
            order = np.argsort(times, kind="stable")
            times, users = times[order], users[order]
            done = int(np.searchsorted(times, now, side="right"))
            yield times[:done], users[:done]
            times, users = times[done:], users[done:]


def _firsts(sizes: Int64) -> npt.NDArray[np.bool_]:
    """True at the first element of each run, [sum of sizes]. sizes: the lengths of the runs."""
    first = np.zeros(sizes.sum(), bool)
    first[np.cumsum(sizes) - sizes] = True
    return first


def _user_tokens(workload: Workload, normal: Float64) -> Int32:
    """Lognormal history lengths, [users], with the workload's mean although the longest are clipped."""
    sample = workload.token_spread * normal[:_SAMPLE]
    low, high = -10.0, math.log(workload.max_user_tokens)
    while high - low > 1e-6:
        middle = (low + high) / 2
        mean = np.exp(middle + sample).clip(1, workload.max_user_tokens).mean()
        low, high = (middle, high) if mean < workload.user_tokens else (low, middle)
    lengths = np.exp(low + workload.token_spread * normal)
    return lengths.round().clip(1, workload.max_user_tokens).astype(np.int32)
