# SPDX-License-Identifier: Apache-2.0
"""Where the segments of a prompt stand: the table of BAT-19 (3), by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import PromptConfig, RankConfig
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import CAUSAL, ITEM_PREFIX, USER_PREFIX, Kind, Layout, SegmentedPrompt
from jgr.prompt.tokens import PromptBuilder, PromptError, semantic_id_tokenizer

USER, A, B = np.arange(3, dtype=np.int32), np.array([10, 11], np.int32), np.array([20, 21, 22], np.int32)
INSTRUCTION, PROBE = np.array([30, 31], np.int32), np.array([40], np.int32)


def places(prompt: SegmentedPrompt, layout: Layout) -> list[tuple[Kind, int, list[int]]]:
    return [
        (segment.kind, segment.number, list(range(segment.position, segment.position + len(segment.tokens))))
        for segment in prompt.arrange(layout)
    ]


def test_the_papers_positions() -> None:
    prompt = SegmentedPrompt(USER, INSTRUCTION, [A, B], span=4)
    assert prompt.tokens == 10
    assert places(prompt, ITEM_PREFIX) == [
        (Kind.ITEM, 1, [0, 1]),
        (Kind.ITEM, 2, [0, 1, 2]),
        (Kind.USER, 0, [4, 5, 6]),
        (Kind.INSTRUCTION, 3, [7, 8]),
    ]
    assert places(prompt, USER_PREFIX) == [
        (Kind.USER, 0, [0, 1, 2]),
        (Kind.ITEM, 1, [3, 4]),
        (Kind.ITEM, 2, [3, 4, 5]),
        (Kind.INSTRUCTION, 3, [7, 8]),
    ]


def test_probes_stand_behind_everything_in_their_items_segments() -> None:
    prompt = SegmentedPrompt(USER, INSTRUCTION, [A, B], PROBE, span=4)
    assert prompt.tokens == 12
    for layout in (ITEM_PREFIX, USER_PREFIX):
        assert places(prompt, layout)[-2:] == [(Kind.PROBE, 1, [9]), (Kind.PROBE, 2, [9])]


def test_a_prompt_without_items_is_plain_text() -> None:
    assert places(SegmentedPrompt(USER, INSTRUCTION), USER_PREFIX) == [
        (Kind.USER, 0, [0, 1, 2]),
        (Kind.INSTRUCTION, 1, [3, 4]),
    ]


def test_candidates_have_no_place_in_another_layout() -> None:
    with pytest.raises(ValueError, match="causal"):
        SegmentedPrompt(USER, INSTRUCTION, [A]).arrange(CAUSAL)


CATALOG = Catalog.build("xyz", [["<a>", "<p>"], ["<b>", "<p>"], ["<b>", "<q>"]], [{} for _ in "xyz"])


def segments(instruction: str) -> SegmentPrompts:
    rank = RankConfig(
        method="item_probe", item="{sid}", instruction=instruction, positive="<a>", negative="<b>"
    )
    return SegmentPrompts(rank, semantic_id_tokenizer(CATALOG), CATALOG)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_an_instruction_may_name_the_last_item(last: int) -> None:
    tokenizer = semantic_id_tokenizer(CATALOG)
    built = segments("<sid>{last}<bos>").prompt(USER, np.array([1, 0], np.int32), last)
    names = {0: ["<a>", "<p>"], 1: ["<b>", "<p>"], 2: ["<b>", "<q>"]}[last]
    assert built.behind.tolist() == [tokenizer.token_id(name) for name in ("<sid>", *names, "<bos>")]


def test_an_instruction_that_names_no_item_is_the_same_for_all() -> None:
    rows = np.array([2], np.int32)
    assert (
        segments("<sid>").prompt(USER, rows, 1).behind == segments("<sid>").prompt(USER, rows, 2).behind
    ).all()


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("", "must not be empty"),
        ("<sid>{last}{last}", "may occur once"),
        ("<sid>{Last}", r"rank\.instruction: unknown placeholder \{Last\}; it may hold \{last\} only"),
        ("<sid>{ last }", r"unknown placeholder \{ last \}"),
        ("<sid>{last", "expected '}'"),
    ],
)
def test_instructions_that_cannot_be(instruction: str, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        segments(instruction)


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (RankConfig(method="list_letter", item="{sid}", letters="<a>"), r"rank\.letters: must have \{n\}"),
        (
            RankConfig(method="item_probe", item="{sid}", probe="<sid>", positive="<a>", negative="<a>"),
            r"rank\.negative: must be another answer than rank\.positive, '<a>'",
        ),
    ],
)
def test_answers_that_are_one(rank: RankConfig, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        SegmentPrompts(rank, semantic_id_tokenizer(CATALOG), CATALOG)


def test_text_between_items_and_probes_hold_no_placeholder() -> None:
    tokenizer = semantic_id_tokenizer(CATALOG)
    with pytest.raises(PromptError, match=r"rank\.probe: unknown placeholder \{sid\}; it may hold none"):
        SegmentPrompts(
            RankConfig(method="item_probe", item="{sid}", probe="<sid>{sid}", positive="<a>", negative="<b>"),
            tokenizer,
            CATALOG,
        )
    with pytest.raises(
        PromptError, match=r"prompt\.separator: unknown placeholder \{title\}; it may hold none"
    ):
        PromptBuilder(PromptConfig(separator="<sid>{title}"), tokenizer, CATALOG)
