# SPDX-License-Identifier: Apache-2.0
"""Less than was asked for, where the request allows it and its deadline leaves no time for all."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from jgr.serving.api import RankRequest, Request
from jgr.serving.known_items import texts


def shrinks(request: Request) -> bool:
    """Whether it may be answered by less than it asks for."""
    if isinstance(request, RankRequest):
        return request.min_candidates is not None and request.candidates != "all"
    return request.min_beam_width is not None


def smaller(request: Request, size: int, sizes: Sequence[int] | None) -> Request | None:
    """The request with the next smaller beam width, or fewer candidates, that it allows; None: there is none.

    size: its beam width or number of candidates. sizes: those of the compiled programs. No program is cheaper for a
    size between two of them, so the largest of those below is taken, and where there is none, the least allowed. None:
    each size has a cost of its own, and half of it is the next one.
    """
    least = request.min_candidates if isinstance(request, RankRequest) else request.min_beam_width
    if not shrinks(request) or least is None or least >= size:
        return None
    below = [size // 2] if sizes is None else [each for each in sizes if each < size]
    fewer = max(least, *below) if below else least
    if isinstance(request, RankRequest):
        assert request.candidates != "all"
        top_k = None if request.top_k is None else min(request.top_k, fewer)
        return replace(request, candidates=_scored(request, request.candidates)[:fewer], top_k=top_k)
    return replace(request, beam_width=fewer, top_k=min(request.top_k, fewer))


def _scored(request: RankRequest, candidates: list[str | int]) -> list[str | int]:
    """The candidates that are scored: with exclude_history, those that are not in the history."""
    if not request.exclude_history:
        return candidates
    seen = set(texts(request.history))
    return [each for each, text in zip(candidates, texts(candidates), strict=True) if text not in seen]
