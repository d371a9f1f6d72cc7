# SPDX-License-Identifier: Apache-2.0
"""Which shards of embedding rows a node holds, by hand."""

from __future__ import annotations

import json

import numpy as np

from jgr.serving.policies.shards import PROFILE, held, name, profile, shard_of


def test_a_node_holds_a_shard_where_half_of_its_rows_in_use_are_there() -> None:
    shards = np.array([5, 5, 5, 6, 6, 7, 8], np.int16)
    in_use = np.array([1, 1, 0, 1, 1, 0, 1], bool)
    there = np.array([1, 0, 0, 0, 0, 1, 1], bool)
    assert held(shards, in_use, there) == [name(5), name(8)]


def test_a_profile_is_bounded_and_the_same_for_numbers_and_texts() -> None:
    items = [str(item).encode() for item in range(100)]
    assert len(profile(items)) == PROFILE
    assert (
        profile([b"12", b'"x"']) == profile([b'"12"', b'"x"']) == (name(shard_of("12")), name(shard_of("x")))
    )
    assert profile([b"{}", b"null", b"[1]", b"true", b"1.5", b'"', b"", b'"\xff"']) == ()


def test_an_id_is_what_its_json_says() -> None:
    for item in ("Zoë", 'a"b', "line\nend", "\U0001f600"):
        expected = (name(shard_of(item)),)
        assert profile([json.dumps(item).encode()]) == expected, "escaped"
        assert profile([json.dumps(item, ensure_ascii=False).encode()]) == expected
    assert profile([b"-5"]) == (name(shard_of("-5")),)
