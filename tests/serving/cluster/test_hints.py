# SPDX-License-Identifier: Apache-2.0
"""What a router is told of a request, of good bodies and of any others."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.serving.cluster.hints import WORK, Hint, glance, works
from jgr.serving.known_items import user_entry


def test_a_ranking_names_its_user_candidates_events_and_deadline() -> None:
    body = {
        "user_id": "ada",
        "history": ["a", 7, "c"],
        "candidates": ["x", 12],
        "deadline_ms": 80,
        "top_k": 3,
    }
    found = glance("/v1/rank", json.dumps(body).encode(), tenant="shop/")
    assert found == Hint(user=user_entry("ada", "shop/"), events=3, items=("x", "12"), left_ms=80.0)


def test_a_profile_is_the_shards_that_the_history_reads_most() -> None:
    body = json.dumps({"history": ["a", 7, "b", "a", {}]}).encode()
    assert glance("/v1/rank", body).shards == ()
    shards = glance("/v1/rank", body, profiled=True).shards
    of = [f"shard {zlib.crc32(item) % 4096}" for item in (b"a", b"7", b"b")]
    assert (shards[0], sorted(shards)) == (of[0], sorted(of))


def test_candidates_that_are_no_ids_have_no_names() -> None:
    body = b'{"candidates": ["x", [["y"]], 1.5, true, {"id": 1}, 7]}'
    assert glance("/v1/rank", body).items == ("x", "", "", "", "", "7")


def test_a_deadline_that_is_no_number_is_none_which_a_replica_refuses_by_its_field() -> None:
    for value in (b"true", b'"9"', b"[9]", b"null", b"0", b"-1", b"1e9"):
        assert glance("/v1/rank", b'{"deadline_ms": ' + value + b"}").left_ms is None
    assert glance("/v1/rank", b'{"deadline_ms": 1.5}').left_ms == 1.5


def test_the_documents_of_a_rerank_are_its_candidates() -> None:
    body = b'{"history": ["a"], "documents": ["x", "y"]}'
    assert glance("/v1/rerank", body) == Hint(events=1, items=("x", "y"))


def test_only_a_models_work_whose_body_names_its_deadline_has_the_default_one() -> None:
    """Of others the replica knows better: an inference of KServe's has its own, and a page has none."""
    assert all(map(works, (*WORK, "/v1/users/a/prefill")))
    assert not any(map(works, ("/v2/models/m/infer", "/v1/items", "/docs", "/v1/users/a/cache")))


def test_a_hint_to_compute_a_user_is_for_that_user() -> None:
    assert glance("/v1/users/a%2Fb/prefill", b'{"history": []}').user == user_entry("a/b")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rank", b"no json"),
        ("/v1/rank", b"[]"),
        ("/v1/rank", b'{"history": 3}'),
        ("/v1/rank", b'{"user_id": "\xff"}'),
        ("/v1/rank", b'{"candidates": ' + b"[" * 100_000),
        ("/v1/models", b'{"user_id": "ada"}'),
        ("/v1/users/ada/cache", b'{"user_id": "ada"}'),
    ],
)
def test_others_have_an_empty_one(path: str, body: bytes) -> None:
    assert glance(path, body) == Hint()


@pytest.mark.parametrize("deadline", ["1e308", "1" + 400 * "0", "86400000.5", "0", "-1", '"5"', "null"])
def test_a_deadline_that_will_be_refused_is_none(deadline: str) -> None:
    """Reckoned with, the largest would be no number of nanoseconds."""
    assert glance("/v1/rank", f'{{"history": ["a"], "deadline_ms": {deadline}}}'.encode()) == Hint(events=1)


def test_a_user_may_be_named_by_a_number() -> None:
    assert glance("/v1/rank", b'{"user_id": 0}').user == user_entry("0")
    assert glance("/v1/rank", b'{"user_id": true}').user == ""


def test_fields_of_other_types_are_left_to_the_replica() -> None:
    body = b'{"user_id": 5.5, "history": [{}], "candidates": "all", "deadline_ms": "soon"}'
    assert glance("/v1/rank", body) == Hint(events=1)
    assert glance("/v1/rank", b'{"deadline_ms": -1, "user_id": ""}') == Hint()


_anything = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from(["user_id", "history", "candidates", "documents", "deadline_ms", "other"])


@given(st.sampled_from(WORK), st.dictionaries(_fields, _anything) | _anything)
def test_no_body_breaks_it(path: str, body: object) -> None:
    found = glance(path, json.dumps(body).encode())
    assert isinstance(found.user, str) and found.events >= 0
    assert all(isinstance(item, str) for item in found.items)
    assert found.left_ms is None or found.left_ms > 0
