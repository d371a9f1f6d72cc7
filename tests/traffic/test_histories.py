# SPDX-License-Identifier: Apache-2.0
"""A request's history has the tokens of its access, whatever came before, and grows by whole items."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from jgr.traffic.histories import TOP_K, Histories
from jgr.traffic.workloads import GAMES, Traffic


def test_a_history_has_the_tokens_of_its_access() -> None:
    traffic = Traffic(replace(GAMES.scaled(GAMES.items / 1600), growth=0.0))
    accesses = list(islice(traffic.accesses(), 40))
    histories, others = Histories(traffic), Histories(traffic)
    requests = [histories.request(access) for access in accesses]
    for access, request in zip(accesses, requests, strict=True):
        tokens = np.cumsum([traffic.item_tokens[int(item)] for item in request.history])
        assert tokens[-1] <= access.user_tokens < tokens[-1] + traffic.item_tokens.max()
        assert request.candidates == [str(row) for row in access.items] and request.top_k == TOP_K
        assert request.user_id == access.user
    assert [others.request(access) for access in reversed(accesses)] == requests[::-1]
