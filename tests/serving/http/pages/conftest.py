# SPDX-License-Identifier: Apache-2.0
"""A server below a base path, with a key, and a browser; each file starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.debian import CHROMIUM
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.serving.http.pages.browsing import ARGUMENTS, BASE, KEY, Visit, other_model


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = (
        f"server.api_key={KEY}",
        "server.open_ui=true",
        "server.open_docs=true",
        f"server.base_path={BASE}",
    )
    with LiveServer(*settings, more=[other_model()]) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, server: LiveServer) -> Iterator[Visit]:
    visit = Visit(browser, server)
    yield visit
    visit.check()
    visit.context.close()
