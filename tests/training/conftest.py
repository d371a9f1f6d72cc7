# SPDX-License-Identifier: Apache-2.0
"""What every test of training relies on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.shortcuts import without_curves


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Trainings draw no curves, but for those of a test that puts the drawing back."""
    with without_curves():
        yield
