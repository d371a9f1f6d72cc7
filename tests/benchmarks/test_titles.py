# SPDX-License-Identifier: Apache-2.0
"""Every claim has a title in plain words, which tells it from all other claims of its result."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.harness import RESULTS, Claim
from benchmarks.titles import TITLES, shown, title, unit

CLAIMS = [
    (path.stem, claim)
    for path in sorted(RESULTS.glob("*.json"))
    for claim in json.loads(path.read_text())["claims"]
]
LONGEST = 150
SHORTHAND = re.compile(r"\b(abc|ab|ac|up|ip|re|hrcs|dso|pda|fke|ml1m)\b|-over-|[a-z]-[a-z]+-[a-z]+-[a-z]")
"""Names that only the papers' readers know, and words of ids."""


def test_every_claim_has_a_title_that_a_newcomer_can_read() -> None:
    wrong = []
    for result, claim in CLAIMS:
        words = title(claim)
        if words is None or not 25 <= len(words) <= LONGEST or SHORTHAND.search(words) or "{" in words:
            wrong.append(f"{result}: {claim['id']}: {words}")
    assert wrong == [], "give them titles in benchmarks/titles.py"


def test_no_two_claims_of_a_result_have_one_title() -> None:
    for result in {result for result, _ in CLAIMS}:
        titles = [title(claim) for of, claim in CLAIMS if of == result]
        assert len(set(titles)) == len(titles), result


def test_one_pattern_says_what_an_id_means() -> None:
    """A pattern that another one hides would be a title that nobody sees."""
    several = {}
    for _, claim in CLAIMS:
        matching = [pattern for pattern, _ in TITLES if re.fullmatch(pattern, claim["id"])]
        least = 0 if "title" in claim else 1
        if not least <= len(matching) <= 1 and not claim["id"].startswith("hstu-largest-error"):
            several[claim["id"]] = matching
    assert several == {}


@pytest.mark.parametrize(
    ("id", "words"),
    [
        (
            "abc-over-ac-books-1m-returning-users-paper-1.01",
            "Requests per second of the whole of BAT over BAT without replicating hot items (paper: 1.01); a million "
            "books, users who come back",
        ),
        (
            "memory-of-a-4b-model-prompt-3072-beam-256",
            "Device memory of a 4B generator, compiled for an H200 and not run (target: xGR under load); "
            "3,072 tokens, 256 beams",
        ),
        (
            "hstu-largest-error-of-114-golden-arrays",
            "Largest difference of our HSTU from its authors' code over 114 arrays",
        ),
        ("of-no-pattern", None),
    ],
)  # fmt: skip
def test_the_parts_of_an_id_become_words(id: str, words: str | None) -> None:
    assert title({"id": id}) == words
    assert shown({"id": id}) == words or shown({"id": id}) == "of no pattern"


def test_a_claims_own_title_comes_first_and_a_ratio_is_told_in_times() -> None:
    claim = Claim("memory-unexplained", 2.0, "x", "higher", 1.0, title="Own words")
    assert title(claim.to_json()) == "Own words"
    assert unit(claim.to_json()) == "times"
    assert unit({"unit": "ms"}) == "ms"
