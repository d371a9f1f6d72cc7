# SPDX-License-Identifier: Apache-2.0
"""Item ids that are numbers are found as a dictionary finds them, however the texts asked for look."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.id_lookup import FEW_ITEMS, ONE_BY_ONE, SPARSE, Numbers, finder, plain_numbers

NUMBERS = st.integers(0, 300).map(str)
ODD = st.sampled_from(
    [
        "",
        "0",
        "00",
        "07",
        "-1",
        "+7",
        " 7",
        "7 ",
        "7,8",
        "1e2",
        "7.0",
        "1_0",
        "٣",
        "²",
        "7\x00",
        "\ud800",
        "x",
    ]
    + [str(2**63 + n) for n in (-2, -1, 0, 1)]
    + ["9" * 18, "9" * 19, "9" * 40, str(10**18)]
)


@given(st.sets(NUMBERS, min_size=1), st.lists(NUMBERS | ODD, max_size=40))
def test_numbers_are_found_as_a_dictionary_finds_them(known: set[str], asked: list[str]) -> None:
    rows = {item_id: row for row, item_id in enumerate(known)}
    found = Numbers.of(list(known))
    assert found is not None
    only_numbers = [item_id for item_id in asked if item_id in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for some in (asked, only_numbers, [*only_numbers, *known, *known] * ONE_BY_ONE):
            rows_found = found.find(some)
            assert rows_found.tolist() == [rows.get(item_id, -1) for item_id in some]
            assert rows_found.dtype == np.int32


@given(st.lists(NUMBERS | ODD, max_size=20))
def test_what_python_writes_for_a_number_is_one(texts: list[str]) -> None:
    plain = [text for text in texts if text.isascii() and text.isdigit() and str(int(text)) == text]
    numbers = plain_numbers(texts)
    if plain == texts and all(len(text) <= 18 for text in texts):
        assert numbers is not None and numbers.tolist() == [int(text) for text in texts]
    else:
        assert numbers is None


@pytest.mark.parametrize(
    "item_ids",
    [
        ["1", "x"],
        ["1", "01"],
        ["1", ""],
        [],
        ["0", str(FEW_ITEMS)],
        [*map(str, range(FEW_ITEMS)), str(2**40)],
    ],
)
def test_other_ids_are_looked_up_otherwise(item_ids: list[str]) -> None:
    assert Numbers.of(item_ids) is None
    found = finder(item_ids)(["7", "1", *item_ids])
    assert found.tolist()[2:] == list(range(len(item_ids)))


def test_numbers_may_be_sparse() -> None:
    item_ids = [str(SPARSE * n) for n in range(FEW_ITEMS)]
    assert Numbers.of(item_ids) is not None
    assert finder(item_ids)(["16", "17", "0"]).tolist() == [1, -1, 0]
