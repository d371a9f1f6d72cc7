# SPDX-License-Identifier: Apache-2.0
"""The coverage of a library, counted by hand where that can be done: tokens are alike only where they are the same."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import rcllm_library
from benchmarks.titles import title
from jgr.library.embeddings import BUCKET

KEPT = ["the strings sound warm", "the strings break", "a warm sound " * 30] * 3
HELD_OUT = {"u1": ["the strings sound warm"], "u2": ["nothing is alike here, zyx", "a warm sound " * 30]}


def test_coverage_is_the_share_of_words_in_places_that_were_seen() -> None:
    rows = list(rcllm_library.measured(KEPT, HELD_OUT, 300))
    tokenizer = rcllm_library.train_tokenizer(KEPT, 300)

    def places(texts: list[str]) -> list[tuple[int, int]]:
        return [
            (t, at // BUCKET)
            for each in rcllm_library.tokens_of(tokenizer, texts)
            for at, t in enumerate(each)
        ]

    seen = set(places(KEPT))
    per_user = [[place in seen for place in places(texts)] for texts in HELD_OUT.values()]
    covered = np.mean([one for user in per_user for one in user])
    *sizes, found = rows
    assert sizes[-1]["prototypes"] == len(seen)
    assert sizes[-1]["at_99"] == pytest.approx(covered, abs=1e-3)
    assert 0 < sizes[0]["at_99"] < sizes[-1]["at_99"] < 1
    low, high = sizes[-1]["interval_at_99"]
    assert low == pytest.approx(min(map(np.mean, per_user)), abs=1e-3)
    assert high == pytest.approx(1)
    assert "held_out" not in found, "a token is a prototype, or like none"
    claims = rcllm_library.claims(rows)
    assert [claim.value for claim in claims] == [sizes[-1]["at_99"], found["noisy"]["recall"]]
    assert all(title(claim.to_json()) for claim in claims)
