# SPDX-License-Identifier: Apache-2.0
"""The shop: reproducible, its stated law is the law it draws by, and its oracle is the stated ceiling."""

from __future__ import annotations

import numpy as np
import pytest

from jgr.data.interactions import DataError, Ragged, leave_one_out
from jgr.data.shop import (
    FOLLOW,
    FOLLOW_WEIGHTS,
    LENGTH_MAX,
    LENGTH_MIN,
    STAY,
    TASTE_WEIGHTS,
    Process,
    make_shop,
)

TINY = make_shop(seed=1, n_users=300, items_per_line=5)


def test_equal_seeds_give_equal_shops() -> None:
    again, other = make_shop(1, 300, 5), make_shop(2, 300, 5)
    assert again.catalog.version == TINY.catalog.version != other.catalog.version
    assert [s.tolist() for s in again.sequences] == [s.tolist() for s in TINY.sequences]
    assert [s.tolist() for s in other.sequences] != [s.tolist() for s in TINY.sequences]


def test_the_catalog_is_a_shop() -> None:
    catalog = make_shop(n_users=1).catalog
    assert catalog.n_items == 16 * 6 * 21 and catalog.depth == 3
    assert catalog.level_sizes[0] == 16 and catalog.level_sizes[1] <= 24 and catalog.level_sizes[2] == 24
    assert len(np.unique(catalog.codes, axis=0)) == catalog.n_items
    assert len({fields["title"] for fields in catalog.metadata}) == catalog.n_items
    assert all(
        fields["price"] > 0 and fields["title"].endswith(fields["line"]) for fields in catalog.metadata
    )
    # One first code a category, one second code a line of it.
    by_category = {
        (fields["category"], code) for fields, code in zip(catalog.metadata, catalog.codes[:, 0], strict=True)
    }
    assert len(by_category) == 16
    by_line = {
        (f["line"], a, b) for f, (a, b, _) in zip(catalog.metadata, catalog.codes.tolist(), strict=True)
    }
    assert len(by_line) == 96


def test_users_have_distinct_names_and_never_buy_twice() -> None:
    assert len(set(TINY.names)) == len(TINY.sequences) == 300
    assert TINY.names[0] == "Ada" and TINY.names[51] == "Björn 2"
    lengths = [len(sequence) for sequence in TINY.sequences]
    assert min(lengths) >= LENGTH_MIN and max(lengths) <= LENGTH_MAX
    assert all(len(set(sequence.tolist())) == len(sequence) for sequence in TINY.sequences)
    assert all(sequence.dtype == np.int32 for sequence in TINY.sequences)


def test_the_process_is_well_formed() -> None:
    process = TINY.process
    assert all(len(set(row)) == 4 for row in process.follow_ups.tolist())
    # Follow-ups lead onward, never back: no item follows one of its own follow-ups.
    for item, follow_ups in enumerate(process.follow_ups.tolist()):
        assert all(item not in process.follow_ups[other] for other in follow_ups)
    for category in range(16):
        assert process.popularity[process.category == category].sum() == pytest.approx(1)
    assert all(len(set(row)) == 3 for row in process.favourites.tolist())


def naive_probabilities(process: Process, user: int, history: list[int]) -> list[float]:
    n, last = len(process.category), history[-1]
    weights = [0.0] * n
    for item in range(n):
        category = process.category[item]
        browse = STAY * (category == process.category[last])
        for favourite, weight in zip(process.favourites[user], TASTE_WEIGHTS, strict=True):
            browse += (1 - STAY) * weight * (favourite == category)
        weights[item] = (1 - FOLLOW) * browse * process.popularity[item]
        for follow_up, weight in zip(process.follow_ups[last], FOLLOW_WEIGHTS, strict=True):
            weights[item] += FOLLOW * weight * (follow_up == item)
        weights[item] *= item not in history
    return [weight / sum(weights) for weight in weights]


def test_probabilities_equal_the_written_law() -> None:
    users = np.array([3, 0, 3], np.int32)
    histories = [[7], TINY.sequences[0].tolist(), [200, 100, 150]]
    found = TINY.process.probabilities(users, Ragged.of(histories))
    for i, history in enumerate(histories):
        naive = naive_probabilities(TINY.process, int(users[i]), history)
        np.testing.assert_allclose(found[i], naive, atol=1e-12)


def test_draws_follow_the_probabilities() -> None:
    n = 40_000
    rng = np.random.default_rng(0)
    users, last = np.full(n, 5, np.int32), np.full(n, 33, np.int32)
    drawn = TINY.process.draw(users, last, rng)
    drawn = drawn[drawn != 33]
    expected = TINY.process.probabilities(users[:1], Ragged.of([[33]]))[0]
    counts = np.bincount(drawn, minlength=len(expected))
    assert not counts[expected == 0].any()
    spread = np.sqrt(np.maximum(expected * len(drawn), 1))
    assert np.abs(counts - expected * len(drawn)).max() < 5 * spread.max()
    assert (np.abs(counts - expected * len(drawn)) < 5 * spread + 5).all()
    # The first item is browsed: favourites only, in the proportions of the taste.
    first = TINY.process.draw(users, np.full(n, -1, np.int32), rng)
    shares = np.bincount(TINY.process.category[first], minlength=16)[TINY.process.favourites[5]] / n
    np.testing.assert_allclose(shares, TASTE_WEIGHTS, atol=0.01)


ORACLE_HR10 = 0.67  # as the docstring of jgr.data.shop says


def test_the_oracle_ranks_by_the_probabilities() -> None:
    test = leave_one_out(TINY.sequences).test
    top = TINY.oracle_top_k(test, 10)
    assert top.shape == (300, 10) and top.dtype == np.int32
    exact = TINY.process.probabilities(test.users, test.histories)
    for i in (0, 17, 299):
        naive = sorted(range(exact.shape[1]), key=lambda item: (-exact[i, item], item))
        assert top[i].tolist() == naive[:10]


def test_the_ceiling_is_as_documented() -> None:
    shop = make_shop()
    data = leave_one_out(shop.sequences)
    top = shop.oracle_top_k(data.test, 10)
    exact = shop.process.probabilities(data.test.users, data.test.histories)
    assert np.take_along_axis(exact, top.astype(np.int64), axis=1).sum(axis=1).mean() == pytest.approx(
        ORACLE_HR10, abs=0.005
    )
    # 6000 draws with that mean: four standard deviations are 0.025.
    hit_rate = (top == data.test.targets[:, None]).any(axis=1).mean()
    assert hit_rate == pytest.approx(ORACLE_HR10, abs=0.025)


@pytest.mark.parametrize(("users", "items"), [(0, 21), (5, 4), (5, 25)])
def test_impossible_sizes_are_refused(users: int, items: int) -> None:
    with pytest.raises(DataError, match="shop: needs"):
        make_shop(0, users, items)
