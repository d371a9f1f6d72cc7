# SPDX-License-Identifier: Apache-2.0
"""A visit of a page in Chromium, and the model "other", whose titles would be markup.

After each visit: nothing was thrown, the console has no error but refusals that the test asked for, no other host was
asked, and the key is in no address and no storage.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.decoders.serve import decoder_engine
from jgr.serving.policies.batching import make_profiles
from jgr.serving.versions.deployment import Deployment
from tests.serving.fakes import CATALOG, ITEMS, PATIENCE_S, FakeExecutor, LiveServer, make_config

ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # for root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""What makes a browser show a page, and ask nobody for anything of its own."""
KEY, BASE = "s3cret-k3y", "/shop/jgr"
BEARER = {"authorization": f"Bearer {KEY}"}
OWNED = "document.title='owned'"
TITLES = {item: f'{item} <img src=x onerror="{OWNED}"><script>{OWNED}</script>' for item in ITEMS}
BRAND = "</td><b>bold</b>"
REMOVE, NONE, STEP = "\u00d7", "\u2013", " \u203a "
"""What the page writes on a button that removes, in place of a number that is not there, and between levels."""


def other_model() -> Deployment:
    symbols = [
        [names[code] for names, code in zip(CATALOG.symbols, row, strict=True)] for row in CATALOG.codes
    ]
    metadata = [{"title": TITLES[item], "brand": BRAND} for item in ITEMS]
    catalog = Catalog.build(ITEMS, symbols[::-1], metadata)
    config = make_config("model.name=other")
    prompts = PromptBuilder(config.prompt, semantic_id_tokenizer(catalog), catalog)
    executor = FakeExecutor(make_profiles(config.profiles), bias=-7.5)
    engine = decoder_engine("other", catalog, PrefixTree.build(catalog.codes), prompts, executor, config)
    return Deployment(engine, config.catalog, None)


class Visit:
    """A page of the server in a context of its own, and what went on there. refused: statuses that the test expects."""

    def __init__(self, browser: Any, server: LiveServer) -> None:
        self.server = server
        self.context = browser.new_context(reduced_motion="reduce")
        self.context.set_default_timeout(1000 * PATIENCE_S)
        self.page = self.context.new_page()
        self.refused: set[int] = set()
        self._faults: list[str] = []
        self._asked: list[str] = []
        self.page.on("pageerror", lambda error: self._faults.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self._faults.append(said.text))
        self.page.on("request", lambda request: self._asked.append(request.url))

    def open(self, path: str = "/ui", key: str = KEY) -> Any:
        """The page, once it knows the models."""
        page = self.page
        page.goto(f"http://127.0.0.1:{self.server.port}{BASE}{path}")
        if path == "/ui" and key:
            self.refused.add(401)  # before the key is there
            page.get_by_label("API key").fill(key)
            page.get_by_label("API key").press("Tab")
        return page

    def ask(self, path: str, name: str = "Ask") -> tuple[Any, Any]:
        """Press the button: the body that the page sent to the path, and the answer of the API to the same body."""
        with self.page.expect_request(f"**{path}") as sent:
            self.page.get_by_role("button", name=name, exact=True).click()
        body = sent.value.post_data_json
        return body, self.server.call(path, body, **BEARER).json

    def check(self) -> None:
        kept = "JSON.stringify([location.href, {...localStorage}, {...sessionStorage}, document.cookie])"
        assert KEY not in self.page.evaluate(kept)
        assert self.page.evaluate("indexedDB.databases()") == []
        assert self.context.cookies() == []
        for url in self._asked:
            host = f"http://127.0.0.1:{self.server.port}{BASE}/"
            assert url.startswith((host, "data:,")) and KEY not in url, url
        refusal = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")
        faults = [
            text
            for text in self._faults
            if not ((found := refusal.match(text)) and int(found[1]) in self.refused)
        ]
        assert faults == []


def fill(page: Any, picker: str, text: str) -> None:
    """Paste ids into a list of items."""
    field = page.get_by_role("combobox", name=picker)
    field.fill(text)
    field.press("Enter")


def rows(place: Any) -> list[tuple[int, str, float]]:
    """(rank, item id, score) of the items in a table."""
    place.locator("table.items").wait_for()
    found = []
    for row in place.locator("table.items tbody tr").all():
        rank, _, score = row.locator("td").all_text_contents()[:3]
        found.append((int(rank), row.get_attribute("data-item"), float(score)))
    return found


def told(answer: Any) -> list[tuple[int, str, float]]:
    return [
        (item["rank"], item["item_id"], pytest.approx(item["score"], rel=1e-3)) for item in answer["items"]
    ]
