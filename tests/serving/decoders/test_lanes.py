# SPDX-License-Identifier: Apache-2.0
"""How many batches run side by side where nobody has said so."""

from __future__ import annotations

import jax
import pytest

from jgr.config import BatchingConfig
from jgr.serving.decoders.loading import lanes


@pytest.mark.parametrize(
    ("device", "cached", "settings", "expected"),
    [
        ("cpu", False, {}, (2, 1)),
        ("cpu", True, {}, (1, 2)),  # packed batches keep their order
        ("gpu", False, {}, (1, 2)),
        ("gpu", True, {}, (1, 2)),
        ("cpu", False, {"streams": 1}, (1, 2)),
        ("cpu", False, {"in_flight": 3}, (2, 3)),
        ("gpu", False, {"streams": 4, "in_flight": 1}, (4, 1)),
    ],
)
def test_the_device_says_what_suits_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    cached: bool,
    settings: dict[str, int],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert lanes(BatchingConfig(**settings), cached) == expected
