# SPDX-License-Identifier: Apache-2.0
"""The wire contract of a hint: a user is about to be ranked, so that its part is computed and kept now (RelayGR)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from jgr.serving.api import (
    Context,
    Deadline,
    History,
    HistoryActions,
    HistoryTimes,
    ModelName,
    Request,
    Scenario,
    Time,
)
from jgr.serving.policies.jobs import Priority

HintedUser = (
    Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
    | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
)


class PrefillRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Says that a user is about to be ranked, so that the ranking finds the user's part computed."""

    history: History
    model: ModelName = None
    history_times: HistoryTimes = None
    time: Time = None
    history_actions: HistoryActions = None
    context: Context = None
    scenario: Scenario = 0
    deadline_ms: Deadline = None


class Prefill(PrefillRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A hint as the engine takes it, which knows the user. It gives way to all interactive requests."""

    user_id: HintedUser
    priority: ClassVar[Priority] = "batch"


Asked = Request | Prefill


class Prefilled(Struct, kw_only=True):
    """What came of a hint."""

    id: Annotated[str, Meta(description="The request's id: X-Request-Id, or one that the server made.")]
    model: Annotated[str, Meta(description="Version of the model that keeps the user's part.")]
    catalog_version: Annotated[str, Meta(description="Content hash of the model's catalog.")]
    kept: Annotated[
        bool,
        Meta(
            description="Whether the user's part is in the cache now. false: the server keeps no users, would put the "
            "candidates first for this one, or has no room."
        ),
    ]
    tokens: Annotated[int, Meta(description="Number of the user's tokens that were computed for the hint.")]
    cached_tokens: Annotated[
        int, Meta(description="Number of the user's tokens that were in the cache before.")
    ]
