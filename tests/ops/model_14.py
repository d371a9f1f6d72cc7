# SPDX-License-Identifier: Apache-2.0
"""The tokens of MODEL-14 prompts, spelled out in numpy for the tests of both attention ops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jgr.prompt.layouts import Kind, Tokens, describe


def single_user(
    contextual: int,
    history: int,
    targets: int,
    *,
    max_attention: int = 0,
    full_rows: int = 0,
    request: int = 0,
) -> tuple[Tokens, npt.NDArray[np.int32] | None]:
    """MODEL-14: contextual slots, a history, and one token per target, each in a segment of its own.

    Returns the tokens, and where max_attention > 0 the window of each: rows see at most that far back, but for the last
    `full_rows` of the history, and targets where there are such rows.
    """
    kinds = [Kind.CONTEXT, Kind.USER, *[Kind.ITEM] * targets]
    tokens = describe(kinds, [contextual, history, *[1] * targets], request=request)
    target_id = history + 1 if contextual else history
    ids = np.clip(tokens.order - contextual + 1 if contextual else tokens.order, 0, target_id).astype(
        np.int32
    )
    tokens = tokens._replace(order=ids)
    if max_attention == 0:
        return tokens, None
    full = (full_rows > 0) & (ids >= target_id - full_rows)
    return tokens, np.where(full, np.int32(2**30), np.int32(max_attention))
