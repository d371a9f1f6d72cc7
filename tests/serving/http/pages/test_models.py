# SPDX-License-Identifier: Apache-2.0
"""What the page /ui says of the models, in Chromium, while they start and once they were loaded anew; and names whose
letters run from right to left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.fakes import PATIENCE_S, LiveServer

pytestmark = pytest.mark.chromium

RIGHT_TO_LEFT = "\u0644\u0639\u0628\u0629 7"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    page.clock.install()
    yield page
    context.close()


def told_at_first(page: Any, **fields: str) -> None:
    """Let the server's first answer about its model have these fields; later ones are its own."""
    answers: list[Any] = []

    def fulfil(route: Any) -> None:
        response = route.fetch()
        content = response.json()
        if not answers:
            content["data"][0].update(fields)
        answers.append(content)
        route.fulfill(response=response, json=content)

    page.route("**/v1/models", fulfil)


def ask(page: Any, history: str) -> None:
    page.get_by_label("Items to return").fill("2")
    field = page.get_by_role("combobox", name="History, oldest first")
    field.fill(history)
    field.press("Enter")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("table.items").wait_for()


def test_a_model_that_starts_is_asked_after_until_it_is_ready(page: Any) -> None:
    from playwright.sync_api import expect

    with LiveServer() as server:
        told_at_first(page, state="starting")
        page.goto(f"http://127.0.0.1:{server.port}/ui")
        expect(page.locator("#server")).to_have_text("jgr (starting)")
        page.clock.fast_forward(2000)
        expect(page.locator("#server")).to_have_text("jgr (ready)")


def test_the_version_that_answers_is_the_one_that_is_shown(page: Any) -> None:
    from playwright.sync_api import expect

    with LiveServer() as server:
        told_at_first(page, version="jgr@before")
        page.goto(f"http://127.0.0.1:{server.port}/ui")
        expect(page.locator("#server")).to_have_text("jgr@before (ready)")
        ask(page, "a")
        expect(page.locator("#server")).to_have_text("jgr (ready)")


def test_an_id_stands_behind_a_name_that_runs_from_right_to_left(page: Any) -> None:
    def fulfil(route: Any) -> None:
        response = route.fetch()
        content = response.json()
        for item in content["items"]:
            item["metadata"] = {"title": RIGHT_TO_LEFT}
        route.fulfill(response=response, json=content)

    with LiveServer() as server:
        page.route("**/v1/recommend", fulfil)
        page.goto(f"http://127.0.0.1:{server.port}/ui")
        ask(page, "a")
        # Without isolation the number of the name and the id are one run, and stand in each other's place.
        page.locator("#answer .name").first.evaluate("(name) => name.nextSibling.textContent = '8'")
        ends = page.evaluate(
            "() => { const name = document.querySelector('#answer .name'); "
            "return [name.getBoundingClientRect().right, name.nextSibling.getBoundingClientRect().left]; }"
        )
        assert ends[0] <= ends[1]
