# SPDX-License-Identifier: Apache-2.0
"""Each target that is missed has one reason, and no reason is left of a target that is reached."""

from __future__ import annotations

import json

from benchmarks.harness import RESULTS
from benchmarks.misses import MISSES, missed_by

CLAIMS = [
    claim for path in sorted(RESULTS.glob("*.json")) for claim in json.loads(path.read_text())["claims"]
]


def test_each_missed_claim_has_one_reason() -> None:
    reasons = {
        claim["id"]: [miss.what for miss in MISSES if missed_by(miss, [claim])]
        for claim in CLAIMS
        if not claim["holds"]
    }
    assert {id: found for id, found in reasons.items() if len(found) != 1} == {}, (
        "give each of them one reason in benchmarks/misses.py"
    )


def test_each_reason_is_of_a_missed_claim() -> None:
    assert [miss.what for miss in MISSES if not missed_by(miss, CLAIMS)] == [], "remove them"


def test_no_two_reasons_have_one_name() -> None:
    assert len({miss.what for miss in MISSES}) == len(MISSES)
