# SPDX-License-Identifier: Apache-2.0
"""Reads the texts of requests beside the event loop: their tokens, and the prototypes of a library near to these.

Both take milliseconds for a long history, in which the loop would start no run and send no answer.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.prompt.segments import Part
from jgr.prompt.tokens import PromptError, Tokenizer
from jgr.serving.decoders.library import Found, Library
from jgr.serving.errors import RequestError, invalid

Int32 = npt.NDArray[np.int32]

_THREADS = 2


class Read(NamedTuple):
    """A request's texts, in the order of its history: tokens [t] int32 of each, at most as many as the prompt takes,
    and what was found for them; None: there is no library."""

    reviews: tuple[Int32, ...]
    found: tuple[Found, ...] | None


class TextReader:
    """tokenizer: None where a model has none, and takes no texts. review_tokens: the most of one event's text that a
    prompt takes; 0: prompts have no place for texts. max_bytes: the most of a request. max_waiting: requests that are
    read at a time. library: None where there is none."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        review_tokens: int,
        *,
        max_bytes: int,
        max_waiting: int,
        library: Library | None = None,
    ) -> None:
        self._tokenizer, self._review_tokens = tokenizer, review_tokens
        self._max_bytes, self._max_waiting, self.library = max_bytes, max_waiting, library
        self._waiting = 0
        self.threads = ThreadPoolExecutor(_THREADS, "jgr-texts")

    async def read(self, request: Any) -> Read | None:
        """What a request's texts say; None: it has none. RequestError for texts that are not taken, or too many at a
        time."""
        texts: list[str] | None = request.history_texts
        if texts is None:
            return None
        self._check(texts, len(request.history))
        if self._waiting >= self._max_waiting:
            raise RequestError("overloaded", "too many requests with texts are waiting; try again later")
        self._waiting += 1
        try:
            reading = asyncio.get_running_loop().run_in_executor(self.threads, self._read, texts)
        except RuntimeError:  # the threads are gone
            self._waiting -= 1
            raise RequestError("unavailable", "the server is stopping") from None
        try:
            return await reading
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads, once they have read what they were given."""
        self.threads.shutdown(wait=False)

    def _check(self, texts: list[str], events: int) -> None:
        field = "history_texts"
        if not self._review_tokens or self._tokenizer is None:
            raise invalid(field, f"{field}: this server's prompts have no {{review}} for texts (prompt.item)")
        if len(texts) != events:
            raise invalid(field, f"{field} has {len(texts)} texts; history has {events} items")
        total = 0
        for at, text in enumerate(texts):
            try:
                total += len(text.encode())
            except UnicodeEncodeError:
                raise invalid(f"{field}[{at}]", f"{field}[{at}] is not text that UTF-8 can write") from None
            if total > self._max_bytes:
                raise invalid(field, f"{field} has more than {self._max_bytes} bytes, all texts together")

    def _read(self, texts: list[str]) -> Read:
        assert self._tokenizer is not None
        try:
            encoded = self._tokenizer.encode_untrusted(texts)
        except PromptError as cause:
            raise invalid("history_texts", f"history_texts: {cause}") from None
        reviews = tuple(np.array(ids[: self._review_tokens], np.int32) for ids in encoded)
        library = self.library
        return Read(reviews, None if library is None else tuple(map(library.find, reviews)))


def found_in_prompt(found: list[Found], parts: tuple[Part, ...]) -> Found:
    """What was found for all tokens of a history that has these parts. found: of its reviews, those with tokens."""
    left = iter(found)
    numbers: list[npt.NDArray[np.int64]] = []
    cosines: list[npt.NDArray[np.float32]] = []
    for part in parts:
        of = next(left) if part.kind == "review" else None
        numbers.append(np.full(part.tokens, -1, np.int64) if of is None else of.prototypes[: part.tokens])
        cosines.append(np.full(part.tokens, -1, np.float32) if of is None else of.cosines[: part.tokens])
    return Found(np.concatenate(numbers), np.concatenate(cosines))
