# SPDX-License-Identifier: Apache-2.0
"""Where the segments of a prompt stand, by hand (the table of BAT-19 (3)), and segments as plain data."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.prompt.layouts import CAUSAL, ITEM_PREFIX, LAYOUTS, SINGLE_USER_MULTI_ITEM, USER_PREFIX, Kind, Layout
from jgr.prompt.segments import Content, Prompt, Segment, arrange, count_tokens, make_prompt

USER = Content.of(np.arange(3, dtype=np.int32))
A, B = (Content.of(np.array(tokens, np.int32)) for tokens in ([10, 11], [20, 21, 22]))
INSTRUCTION, PROBE = np.array([30, 31], np.int32), np.array([40], np.int32)
PROMPT = make_prompt(USER, INSTRUCTION, [(7, A), (9, B)], room=4)


def places(prompt: Prompt, layout: Layout) -> list[tuple[Kind, int, list[int]]]:
    return [
        (segment.kind, segment.number, list(range(segment.offset, segment.offset + len(segment.tokens))))
        for segment in arrange(prompt, layout)
    ]


def test_the_papers_positions() -> None:
    assert count_tokens(PROMPT) == 10
    assert places(PROMPT, ITEM_PREFIX) == [
        (Kind.ITEM, 1, [0, 1]),
        (Kind.ITEM, 2, [0, 1, 2]),
        (Kind.USER, 0, [4, 5, 6]),
        (Kind.INSTRUCTION, 3, [7, 8]),
    ]
    assert places(PROMPT, USER_PREFIX) == [
        (Kind.USER, 0, [0, 1, 2]),
        (Kind.ITEM, 1, [3, 4]),
        (Kind.ITEM, 2, [3, 4, 5]),
        (Kind.INSTRUCTION, 3, [7, 8]),
    ]


def test_the_causal_order_is_the_text_as_it_is_read() -> None:
    assert places(PROMPT, CAUSAL) == [
        (Kind.USER, 0, [0, 1, 2]),
        (Kind.ITEM, 1, [3, 4]),
        (Kind.ITEM, 2, [5, 6, 7]),
        (Kind.INSTRUCTION, 3, [8, 9]),
    ]


def test_labels_stand_before_their_candidates_and_only_where_these_follow_each_other() -> None:
    labels = [Content.of(np.array(tokens, np.int32)) for tokens in ([50], [51, 52], [53])]
    prompt = make_prompt(USER, INSTRUCTION, [(7, A), (9, B)], room=4, labels=labels)
    assert places(prompt, CAUSAL) == [
        (Kind.USER, 0, [0, 1, 2]),
        (Kind.LABEL, 1, [3]),
        (Kind.ITEM, 2, [4, 5]),
        (Kind.LABEL, 3, [6, 7]),
        (Kind.ITEM, 4, [8, 9, 10]),
        (Kind.INSTRUCTION, 5, [11, 12]),
    ]
    for layout in (USER_PREFIX, ITEM_PREFIX):
        with pytest.raises(ValueError, match=f"LABEL has no place in layout {layout.name}"):
            arrange(prompt, layout)


def test_probes_stand_after_everything_in_their_items_segments() -> None:
    prompt = make_prompt(USER, INSTRUCTION, [(7, A), (9, B)], PROBE, room=4)
    assert count_tokens(prompt) == 12
    for layout, at in ((ITEM_PREFIX, 9), (USER_PREFIX, 9), (CAUSAL, 10)):
        assert places(prompt, layout)[-2:] == [(Kind.PROBE, 1, [at]), (Kind.PROBE, 2, [at])]


@pytest.mark.parametrize("layout", [USER_PREFIX, CAUSAL])
def test_a_prompt_without_items_is_plain_text(layout: Layout) -> None:
    assert places(make_prompt(USER, INSTRUCTION), layout) == [
        (Kind.USER, 0, [0, 1, 2]),
        (Kind.INSTRUCTION, 1, [3, 4]),
    ]


def test_a_kind_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="INSTRUCTION has no place in layout single_user_multi_item"):
        arrange(PROMPT, SINGLE_USER_MULTI_ITEM)


def test_contents_are_known_by_their_first_tokens() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    content = Content.of(tokens)
    assert (len(content), content.tokens.tolist()) == (3, [5, 6, 7])
    assert content.digest == hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
    assert content.prefix(2) == Content.of(tokens[:2]).digest != content.digest


CONTENTS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda x: Content.of(np.array(x, np.int32)))
SEGMENTS = st.builds(
    Segment,
    st.sampled_from([Kind.USER, Kind.ITEM, Kind.INSTRUCTION, Kind.PROBE]),
    st.none() | st.text(max_size=4) | st.integers(0, 9),
    CONTENTS,
    st.integers(0, 9),
    st.integers(0, 9),
)


@given(st.lists(SEGMENTS, max_size=8).map(tuple))
def test_prompts_are_plain_data_and_an_arrangement_loses_nothing(prompt: Prompt) -> None:
    assert msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt) == prompt
    for name in ("causal", "user_prefix", "item_prefix"):
        placed = arrange(prompt, LAYOUTS[name])
        assert msgspec.json.decode(msgspec.json.encode(placed), type=Prompt) == placed
        assert count_tokens(placed) == count_tokens(prompt) and len(placed) == len(prompt)
        assert {hash(msgspec.structs.replace(x, offset=0)) for x in placed} == set(map(hash, prompt))
