# SPDX-License-Identifier: Apache-2.0
"""What tests of versions share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def without_collector() -> Iterator[None]:
    """A cycle would keep device memory until the collector comes by, so nothing may need it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
