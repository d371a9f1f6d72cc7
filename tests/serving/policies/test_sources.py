# SPDX-License-Identifier: Apache-2.0
"""Plans of prompts as plain data: equal ones compare equal, and they can be written as JSON and read back."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jgr.prompt.layouts import Kind
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.policies.sources import (
    Approximate,
    Compute,
    PlannedPrompt,
    PlannedSegment,
    Repair,
    Reuse,
    UnplannedPrompt,
    part_of,
)

NUMBER = st.integers(0, 2**20)
CELLS = st.lists(NUMBER, max_size=3).map(tuple)
SOURCES = st.one_of(
    st.builds(Compute, NUMBER),
    st.builds(Reuse, NUMBER, CELLS, NUMBER),
    st.builds(Approximate, NUMBER, CELLS, st.integers(-(2**20), 2**20), NUMBER),
)
SEGMENTS = st.builds(
    PlannedSegment,
    st.sampled_from(Kind),
    st.lists(SOURCES, max_size=3).map(tuple),
    st.none() | CELLS,
    NUMBER,
    st.booleans(),
)
LAYOUTS = st.sampled_from(["causal", "user_prefix", "item_prefix"])
PROMPTS = st.builds(
    PlannedPrompt.of, LAYOUTS, st.lists(SEGMENTS, max_size=4), NUMBER, repaired=st.none() | NUMBER
)


@given(PROMPTS)
def test_a_plan_survives_json(plan: PlannedPrompt) -> None:
    text = msgspec.json.encode(plan)
    again = msgspec.json.decode(text, type=PlannedPrompt)
    assert again == plan and hash(again) == hash(plan)
    assert msgspec.json.encode(again) == text


@given(PROMPTS)
def test_every_token_is_counted_once(plan: PlannedPrompt) -> None:
    spans = [span for segment in plan.segments for span in segment.spans]
    tokens = sum(span.tokens for span in spans) + sum(segment.repaired for segment in plan.segments)
    assert plan.computed_tokens + plan.cached_tokens == tokens + plan.chosen
    assert plan.cached_tokens == sum(segment.cached for segment in plan.segments)


@given(LAYOUTS, st.booleans(), st.integers(0, 3))
def test_what_is_to_be_planned_survives_json(layout: str, fresh: bool, first: int) -> None:
    items = [(row, Content.of(np.arange(row, dtype=np.int32))) for row in (1, 4, 2)]
    prompt = make_prompt(
        Content.of(np.arange(5, dtype=np.int32)), np.ones(2, np.int32), items, key="id:u", room=4
    )
    unplanned = UnplannedPrompt(prompt, layout, fresh, Repair(first))  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(unplanned), type=UnplannedPrompt) == unplanned
    # The prompt's 14 tokens, and second copies: of the second item min(first, 4), unless that is all of it, and so on.
    copies = sum(n for n, length in ((min(first, 4), 4), (min(first, 2), 2)) if n < length)
    assert unplanned.computed_at_most == 14 + copies


def test_a_share_in_whole_percents_is_met_exactly() -> None:
    for percent in range(101):
        assert Repair(share=percent / 100, of_all=True).chosen([60, 40]) == percent
        assert part_of(percent / 100, 1000) == 10 * percent
    assert part_of(0.301, 10) == 4
