# SPDX-License-Identifier: Apache-2.0
"""Prompts with candidates from templates: the instruction's last item, and templates that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import PromptConfig, RankConfig
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import Kind
from jgr.prompt.segments import Content, Prompt, of_kind
from jgr.prompt.tokens import PromptBuilder, PromptError, semantic_id_tokenizer

USER = Content.of(np.arange(3, dtype=np.int32))


def last_text(prompt: Prompt) -> list[int]:
    (instruction,) = of_kind(prompt, Kind.INSTRUCTION)
    return instruction.tokens.tolist()


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
    assert last_text(built) == [tokenizer.token_id(name) for name in ("<sid>", *names, "<bos>")]


def test_an_instruction_that_names_no_item_is_the_same_for_all() -> None:
    rows = np.array([2], np.int32)
    texts = [last_text(segments("<sid>").prompt(USER, rows, last)) for last in (1, 2)]
    assert texts[0] == texts[1]


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
