# SPDX-License-Identifier: Apache-2.0
"""The requests of an ablation: the same for every variant, drawn once.

Users come back and items repeat, as Zipf's law has it: the n-th most frequent user comes 1 / n as often as the first,
and so do candidates. Without that no cache would have anything to do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jgr.ablation.system import System
from jgr.config import UserError
from jgr.data.datasets import Dataset

ZIPF = 1.0
TOP_K = 10
FIRST_EVENTS = 4
"""A user who grows had so many events, or all, at the first visits."""


@dataclass(frozen=True)
class Request:
    """A request to rank, or to recommend. history: item ids, oldest first. candidates: item ids; empty: recommend
    top_k items."""

    user: str
    history: list[str]
    candidates: list[str] = field(default_factory=list)
    times: list[int] | None = None
    top_k: int = TOP_K

    def more(self) -> dict[str, Any]:
        """The fields beside the history."""
        fields: dict[str, Any] = {"user_id": self.user}
        if self.candidates:
            fields["candidates"] = self.candidates
        else:
            fields["top_k"] = self.top_k
        if self.times is not None:
            fields |= {"history_times": self.times, "time": self.times[-1] + 60}
        return fields


@dataclass(frozen=True)
class Amount:
    """How much is asked. requests: of each variant. users: how many may come. candidates: of a request to rank; (least,
    most), each number between as likely. longest: items of a history. top_k: items of a recommendation."""

    requests: int
    users: int
    candidates: tuple[int, int]
    longest: int = 4096
    top_k: int = TOP_K


def draw(
    system: System, dataset: Dataset, amount: Amount, timed: bool = False, seed: int = 0
) -> list[Request]:
    """The requests, of the users of the dataset's test split. timed: whether the model reads times.

    Raises UserError where the dataset has no such users, or no times that the model needs.
    """
    examples, ids = dataset.interactions.test, dataset.catalog.item_ids
    if not len(examples):
        raise UserError("the dataset has no test examples to make requests of")
    if timed and examples.histories.times is None:
        raise UserError("the model reads times, which the dataset does not have: name one with --data")
    least, most = amount.candidates
    if most > len(ids):
        raise UserError(f"--candidates: {most} of a catalog of {len(ids)} items")
    rng = np.random.default_rng(seed)
    users = rng.permutation(len(examples))[: amount.users]
    items = rng.permutation(len(ids))
    names = dataset.interactions.user_ids
    found = []
    visits = users[_zipf(rng, len(users), amount.requests)].tolist()
    left = Counter(visits)
    for at in visits:
        left[at] -= 1
        whole = examples.histories[at][-amount.longest :]
        count = max(len(whole) - left[at] * system.grows, min(len(whole), FIRST_EVENTS))
        history = whole[:count]
        candidates: list[str] = []
        if system.kind == "rank":
            rows = _distinct(rng, items, int(rng.integers(least, most + 1)))
            candidates = [ids[row] for row in rows]
        times = examples.histories.times_of(at)[-amount.longest :][:count].tolist() if timed else None
        name, items_of = names[int(examples.users[at])], [ids[row] for row in history]
        found.append(Request(name, items_of, candidates, times, min(amount.top_k, len(ids))))
    return found


def waves(requests: Sequence[Request], rounds: int, concurrency: int) -> list[list[list[Request]]]:
    """The requests in rounds, each of waves of at most so many that are asked together; rounds of about one size."""
    parts = [requests[at : at + concurrency] for at in range(0, len(requests), concurrency)]
    ends = [round(len(parts) * number / rounds) for number in range(rounds + 1)]
    return [
        [list(wave) for wave in parts[start:end]] for start, end in itertools.pairwise(ends) if end > start
    ]


def _zipf(rng: np.random.Generator, n: int, count: int) -> Any:
    """[count] numbers below n, small ones more often."""
    weight = 1.0 / np.arange(1, n + 1) ** ZIPF
    return np.searchsorted(np.cumsum(weight / weight.sum()), rng.random(count)).clip(max=n - 1)


def _distinct(rng: np.random.Generator, items: Any, count: int) -> list[int]:
    """So many different rows, frequent ones more likely."""
    weight = 1.0 / np.arange(1, len(items) + 1) ** ZIPF
    found: list[int] = rng.choice(items, count, replace=False, p=weight / weight.sum()).tolist()
    return found
