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


class Work:
    """Tokens in flight by who has sent them, and their mean over time."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._sum: dict[str, float] = {}  # token-ns since `_since_ns`
        self._at_ns: int | None = None
        self._since_ns = 0

    def begin(self, sender: str, tokens: float, now_ns: int) -> None:
        self._go_on(now_ns)
        self._now[sender] = self._now.get(sender, 0.0) + tokens

    def end(self, sender: str, tokens: float, now_ns: int) -> None:
        self._go_on(now_ns)
        left = self._now[sender] - tokens
        if left > 0.5:
            self._now[sender] = left
        else:
            del self._now[sender]

    def mean(self, now_ns: int) -> Mapping[str, float]:
        """The means since the last call."""
        self._go_on(now_ns)
        took = max(1, now_ns - self._since_ns)
        found = {sender: total / took for sender, total in self._sum.items() if total}
        self._sum, self._since_ns = {}, now_ns
        return found

    def _go_on(self, now_ns: int) -> None:
        if self._at_ns is None:
            self._at_ns = self._since_ns = now_ns
        for sender, tokens in self._now.items():
            self._sum[sender] = self._sum.get(sender, 0.0) + tokens * (now_ns - self._at_ns)
        self._at_ns = now_ns
