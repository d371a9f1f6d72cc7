# SPDX-License-Identifier: Apache-2.0
"""Fetch or compute: by what is cheaper, as measured, and not from who fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.serving.policies.fetching import CLOSED_NS, LONGEST_CLOSED_NS, Links, Missing

MS = 1_000_000
LONG_NS = 10**12


def test_the_cheaper_way_is_taken_for_each_node() -> None:
    links = Links(ns_per_byte=1.0)  # and half a millisecond for each fetch
    missing = {"far": Missing(4 * MS, 4 * MS), "near": Missing(1 * MS, 2 * MS)}
    assert links.choose(missing, 0, LONG_NS) == ("near",)
    assert links.choose(missing, 0, LONG_NS, "always") == ("far", "near")
    assert links.choose(missing, 0, LONG_NS, "never") == ()


def test_what_would_not_come_in_time_is_computed() -> None:
    links = Links(ns_per_byte=1.0)
    missing = {"near": Missing(1 * MS, 5 * MS)}
    assert links.choose(missing, 0, 1 * MS) == ()
    assert links.choose(missing, 0, 2 * MS) == ("near",)
    assert links.choose(missing, 0, 0, "always") == ()


@settings(max_examples=25, deadline=None)
@given(latency_ns=st.floats(1e4, 1e7), ns_per_byte=st.floats(0.05, 50.0))
def test_a_links_speed_and_latency_are_learnt_from_its_fetches(latency_ns: float, ns_per_byte: float) -> None:
    links = Links()
    sizes = [1_000, 10_000_000]
    for _ in range(400):
        for size in sizes:
            links.observe("a", size, round(latency_ns + size * ns_per_byte))
    for size in sizes:
        assert links.takes_ns("a", size) == pytest.approx(latency_ns + size * ns_per_byte, rel=0.1)
    speed = links.bytes_per_s(["a"])
    assert speed is not None and speed == pytest.approx(1e9 / ns_per_byte, rel=0.15)


def test_who_fails_is_left_alone_for_twice_as_long_each_time_and_forgiven() -> None:
    links, now_ns = Links(), 0
    missing = {"a": Missing(1, LONG_NS)}
    for failures in range(12):
        links.failed("a", now_ns)
        closed_ns = min(CLOSED_NS << failures, LONGEST_CLOSED_NS)
        assert links.choose(missing, now_ns + closed_ns - 1, LONG_NS, "always") == ()
        now_ns += closed_ns
        assert links.choose(missing, now_ns, LONG_NS) == ("a",)
    links.observe("a", 1, MS)
    links.failed("a", now_ns)
    assert links.closed("a", now_ns + CLOSED_NS - 1) and not links.closed("a", now_ns + CLOSED_NS)


def test_nodes_that_are_gone_are_forgotten() -> None:
    links = Links()
    links.failed("a", 0)
    links.keep(["b"])
    assert not links.closed("a", 1) and links.bytes_per_s(["a", "b"]) is None


def test_the_speed_of_links_is_that_of_the_ones_that_are_named() -> None:
    """1 and 3 GB/s, and a folder whose pages are in memory."""
    links = Links()
    for node, bytes_per_s in ((0, 1e9), (1, 3e9), ("folder", 40e9)):
        for _ in range(400):
            for size in (1_000_000, 50_000_000):
                links.observe(node, size, round(size / bytes_per_s * 1e9))
    links.takes_ns(2, 1)  # it was never used
    assert links.bytes_per_s([0, 1, 2]) == pytest.approx(2e9, rel=0.01)
    assert links.bytes_per_s([2, "nobody"]) is None
