# SPDX-License-Identifier: Apache-2.0
"""A server that the tests of one file share; tests that stop, hold or break one start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.fakes import LiveServer


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server
