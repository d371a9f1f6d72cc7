# SPDX-License-Identifier: Apache-2.0
"""Rank requests of a workload's accesses: a workload says how many tokens a user has, this draws the items they are.

Each user's history is drawn once, item by item, until its tokens are as many as the workload says; a request sees as
many of its first items as the access has tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jgr.serving.api import RankRequest
from jgr.traffic.workloads import Access, Traffic

TOP_K = 10


class Histories:
    """The histories of a workload's users. Item ids are the items' rows as text."""

    def __init__(self, traffic: Traffic, seed: int = 0) -> None:
        self._traffic, self._seed = traffic, seed
        self._known: dict[int, list[str | int]] = {}

    def request(self, access: Access) -> RankRequest:
        """The access as a request for the best TOP_K of its candidates."""
        history = self._history(access.user)
        tokens = self._traffic.item_tokens[np.array(history, np.int64)]
        count = max(1, int(np.searchsorted(np.cumsum(tokens), access.user_tokens, "right")))
        return RankRequest(
            user_id=access.user,
            history=history[:count],
            candidates=[str(row) for row in access.items.tolist()],
            top_k=TOP_K,
        )

    def _history(self, user: int) -> list[str | int]:
        known = self._known.get(user)
        if known is None:
            lengths, most = self._traffic.item_tokens, int(self._traffic.user_tokens[user])
            rng = np.random.default_rng((self._seed, user))
            rows: npt.NDArray[np.int64] = np.zeros(0, np.int64)
            while lengths[rows].sum() < most:
                rows = np.append(rows, rng.integers(0, len(lengths), 256))
            enough = int(np.searchsorted(np.cumsum(lengths[rows]), most, "right"))
            known = self._known[user] = [str(row) for row in rows[: max(1, enough)].tolist()]
        return known
