# SPDX-License-Identifier: Apache-2.0
"""What a replica tells the routers of a fleet, and what both make of a hint: plain data, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgr.serving.cluster.hints import Hint
from jgr.serving.policies.routing import Ask, Report

Shape = Mapping[str, float]
"""Tokens of a prompt: `event_tokens` and `item_tokens` of each, and `other_tokens`; `both`: 1 where users and
items of one prompt are reused; empty: that is not known."""


def ask_of(hint: Hint, shape: Shape, request_id: str = "") -> Ask:
    """The request as the routing policy takes it."""
    return Ask(
        id=request_id,
        user=hint.user,
        user_tokens=shape.get("event_tokens", 1.0) * hint.events,
        items=hint.items,
        item_tokens=shape.get("item_tokens", 1.0),
        other_tokens=shape.get("other_tokens", 1.0),
        left_ns=None if hint.left_ms is None else round((hint.left_ms - hint.waited_ms) * 1e6),
        tried=hint.tried,
        both=bool(shape.get("both", 0.0)),
        shards=hint.shards,
    )


def expected(hint: Hint, name: str, whole: float) -> float:
    """Tokens that the replica of that name should compute, as the router that chose it has booked them; the whole
    prompt where none has."""
    return dict(hint.expected).get(name, whole)


def report(stats: Mapping[str, Any]) -> Report:
    """A replica's stats as the routing policy takes them."""
    return Report(
        users=stats.get("users", b""),
        items=stats.get("items", b""),
        ns_per_token=stats.get("ns_per_token", 0.0),
        sent=stats.get("sent", {}),
        shards=stats.get("shards", b""),
        rows_ns=stats.get("rows_ns", 0.0),
    )
