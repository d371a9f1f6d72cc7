# SPDX-License-Identifier: Apache-2.0
"""What tests of versions share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def collected() -> None:
    """What earlier tests left is collected, and what they keep is left alone from then on: after a thousand tests that
    is millions of objects, which every `gc.collect` would look at for seconds. They stay frozen, so that the next file
    looks only at what came since."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_collector(collected: None) -> Iterator[None]:
    """A cycle would keep device memory until the collector comes by, so nothing may need it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
