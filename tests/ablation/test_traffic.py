# SPDX-License-Identifier: Apache-2.0
"""The requests of an ablation: reproducible, of the dataset's users, who come back, over items that repeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jgr.ablation.bat import BAT
from jgr.ablation.hlem import HLEM
from jgr.ablation.traffic import Amount, Request, draw, waves
from jgr.ablation.xgr import XGR
from jgr.config import UserError
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.data.shop import make_shop

SHOP = make_shop(n_users=50, items_per_line=5)
DATASET = Dataset(SHOP.catalog, leave_one_out(SHOP.sequences, SHOP.names))
AMOUNT = Amount(300, 20, (3, 6), longest=7)


def test_requests_are_of_the_datasets_users_and_equal_seeds_give_equal_ones() -> None:
    requests = draw(BAT, DATASET, AMOUNT)
    assert requests == draw(BAT, DATASET, AMOUNT)
    assert requests != draw(BAT, DATASET, AMOUNT, seed=1)
    ids = SHOP.catalog.item_ids
    bought = {
        name: [ids[row] for row in rows[:-1]] for name, rows in zip(SHOP.names, SHOP.sequences, strict=True)
    }
    assert len(requests) == 300
    for request in requests:
        assert request.history == bought[request.user][-7:]  # all but the target, as far as histories may go
        assert len(set(request.candidates)) == len(request.candidates)
        assert set(request.candidates) <= set(ids)
    assert {len(request.candidates) for request in requests} == {3, 4, 5, 6}


def test_users_who_grow_have_more_events_at_each_visit_and_all_at_the_last() -> None:
    last = dict[str, list[str]]()
    for request in draw(HLEM, DATASET, replace(AMOUNT, requests=60)):
        before = last.get(request.user, [])
        assert request.history[: len(before)] == before
        assert len(request.history) - len(before) in (0, 1) or not before
        last[request.user] = request.history
    assert last == {
        request.user: request.history for request in draw(BAT, DATASET, replace(AMOUNT, requests=60))
    }


def test_users_and_items_come_as_zipfs_law_has_it() -> None:
    requests = draw(BAT, DATASET, replace(AMOUNT, requests=4000))
    users = [count for _, count in Counter(request.user for request in requests).most_common()]
    assert len(users) <= 20
    expected = 4000 / sum(1 / n for n in range(1, 21))  # of the first; the second comes half as often
    assert abs(users[0] - expected) < 5 * expected**0.5
    assert abs(users[1] - expected / 2) < 5 * (expected / 2) ** 0.5
    items = [count for _, count in Counter(i for r in requests for i in r.candidates).most_common()]
    assert items[0] > 10 * np.median(items)


def test_a_generator_is_asked_for_items_and_a_model_that_reads_times_is_told_them() -> None:
    (first, *_) = draw(XGR, DATASET, AMOUNT)
    assert first.more() == {"user_id": first.user, "top_k": 10}
    with pytest.raises(UserError, match="the model reads times, which the dataset does not have"):
        draw(BAT, DATASET, AMOUNT, timed=True)
    test = DATASET.interactions.test
    histories = replace(test.histories, times=np.arange(len(test.histories.rows), dtype=np.int64))
    timed = Dataset(SHOP.catalog, replace(DATASET.interactions, test=replace(test, histories=histories)))
    (asked, *_) = draw(BAT, timed, AMOUNT, timed=True)
    assert asked.times is not None
    assert np.diff(asked.times).tolist() == [1] * (len(asked.history) - 1)
    assert asked.more()["time"] == asked.times[-1] + 60


def test_more_candidates_than_items_are_refused() -> None:
    with pytest.raises(UserError, match="--candidates: 1000 of a catalog of 480 items"):
        draw(BAT, DATASET, replace(AMOUNT, candidates=(1, 1000)))


@pytest.mark.parametrize(("count", "rounds", "together"), [(24, 3, 4), (10, 4, 3), (2, 5, 1), (7, 1, 2)])
def test_rounds_hold_every_request_once_in_waves(count: int, rounds: int, together: int) -> None:
    requests = [Request(f"u{n}", ["a"]) for n in range(count)]
    parts = waves(requests, rounds, together)
    assert [request for part in parts for wave in part for request in wave] == requests
    assert len(parts) == min(rounds, -(-count // together))
    assert all(1 <= len(wave) <= together for part in parts for wave in part)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
