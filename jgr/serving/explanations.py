# SPDX-License-Identifier: Apache-2.0
"""The wire contract of an explanation: how a recommendation or a ranking came about, beside the answer itself.

An explained request is an ordinary one, of a type of its own: it is checked, queued, batched and answered alike.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jgr.serving.api import Answer, RankRequest, RecommendRequest

SpanKind = Literal["preamble", "instruction", "user", "structure", "review", "item", "probe", "context"]
Source = Literal["computed", "device", "host", "library"]


class ExplainRecommend(RecommendRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A RecommendRequest whose search is told level by level."""


class ExplainRank(RankRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A RankRequest whose prompt is told span by span."""


class ExplainedSpan(Struct, kw_only=True):
    """Tokens of one part of the prompt that came from one place."""

    kind: Annotated[
        SpanKind,
        Meta(
            description="user: the history. item: a candidate. probe: what asks about one candidate. instruction: the "
            "text that begins or ends the prompt. preamble: fixed text before everything. context: contextual slots. "
            "Where the request has history_texts, the history is told as review, which these are, and structure, what "
            "stands between them."
        ),
    ]
    name: Annotated[
        str,
        Meta(description="history, for a candidate and its probe the item's id, else the kind once more."),
    ]
    tokens: Annotated[
        int, Meta(description="Number of tokens; of all spans together the answer's usage.prompt_tokens.")
    ]
    cached_tokens: Annotated[
        int,
        Meta(
            description="Number of these tokens that came from the cache: all, or none where they were computed. Of "
            "all spans together the answer's usage.cached_tokens."
        ),
    ]
    source: Annotated[
        Source,
        Meta(
            description="computed: by the request's own batch. device: read from the cache's pool on the device. host: "
            "brought back for this batch from the host's memory (cache.host_mb), and read from the pool then. library: "
            "those of like tokens, from a library of prototypes (cache.library): an approximation."
        ),
    ]


class ExplainedBeam(Struct, kw_only=True, gc=False):
    """One beam that the search kept after a level."""

    prefix: Annotated[
        list[int],
        Meta(description="The codes of the semantic id so far: of each level the place in its vocabulary."),
    ]
    token: Annotated[
        str | int,
        Meta(description="Token name or token id of the last code, as /v1/items has it in semantic_id."),
    ]
    score: Annotated[
        float, Meta(description="Log-likelihood of the prefix, normalised as the answer's scores.")
    ]
    parent: Annotated[
        int | None,
        Meta(description="Place, from 0, of the beam of the level before that was continued. null: level 0."),
    ]
    items: Annotated[
        int,
        Meta(description="Number of the catalog's items whose semantic id begins so, whatever filters say."),
    ]
    kept: Annotated[
        bool,
        Meta(
            description="Whether the search went on from it: a beam of the next level continues it; at the last level, "
            "the answer has an item with this semantic id."
        ),
    ]
    item_ids: Annotated[
        list[str] | UnsetType,
        Meta(description="The answer's items with this semantic id, in its order; only at the last level."),
    ] = UNSET


class ExplainedLevel(Struct, kw_only=True):
    """The beams after one step of the search."""

    level: Annotated[int, Meta(ge=0, description="Level of the semantic ids, from 0.")]
    candidates: Annotated[
        int,
        Meta(
            description="Number of children that the step chose from: of all beams of the level before, those that the "
            "catalog has, before filters."
        ),
    ]
    beams: Annotated[
        list[ExplainedBeam],
        Meta(description="The beams, best first; usage.beam_width at most, without dead ones."),
    ]


class RecommendExplanation(Struct, kw_only=True):
    """A recommendation and how it came about."""

    answer: Annotated[Answer, Meta(description="The answer, as /v1/recommend gives it.")]
    levels: Annotated[
        list[ExplainedLevel],
        Meta(description="The search, level by level; empty for a server without a model (--null)."),
    ]
    spans: Annotated[
        list[ExplainedSpan], Meta(description="Where the prompt's tokens came from, in its order.")
    ]


class RankExplanation(Struct, kw_only=True):
    """A ranking and where its prompt came from."""

    answer: Annotated[Answer, Meta(description="The answer, as /v1/rank gives it.")]
    spans: Annotated[
        list[ExplainedSpan], Meta(description="Where the prompt's tokens came from, in its order.")
    ]


Explanation = RecommendExplanation | RankExplanation
