# SPDX-License-Identifier: Apache-2.0
"""Statistics of a trace's first requests, which a reader needs to judge a claim about a cache."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np

from jgr.data.interactions import DataError
from jgr.traffic.candidates import top_count
from jgr.traffic.workloads import HOUR, SECOND, Trace

RETURNS = (60, 600, 3600)  # seconds


def report(trace: Trace, requests: int) -> dict[str, Any]:
    """Statistics of the first `requests` requests, or of all if there are fewer, as plain data.

    top10_share: share of the candidates that are among the 10 % of all items that these requests accessed most; with
    few accesses per item it is above the workload's. mean_user_tokens, mean_item_tokens: means over requests and over
    candidates. repeats: share of the requests by users seen before. returns: share of the requests whose user came at
    most so many seconds before. once_an_hour: share of an hour's users that came once in it, over all whole hours; None
    if there is no whole hour. user_longer: share of the requests with more user tokens than item tokens.
    """
    accesses = np.zeros(len(trace.item_tokens), np.int64)
    last: dict[int, int] = {}
    returned: Counter[int] = Counter()
    hours = _Hours()
    user_tokens = item_tokens = longer = count = end = 0
    for access in islice(trace.accesses(), requests):
        count += 1
        accesses[access.items] += 1
        of_items = int(trace.item_tokens[access.items].sum())
        user_tokens, item_tokens = user_tokens + access.user_tokens, item_tokens + of_items
        longer += access.user_tokens > of_items
        if access.user in last:
            gap = access.time_ns - last[access.user]
            returned.update(seconds for seconds in RETURNS if gap <= seconds * SECOND)
        end = last[access.user] = access.time_ns
        hours.add(access.time_ns // (HOUR * SECOND), access.user)
    if not count:
        raise DataError(f"{trace.name}: has no requests to report on")
    top = np.sort(accesses)[-top_count(len(accesses)) :].sum()
    return {
        "name": trace.name,
        "requests": count,
        "users": len(last),
        "hours": end / (HOUR * SECOND),
        "top10_share": float(top / accesses.sum()),
        "mean_user_tokens": user_tokens / count,
        "mean_item_tokens": item_tokens / int(accesses.sum()),
        "repeats": 1 - len(last) / count,
        "returns": {f"{seconds}s": returned[seconds] / count for seconds in RETURNS},
        "once_an_hour": hours.once(),
        "user_longer": longer / count,
        "parameters": trace.parameters,
    }


class _Hours:
    """Counts how often users came in each hour. The last hour is not counted, since it may be cut short."""

    def __init__(self) -> None:
        self._hour, self._now = 0, Counter[int]()
        self._users = self._singles = 0

    def add(self, hour: int, user: int) -> None:
        if hour != self._hour:
            self._users += len(self._now)
            self._singles += sum(times == 1 for times in self._now.values())
            self._hour, self._now = hour, Counter()
        self._now[user] += 1

    def once(self) -> float | None:
        return self._singles / self._users if self._users else None
