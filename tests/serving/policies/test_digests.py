# SPDX-License-Identifier: Apache-2.0
"""Filters of nodes, against sets: nothing held is denied, and as much is wrongly believed as the formula says."""

from __future__ import annotations

import random
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.serving.policies.digests import Digests, digest, keys, positions

BITS = 10


def table(*held: object, bits: int = BITS) -> Digests:
    """The filters of nodes that hold these names."""
    digests = Digests(bits)
    for slot, names in enumerate(held):
        digests.add()
        digests.replace(slot, digests.parse(digest(names, bits)))  # type: ignore[arg-type]
    return digests


def places(name: str, bits: int) -> set[int]:
    """A name's positions, in whole numbers."""
    key = crc32(name.encode()) * 0x9E3779B97F4A7C15 % 2**64
    return {key >> 64 - bits, (key >> 64 - 2 * bits) % 2**bits}


def believed(name: str, held: set[str], bits: int) -> bool:
    return places(name, bits) <= {place for other in held for place in places(other, bits)}


def test_a_filter_has_the_bits_of_its_names_and_no_other() -> None:
    held = {"user:1", "user:2", "Zoë"}
    bits = np.unpackbits(np.frombuffer(digest(held, BITS), np.uint8))
    assert set(np.flatnonzero(bits)) == {place for name in held for place in places(name, BITS)}
    assert digest([], BITS) == bytes(128)


@settings(max_examples=40)
@given(
    st.lists(st.sets(st.text(max_size=4), max_size=30), min_size=1, max_size=20),
    st.lists(st.text(max_size=4), max_size=8),
)
def test_every_node_holds_what_its_set_says(held: list[set[str]], asked: list[str]) -> None:
    digests = table(*held)
    digests.check()
    expected = [sum(believed(name, names, BITS) for name in asked) for names in held]
    assert digests.count(keys(asked)).tolist() == expected
    for name in asked:
        alone = [int(believed(name, names, BITS)) for names in held]
        assert digests.holds_at(*positions(keys([name]), BITS)).tolist() == alone
    for slot, names in enumerate(held):
        assert digests.count(keys(names))[slot] == len(names), "no false negatives"


@pytest.mark.parametrize("form", ["item:{}", "{}", "u/{:08x}"])
@pytest.mark.parametrize("held", [1000, 5000, 20_000])
def test_wrong_beliefs_are_as_rare_as_the_formula_says(held: int, form: str) -> None:
    rng, bits = random.Random(held), 16
    numbers = rng.sample(range(10**6), held + 4000)
    digests = table([form.format(number) for number in numbers[:held]], bits=bits)
    found = sum(digests.count(keys([form.format(number)]))[0] for number in numbers[held:])
    share = (1 - (1 - 2**-bits) ** (2 * held)) ** 2
    assert found == pytest.approx(4000 * share, abs=4 * (4000 * share * (1 - share)) ** 0.5 + 2)


def test_a_report_replaces_the_one_before() -> None:
    digests = table({"a", "b"}, {"b"})
    digests.replace(0, digests.parse(digest({"b", "c"}, BITS)))
    digests.check()
    assert [digests.count(keys([name])).tolist() for name in "abc"] == [[0, 0], [1, 1], [1, 0]]
    digests.replace(0, digests.parse(b""))
    assert digests.count(keys("abc")).tolist() == [0, 1]


def test_the_last_takes_the_place_of_one_that_left_and_a_new_one_holds_nothing() -> None:
    digests = table(*({str(node)} for node in range(9)))
    digests.remove(2)
    digests.check()
    assert [digests.count(keys([str(node)])).tolist().index(1) for node in (0, 1, 8, 3)] == [0, 1, 2, 3]
    assert digests.count(keys(["2"])).sum() == 0
    digests.remove(7)
    digests.add()
    digests.check()
    assert len(digests) == 8 and digests.count(keys(map(str, range(9))))[7] == 0


@pytest.mark.parametrize("count", [0, 1, 255, 256, 700])
def test_any_number_of_keys_is_counted(count: int) -> None:
    names = [f"item:{number}" for number in range(count)]
    assert table(names, [], bits=16).count(keys(names)).tolist() == [count, 0] or count == 0
    assert table(names, bits=16).count(keys(names)).dtype == np.float64


def test_filters_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="a digest must have 128 bytes, got 256"):
        Digests(BITS).parse(digest("a", BITS + 1))
    for bits in (9, 21):
        with pytest.raises(ValueError, match="bits: must be from 10 to 20"):
            Digests(bits)
