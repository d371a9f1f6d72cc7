# SPDX-License-Identifier: Apache-2.0
"""Texts of a file as the reviews that a library is made of."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.fields import UserError
from jgr.files import read_lines
from jgr.prompt.tokens import Tokenizer

Int32 = npt.NDArray[np.int32]
_PARTS = 1 << 20


class Corpus(NamedTuple):
    """Reviews as tokens, [t] int32 each: those that prototypes come from, and others to measure what these cover."""

    reviews: list[Int32]
    held_out: list[Int32]


def is_held_out(writer: str, share: float) -> bool:
    """Whether what somebody wrote is held out, where this share is. It follows from the name alone."""
    return zlib.crc32(writer.encode()) % _PARTS < share * _PARTS


def read_corpus(
    path: Path,
    tokenizer: Tokenizer,
    review_tokens: int,
    held_out: float,
    text_field: str = "text",
    user_field: str = "user_id",
) -> Corpus:
    """The texts of a file of JSON lines. review_tokens: the most of each. held_out: the share of the writers whose
    texts are; a line without a writer, or with null, counts as one of its own. UserError names the line that has no
    text."""
    kept: tuple[list[str], list[str]] = ([], [])
    for number, line in read_lines(path, UserError):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not a JSON object: {error}") from None
        text = fields.get(text_field)
        if not isinstance(text, str):
            raise UserError(f"{path}:{number}: has no text in the field {text_field!r}")
        writer = fields.get(user_field)
        kept[is_held_out(str(number if writer is None else writer), held_out)].append(text)
    reviews, others = (
        [np.array(ids[:review_tokens], np.int32) for ids in tokenizer.encode_untrusted(texts) if ids]
        for texts in kept
    )
    return Corpus(reviews, others)
