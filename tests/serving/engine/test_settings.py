# SPDX-License-Identifier: Apache-2.0
"""What of a process's settings makes its answers, by a short name."""

from __future__ import annotations

import pytest

from jgr.config import Config, override
from jgr.serving.engine.settings import settings_digest


def digest(*given: str) -> str:
    return settings_digest(override(Config(), *given))


@pytest.mark.parametrize(
    "given",
    [
        "prompt.max_items=7",
        "server.unknown_items=reject",
        "server.max_history=7",
        "server.max_candidates=7",
        "server.explain=true",
    ],
)
def test_what_changes_an_answer_or_a_refusal_changes_the_name(given: str) -> None:
    assert digest(given) != digest()
    field = given.partition("=")[0]
    section, name = field.split(".")
    usual = getattr(getattr(Config(), section), name)
    assert digest(given, f"{field}={str(usual).lower()}") == digest()


@pytest.mark.parametrize(
    "given", ["server.port=7", "fleet.replicas=3", "server.journal=a", "model.path=a", "catalog.path=a"]
)
def test_where_and_how_it_is_served_does_not(given: str) -> None:
    assert digest(given) == digest()
