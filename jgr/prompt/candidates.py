# SPDX-License-Identifier: Apache-2.0
"""Prompts with candidates in them, from templates (BAT-1).

The user's segment is the prompt's text up to the end of the history, which is what `recommend` reads too. A candidate's
tokens never depend on its place in the list, so that its keys and values can be reused. A probe is a question about one
candidate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.config import RankConfig
from jgr.prompt.segments import Content, Prompt, make_prompt
from jgr.prompt.tokens import (
    PromptError,
    Tokenizer,
    encode_fixed,
    encode_items,
    encode_template,
    level_tokens,
    parse_template,
)

Int32 = npt.NDArray[np.int32]

LAST = -1
"""Stands in an instruction's tokens for one token of the semantic id of the history's last item."""


LISTS = ("list_letter", "list_generation")
"""Methods that know a candidate by the letter of its place in the list."""


class SegmentPrompts:
    """The prompts of a catalog's candidates.

    instruction, probe: [t] int32; the instruction has LAST for {last}, the probe is empty where none is asked. labels:
    what stands before the candidates in plain order, by their places; empty: nothing does.
    max_position: number of positions that the model was made for. writes_lists: whether the model writes the letters of
    all candidates after the prompt. Raises PromptError, which names the field that does
    not fit the tokenizer or the catalog.
    """

    def __init__(
        self,
        rank: RankConfig,
        tokenizer: Tokenizer | None,
        catalog: Catalog,
        max_position: int = 2**30,
    ) -> None:
        self.max_position = max_position
        self._contents: dict[int, Content] = {}
        self._span, self._method = rank.item_span, rank.method
        self.writes_lists = rank.method == "list_generation"
        if rank.method == "item_token" and catalog.depth != 1:
            raise PromptError(
                f"rank.method: item_token needs a catalog whose semantic ids are one token, not {catalog.depth}; "
                "item_probe takes any"
            )
        if rank.method == "item_token" and not rank.item.endswith("{sid}"):
            raise PromptError("rank.item: must end with {sid}, which item_token scores")
        flat, lengths = encode_items("rank.item", rank.item, tokenizer, catalog)
        self._flat, self._ends, self._lengths = flat, np.cumsum(lengths), lengths
        self.instruction = self._encode_instruction(rank.instruction, tokenizer, catalog)
        probe = rank.probe if rank.method == "item_probe" else ""
        self.probe = encode_fixed("rank.probe", probe, tokenizer)
        self.labels = _labels(rank, tokenizer)
        if rank.method == "item_probe" and not len(self.probe):
            raise PromptError("rank.probe: must not be empty")
        self._columns = self._answer_columns(rank, tokenizer, catalog)
        self.largest_token = max(
            int(part.max(initial=0))
            for part in (
                flat,
                self.instruction,
                self.probe,
                *self._columns,
                *(label.tokens for label in self.labels),
            )
        )

    def item(self, row: int) -> Int32:
        """The tokens of an item, [t] int32, at most item_span; a longer one loses the end of its text, not its last
        token."""
        start, end = self._ends[row] - self._lengths[row], self._ends[row]
        tokens = self._flat[start:end]
        return tokens if len(tokens) <= self._span else np.append(tokens[: self._span - 1], tokens[-1])

    @property
    def item_lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each item of the catalog, [n]."""
        return np.minimum(self._lengths, self._span)

    def content(self, row: int) -> Content:
        """The item's tokens, made and hashed once."""
        content = self._contents.get(row)
        if content is None:
            content = self._contents[row] = Content.of(self.item(row))
        return content

    def prompt(
        self, user: Content, rows: Int32, last: int, key: str | None = None, *, labelled: bool = False
    ) -> Prompt:
        """The prompt of a history and candidates. rows: [c] int32; last: the history's last row; key: of the user;
        labelled: whether the labels stand in it."""
        instruction = self.instruction
        if self._ids is not None:
            instruction = instruction.copy()
            instruction[instruction == LAST] = self._ids[last]
        items = ((row, self.content(row)) for row in rows.tolist())
        probe = self.probe if len(self.probe) else None
        labels = self.labels if labelled else ()
        return make_prompt(user, instruction, items, probe, key=key, room=self._span, labels=labels)

    def columns(self, rows: Int32) -> tuple[Int32, Int32 | None]:
        """The tokens whose logits score candidates, [c] int32, and those that count against them."""
        if self._method == "item_token":
            return self._columns[0][rows], None
        if self._method in LISTS:
            return self._columns[0][: len(rows)], None
        positive, negative = (np.repeat(token, len(rows)) for token in self._columns)
        return positive, negative

    def _encode_instruction(self, text: str, tokenizer: Tokenizer | None, catalog: Catalog) -> Int32:
        self._ids: Int32 | None = None  # [n, depth]
        parts: list[Int32] = []
        for before, field in parse_template("rank.instruction", text, known=["last"]):
            parts.append(encode_template("rank.instruction", before, tokenizer))
            if field is None:
                continue
            if self._ids is not None:
                raise PromptError("rank.instruction: {last} may occur once")
            tokens = level_tokens(catalog, tokenizer, np.iinfo(np.int32).max)
            self._ids = np.stack([of[catalog.codes[:, level]] for level, of in enumerate(tokens)], axis=1)
            parts.append(np.full(catalog.depth, LAST, np.int32))
        if not any(map(len, parts)):
            raise PromptError("rank.instruction: must not be empty")
        return np.concatenate(parts)

    def _answer_columns(
        self, rank: RankConfig, tokenizer: Tokenizer | None, catalog: Catalog
    ) -> tuple[Int32, ...]:
        if rank.method == "item_token":
            (tokens,) = level_tokens(catalog, tokenizer, np.iinfo(np.int32).max)
            return (tokens[catalog.codes[:, 0]],)
        if rank.method in LISTS:
            if "{n}" not in rank.letters:
                raise PromptError("rank.letters: must have {n}, the candidate's number")
            names = [letter(rank, n) for n in range(rank.candidates)]
            return (np.array([_one_token("rank.letters", name, tokenizer) for name in names], np.int32),)
        answers = {"rank.positive": rank.positive, "rank.negative": rank.negative}
        if rank.positive == rank.negative:
            raise PromptError(f"rank.negative: must be another answer than rank.positive, {rank.positive!r}")
        return tuple(
            np.array([_one_token(name, text, tokenizer)], np.int32) for name, text in answers.items()
        )


def _labels(rank: RankConfig, tokenizer: Tokenizer | None) -> tuple[Content, ...]:
    if not rank.label:
        return ()
    parts = list(parse_template("rank.label", rank.label, known=["n"]))
    if not any(field for _, field in parts):
        raise PromptError("rank.label: must have {n}, the candidate's number")

    def label(place: int) -> Content:
        text = "".join(before + (str(place) if field else "") for before, field in parts)
        return Content.of(encode_template("rank.label", text, tokenizer))

    return tuple(map(label, range(rank.candidates)))


def letter(rank: RankConfig, place: int) -> str:
    """The token of the candidate in this place of a list, from 0 on."""
    return rank.letters.replace("{n}", str(place))


def _one_token(name: str, text: str, tokenizer: Tokenizer | None) -> int:
    tokens = encode_template(name, text, tokenizer)
    if len(tokens) != 1:
        raise PromptError(f"{name}: {text!r} must be one token, it is {len(tokens)}")
    return int(tokens[0])
