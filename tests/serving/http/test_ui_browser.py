# SPDX-License-Identifier: Apache-2.0
"""The pages /ui and /docs in Chromium, over a live server below a base path, with a key.

What the page shows is held against what the API answers to the test itself. After each test: nothing was thrown, the
console has no error but refusals that the test asked for, no other host was asked, and the key is in no address and no
storage. Model "other" has the items of fakes.CATALOG under other semantic ids, with titles that would be markup.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.features.cache import Counts
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.decoders.serve import decoder_engine
from jgr.serving.engine.metrics import ENTRY_EVENTS, Metrics, documentation, render
from jgr.serving.policies.batching import make_profiles
from jgr.serving.versions.deployment import Deployment
from tests.debian import CHROMIUM
from tests.serving.fakes import CATALOG, ITEMS, FakeExecutor, LiveServer, make_config
from tests.serving.http.test_ui import FOLDER
from tools.ui_pictures import ARGUMENTS

pytestmark = pytest.mark.chromium

KEY, BASE = "s3cret-k3y", "/shop/jgr"
BEARER = {"authorization": f"Bearer {KEY}"}
OWNED = "document.title='owned'"
TITLES = {item: f'{item} <img src=x onerror="{OWNED}"><script>{OWNED}</script>' for item in ITEMS}
BRAND = "</td><b>bold</b>"
WIDE = 128
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
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page of the server in a context of its own, and what went on there. refused: statuses that the test expects."""

    def __init__(self, browser: Any, server: LiveServer) -> None:
        self.server = server
        self.context = browser.new_context(reduced_motion="reduce")
        self.context.set_default_timeout(10_000)
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


@pytest.fixture
def visit(browser: Any, server: LiveServer) -> Iterator[Visit]:
    visit = Visit(browser, server)
    yield visit
    visit.check()
    visit.context.close()


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


def test_recommended_items_are_those_of_the_api_and_markup_stays_text(visit: Visit) -> None:
    from playwright.sync_api import expect

    page = visit.open()
    visit.refused.add(404)  # /v1/explain, which is off
    page.locator("[name=model]").select_option("other")
    page.get_by_label("User id").fill("u1")
    fill(page, "History, oldest first", "a, d")
    history = page.get_by_role("list", name="History, oldest first").locator("li")
    expect(history).to_have_text([f"{TITLES['a']}{REMOVE}", f"{TITLES['d']}{REMOVE}"])
    page.get_by_label("Items to return").fill("4")
    page.get_by_label("Beam width", exact=True).fill("5")
    page.get_by_label("Deadline:").fill("13")
    expect(page.locator("#deadline-told")).to_have_text("10000 ms")
    body, answer = visit.ask("/v1/recommend")
    assert body == {
        "history": ["a", "d"], "include_metadata": True, "explain": True, "model": "other", "user_id": "u1",
        "top_k": 4, "beam_width": 5, "deadline_ms": 10000, "exclude_history": True,
    }  # fmt: skip
    assert rows(page.locator("#answer")) == told(answer) and len(answer["items"]) == 4
    names = [TITLES[item["item_id"]] for item in answer["items"]]
    expect(page.locator("#answer .name")).to_have_text(names)
    expect(page.locator("#answer .metadata").first).to_have_text(f"brand {BRAND}")
    costs = page.locator("#answer .costs").text_content()
    tokens = answer["usage"]["prompt_tokens"]
    assert "other" in costs and f"{tokens} tokens" in costs
    assert page.title() == "jgr" and page.locator("img, main script, #answer b").count() == 1, (
        "the time is in a <b>"
    )
    expect(page.locator("#beams")).to_contain_text("--set server.explain=true")
    expect(page.locator("#reuse")).to_contain_text(
        f"0 of {tokens} tokens came from the cache, {tokens} were computed."
    )

    # The user's history comes back with the user, and an answer's item goes into it.
    page.get_by_role("button", name=f"Add {answer['items'][0]['item_id']} to the history").click()
    expect(history).to_have_count(3)
    page.get_by_label("User id").fill("u1")
    page.get_by_role("button", name="Clear: History, oldest first").click()
    expect(history).to_have_count(0)
    page.get_by_label("User id").fill("u2")
    page.get_by_label("User id").press("Tab")
    page.get_by_label("User id").fill("u1")
    page.get_by_label("User id").press("Tab")
    expect(history).to_have_text([f"{TITLES['a']}{REMOVE}", f"{TITLES['d']}{REMOVE}"])


def test_items_are_picked_and_filters_set_by_the_keyboard_alone(visit: Visit) -> None:
    from playwright.sync_api import expect

    page = visit.open()
    visit.refused.add(404)
    field = page.get_by_role("combobox", name="History, oldest first")
    field.focus()
    page.keyboard.type("title of b")
    options = page.get_by_role("listbox", name="Items found").get_by_role("option")
    expect(options).to_have_text(["title of bb", "title of b2b2"])
    page.keyboard.press("ArrowUp")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    expect(field).to_have_attribute("aria-activedescendant", str(options.nth(1).get_attribute("id")))
    page.keyboard.press("Enter")
    expect(page.get_by_role("list", name="History, oldest first").locator("li")).to_have_text(
        [f"title of b2{REMOVE}"]
    )
    expect(field).to_have_attribute("aria-expanded", "false")
    page.keyboard.type("zzz")
    page.keyboard.press("Enter")
    expect(page.locator(".chips .unknown")).to_have_attribute("title", "zzz: not in the catalog")
    page.locator("summary", has_text="Filters").press("Enter")
    for picker, item in (("Leave out", "a"), ("Banned", "c"), ("Only these", "a d 7")):
        fill(page, picker, item)
    page.get_by_label("Items to return").fill("3")
    page.locator("summary", has_text="More").press("Enter")
    page.get_by_label("Priority").select_option("batch")
    page.get_by_label("Further fields").fill('{"exclude_history": false}')
    body, answer = visit.ask("/v1/recommend")
    assert body["filters"] == {"exclude": ["a"], "deny": ["c"], "allow": ["a", "d", "7"]}
    assert (body["history"], body["priority"], body["exclude_history"]) == (["b2", "zzz"], "batch", False)
    assert rows(page.locator("#answer")) == told(answer)
    assert {item["item_id"] for item in answer["items"]} == {"d", "7"}
    assert "1 item of the history not in the catalog" in page.locator("#answer .costs").text_content()

    page.get_by_role("tab", name="Ask").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Compare")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Compare")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="Live")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="Ask")).to_be_visible()
    nameless = """[...document.querySelectorAll("input, select, textarea, button, summary")].filter((field) =>
        ![...(field.labels ?? [])].some((label) => label.textContent.trim()) && !field.ariaLabel
        && !field.textContent.trim()).map((field) => field.outerHTML)"""
    assert page.evaluate(nameless) == []


def test_candidates_are_ranked_as_the_api_ranks_them(visit: Visit) -> None:
    page = visit.open()
    visit.refused.add(404)
    fill(page, "History, oldest first", "a")
    page.get_by_label("Items to return").fill("3")
    visit.ask("/v1/recommend")
    shown = [item for _, item, _ in rows(page.locator("#answer"))]
    page.get_by_label("Rank candidates").check()
    page.get_by_role("button", name="Take the items shown").click()
    body, answer = visit.ask("/v1/rank")
    assert (body["candidates"], body["top_k"]) == (shown, 3) and "beam_width" not in body
    page.locator("#answer", has_text="3 candidates scored").wait_for()
    assert rows(page.locator("#answer")) == told(answer)
    assert page.locator("#beams").text_content() == ""


def test_what_is_refused_is_said_in_words(visit: Visit) -> None:
    from playwright.sync_api import expect

    page = visit.open(key="wrong-key")
    visit.refused |= {401, 404, 422}
    error = page.get_by_role("alert")
    expect(error).to_contain_text("The API key is missing or wrong")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#server")).to_have_text("jgr (ready), other (ready)")
    page.get_by_label("Items to return").fill("50")
    fill(page, "History, oldest first", "a")
    page.get_by_label("Rank candidates").check()
    fill(page, "Candidates", "<b>x</b>")
    _, refused = visit.ask("/v1/rank")
    expect(error).to_contain_text("The request cannot be answered as it is")
    expect(error.locator("p").first).to_have_text(refused["error"]["message"])
    expect(error).to_contain_text("Field: candidates[0] · HTTP 422 invalid_request · Request ")
    assert "<b>x</b>" in refused["error"]["message"] and page.locator("b").count() == 14, "of the tiles"
    page.locator("summary", has_text="More").click()
    page.get_by_label("Further fields").fill("[1]")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(error).to_have_text("Further fields must be a JSON object.")
    page.route("**/v1/rank", lambda route: route.abort())
    page.get_by_label("Further fields").fill("")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(error).to_contain_text("The server cannot be reached.")
    visit._faults[:] = [text for text in visit._faults if "ERR_FAILED" not in text]


def test_two_models_stand_side_by_side(visit: Visit) -> None:
    from playwright.sync_api import expect

    page = visit.open()
    fill(page, "History, oldest first", "a")
    page.get_by_role("tab", name="Compare").click()
    page.get_by_label("Items to return").fill("4")
    expect(page.get_by_label("Second model")).to_have_value("other")
    with page.expect_response(re.compile("/v1/recommend")), page.expect_response(re.compile("/v1/recommend")):
        page.get_by_role("button", name="Ask", exact=True).click()
    answers = []
    for side, model in (("First", "jgr"), ("Second", "other")):
        body = {"history": ["a"], "top_k": 4, "exclude_history": True, "model": model}
        answers.append(visit.server.call("/v1/recommend", body, **BEARER).json)
        assert rows(page.get_by_role("region", name=side)) == told(answers[-1])
    first, second = ([item["item_id"] for item in answer["items"]] for answer in answers)
    assert first != second, "or the test could not fail"
    moves = []
    for item in first:
        by = second.index(item) - first.index(item) if item in second else None
        moves.append("only here" if by is None else "=" if not by else f"{'▲' if by > 0 else '▼'}{abs(by)}")
    expect(page.get_by_role("region", name="First").locator(".move")).to_have_text(moves)
    both = len(set(first) & set(second))
    expect(page.locator("#overlap")).to_have_text(f"{both} of 4 items are on both sides.")

    # A layout of the prompt for each side; this server refuses the field, in words.
    visit.refused.add(422)
    page.get_by_label("Rank candidates").check()
    fill(page, "Candidates", "b c")
    page.get_by_role("region", name="Second").get_by_label("Layout").select_option("item_prefix")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("region", name="Second").get_by_role("alert")).to_contain_text("Field: layout")
    body = {"history": ["a"], "candidates": ["b", "c"], "exclude_history": True, "model": "jgr"}
    ranked = visit.server.call("/v1/rank", body, **BEARER).json
    assert rows(page.get_by_role("region", name="First")) == told(ranked)


def walked(width: int, seed: int = 7) -> list[dict[str, Any]]:
    """Levels as /v1/explain/recommend tells them: 16, width and width beams of random scores and parents."""
    rng, levels, above = random.Random(seed), [], []
    for level, count in enumerate((16, width, width)):
        beams = []
        for _ in range(count):
            parent = rng.randrange(len(above)) if level else None
            start = above[parent] if level else {"prefix": [], "score": 0.0}
            step = start["score"] - rng.expovariate(1.0)
            beams.append(
                {
                    "prefix": [*start["prefix"], rng.randrange(99)],
                    "score": step,
                    "parent": parent,
                    "items": 1 + level,
                }
            )
        beams.sort(key=lambda beam: -beam["score"])
        followed = {beam["parent"] for beam in beams}
        for at, beam in enumerate(above):
            beam["kept"] = at in followed
        for at, beam in enumerate(beams):
            beam["kept"] = at < 4
        levels.append({"level": level, "beams": beams})
        above = beams
    return levels


def test_beams_walk_down_the_tree(visit: Visit) -> None:
    from playwright.sync_api import expect

    levels = walked(WIDE)
    spans = [
        {"kind": "user", "name": "history", "tokens": 9, "cached_tokens": 9, "source": "device"},
        {"kind": "instruction", "name": "instruction", "tokens": 3, "cached_tokens": 0, "source": "computed"},
    ]

    def explain(route: Any) -> None:
        plain = visit.server.call("/v1/recommend", route.request.post_data_json, **BEARER).json
        plain["usage"].update(prompt_tokens=12, cached_tokens=9, computed_tokens=3)
        route.fulfill(json={"answer": plain, "levels": levels, "spans": spans})

    page = visit.open()
    page.route("**/v1/explain/recommend", explain)
    fill(page, "History, oldest first", "a")
    page.get_by_label("Items to return").fill("2")
    page.get_by_role("button", name="Ask", exact=True).click()
    picture = page.locator(".beams-picture")
    picture.wait_for()
    for at, level in enumerate(levels):
        dots = picture.locator(f".level[data-level='{at}'] circle")
        assert dots.count() == len(level["beams"])
        assert picture.locator(f".level[data-level='{at}'] .dropped").count() == sum(
            not beam["kept"] for beam in level["beams"]
        )
        assert picture.locator(f".level[data-level='{at}'] .edge").count() == (
            len(level["beams"]) if at else 0
        )
        cells = page.locator("table.levels tbody tr").nth(at).locator("td").all_text_contents()
        best = level["beams"][0]
        kept = [beam for beam in level["beams"] if beam["kept"]]
        assert cells[:3] == [str(at + 1), str(len(level["beams"])), str(len(kept))]
        assert cells[3] == str(sum(beam["items"] for beam in kept))
        assert cells[4] == STEP.join(map(str, best["prefix"]))
        assert float(cells[5]) == pytest.approx(best["score"], rel=1e-3)

    # Lines do not cross: from left to right, the places where they begin never go back.
    starts = """(level) => [...document.querySelectorAll(`.level[data-level='${level}'] .edge`)].map((edge) =>
        edge.getAttribute("d").match(/^M(\\S+) .* (\\S+) \\S+$/).slice(1).map(Number))"""
    for at in (1, 2):
        ends = sorted(page.evaluate(starts, at), key=lambda edge: edge[1])
        assert [edge[0] for edge in ends] == sorted(edge[0] for edge in ends)

    # The way to the best beam, from the last level up.
    way, beam = [], levels[2]["beams"][0]
    for level in (2, 1, 0):
        way.append(STEP.join(map(str, beam["prefix"])))
        if level:
            beam = levels[level - 1]["beams"][beam["parent"]]
    marked = page.locator(".beam.best title").all_text_contents()
    assert [text.partition(":")[0] for text in marked] == way

    # The arrow keys walk: to the best of the first level, on to its best child, and to that one's neighbour.
    picture.focus()
    page.keyboard.press("ArrowRight")
    first = levels[0]["beams"][0]
    expect(page.locator(".told")).to_contain_text(f"Level 1: {first['prefix'][0]}: score ")
    page.keyboard.press("ArrowDown")
    child = next(beam for beam in levels[1]["beams"] if beam["parent"] == 0)
    expect(page.locator(".told")).to_contain_text(f"Level 2: {STEP.join(map(str, child['prefix']))}: score ")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".told")).to_contain_text(f"Level 1: {first['prefix'][0]}: score ")
    expect(page.locator(".beam.chosen")).to_have_count(1)

    expect(page.locator("#reuse")).to_contain_text("9 of 12 tokens came from the cache, 3 were computed.")
    expect(page.locator("table.spans tbody tr").first.locator("td")).to_have_text(
        ["User", "history", "9", "9", "device"]
    )
    widths = [float(str(bar.get_attribute("width"))) for bar in page.locator("#reuse rect").all()]
    assert widths == pytest.approx([750, 0, 0, 250])


def test_odd_beams_are_drawn_all_the_same(visit: Visit) -> None:
    """Scores that are no numbers, parents that are not there, levels without beams, a thousand beams, token names."""
    page = visit.open(key="")
    visit.refused.add(401)
    drawn = page.evaluate(
        """async (levels) => {
            const { beamsView } = await import("./ui/beams.js");
            const view = beamsView(levels);
            return {
                dots: levels.map((_, at) => view.querySelectorAll(`.level[data-level="${at}"] circle`).length),
                edges: view.querySelectorAll(".edge").length,
                best: [...view.querySelectorAll(".beam.best title")].map((title) => title.textContent).reverse(),
                text: view.outerHTML.includes("NaN") || view.outerHTML.includes("undefined"),
            };
        }""",
        [
            {
                "beams": [
                    {"prefix": [1], "token": "<a_1>", "score": None, "parent": None, "items": 3, "kept": True}
                ]
            },
            {
                "beams": [
                    {
                        "prefix": [1, 2],
                        "token": "<b_2>",
                        "score": -2.0,
                        "parent": 0,
                        "items": 1,
                        "kept": True,
                    },
                    {
                        "prefix": [9, 9],
                        "token": "<b_9>",
                        "score": -3.0,
                        "parent": 44,
                        "items": 1,
                        "kept": False,
                    },
                ]
            },
            {
                "beams": [
                    {
                        "prefix": [1, 2, at],
                        "score": -at,
                        "parent": 0,
                        "items": 1,
                        "kept": True,
                        "item_ids": ["x"],
                    }
                    for at in range(1000)
                ]
            },
        ],
    )
    assert drawn["dots"] == [1, 2, 512] and drawn["edges"] == 1 + 512 and not drawn["text"]
    assert drawn["best"] == [
        f"<a_1>: score {NONE}, 3 items below",
        f"<a_1>{STEP}<b_2>: score -2.000, 1 item below",
        f"<a_1>{STEP}<b_2>{STEP}0: score 0.000, 1 item below: x",
    ]
    assert page.evaluate("import('./ui/beams.js').then(({place}) => place([[], []]).length)") == 2


SAMPLES = r"""
# HELP odd A "quoted" help, with \n in it.
# TYPE odd gauge
odd{path="C:\\dir\\",text="say \"hi\"\n}",empty=""} 1.5e-3
odd{path="a,b=\"c\"",text="{",empty="x"} +Inf
odd{path="",text="",empty=""} -2 1700000000000
# TYPE plain counter
plain_total 1e+06
"""


def test_metrics_are_read_as_prometheus_reads_them(visit: Visit) -> None:
    page = visit.open(key="")
    visit.refused.add(401)
    text = SAMPLES + visit.server.call("/metrics", **BEARER).body.decode()
    reference = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            reference.setdefault(sample.name, []).append([sample.labels, repr(float(sample.value))])
    read = page.evaluate(
        """async (text) => {
            const { parse } = await import("./ui/prometheus.js");
            return [...parse(text)].map(([name, series]) =>
                [name, series.map(({ labels, value }) => [labels, value])]);
        }""",
        text,
    )
    assert {
        name: [[labels, repr(float(value))] for labels, value in series] for name, series in read
    } == reference
    assert len(reference) > 30

    rng = random.Random(3)
    for _ in range(20):
        bounds = sorted(rng.sample(range(-50, 100), 6))
        counts = sorted(rng.randrange(40) for _ in range(7))
        q = rng.choice([0.01, 0.5, 0.9, 0.99])
        pairs = [[bound, count] for bound, count in zip(bounds, counts, strict=False)]
        found = page.evaluate(
            """async ([q, pairs, all]) => {
                const { quantile } = await import("./ui/prometheus.js");
                return quantile(q, [...pairs, [Infinity, all]]);
            }""",
            [q, pairs, counts[-1]],
        )
        assert found == (None if counts[-1] == 0 else pytest.approx(histogram_quantile(q, pairs, counts[-1])))


def histogram_quantile(q: float, pairs: list[list[float]], total: float) -> float:
    """Prometheus's, as its documentation has it."""
    rank = q * total
    for at, (bound, count) in enumerate(pairs):
        if count >= rank:
            if at == 0 and bound <= 0:
                return bound
            low, below = pairs[at - 1] if at else (0.0, 0.0)
            return low + (bound - low) * (rank - below) / (count - below) if count > below else low
    return pairs[-1][0]


def buckets(text: str, name: str, **where: str) -> dict[float, float]:
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and where.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0) + sample.value
    return found


def figure(page: Any, name: str) -> tuple[str, str]:
    """A tile's number and its note."""
    tile = page.locator(f"[data-figure='{name}']")
    return tile.locator("b").text_content(), tile.locator(".note").text_content()


def watch(visit: Visit, between: Callable[[], None]) -> Any:
    """Open the live view, read, do something, and read again just two seconds later by the page's clock."""
    page = visit.page
    page.clock.install(time=0)
    visit.open()
    page.clock.pause_at(60_000)
    page.get_by_role("tab", name="Live").click()
    page.clock.run_for(1)
    page.get_by_text("Figures of the last 0 s").wait_for()
    between()
    page.clock.run_for(2000)
    page.get_by_text("Figures of the last 2 s, courses of the last 2 s.").wait_for()
    return page


def test_the_live_view_shows_what_the_server_counts(visit: Visit) -> None:
    server, texts = visit.server, []

    def between() -> None:
        texts.append(server.call("/metrics", **BEARER).body.decode())
        for at in range(5):
            body = {"history": ["a"], "top_k": 1, "model": ("jgr", "other")[at % 2]}
            assert server.call("/v1/recommend", body, **BEARER).status == 200
        assert server.call("/v1/recommend", {"history": []}, **BEARER).status == 422
        texts.append(server.call("/metrics", **BEARER).body.decode())

    page = watch(visit, between)
    assert figure(page, "Requests") == ("3", "200 5, 422 1")
    assert figure(page, "Goodput") == ("2.5", "83.3 % answered in time")
    total = {"stage": "total"}
    before, after = (buckets(text, "jgr_stage_seconds", **total) for text in texts)
    pairs = [[bound, after[bound] - before[bound]] for bound in sorted(after) if math.isfinite(bound)]
    for q, name in ((0.5, "P50"), (0.99, "P99")):
        assert float(figure(page, name)[0]) == pytest.approx(1000 * histogram_quantile(q, pairs, 5), rel=1e-2)
    assert figure(page, "P50")[1] == "of 5 answers"
    assert figure(page, "Queue") == ("0", "0 runs in flight")
    assert figure(page, "Refused") == ("0", "nothing")
    # Prompts of 4 tokens with 5 beams in profiles of 8 and 5: see test_server.py.
    assert figure(page, "Batch fill") == ("69.2", "mean batch size 1")
    assert figure(page, "Pool in use") == (NONE, "no cache")
    page.locator("#watched").select_option("other")
    assert figure(page, "P50")[1] == "of 2 answers"
    assert page.locator("[data-figure='Queue'] .course path").get_attribute("d") == "M28 34.00L29 34.00"


def a_cache(**held: int) -> Any:
    """What a meta service tells of a pool of 1000 pages, 500 of them free. held: pages by kind of entries."""
    events = [f"{kind}_{event}" for kind in held for event in ENTRY_EVENTS]
    return SimpleNamespace(
        pages=SimpleNamespace(free=500, count=1000),
        kinds=tuple(held),
        used=held.__getitem__,
        number={kind: pages // 10 for kind, pages in held.items()}.__getitem__,
        fragmentation=lambda kind: 0.0,
        counts=dict.fromkeys([*events, "to_host", "to_device"], 0),
    )


def test_the_live_view_shows_cache_drift_and_failures(visit: Visit) -> None:
    metrics, other = Metrics(), Metrics()
    metrics.watch_cache(lambda: a_cache(user=300, item=100))
    other.watch_cache(lambda: a_cache(user=20, item=50))
    metrics.feature_counts = lambda: Counts(fresh=10, stale=10)
    for one, info in zip((metrics, other), visit.server.listener.models.infos, strict=True):
        one.show_model(info)

    def read(route: Any) -> None:
        route.fulfill(body=render({"jgr": metrics, "other": other}), content_type="text/plain")

    def between() -> None:
        metrics.feature_counts = lambda: Counts(fresh=40, stale=20)
        metrics._cached_tokens.inc(30)
        metrics._computed_tokens.inc(10)
        for difference in (5e-4, 5e-4, 5e-4, 5e-2):
            metrics.drift.observe(difference)
        metrics.rejected["too_late"].inc(3)
        metrics.refused["quota"].inc(1)
        metrics.deadline_expired.inc(4)
        metrics.executor_failures.inc(2)
        metrics.observe_run(0.5, 0.25)

    visit.page.route("**/metrics", read)
    page = watch(visit, between)
    assert figure(page, "Tokens from the cache") == ("75", "20 tokens/s")
    assert figure(page, "Pool in use") == ("50", "entries user 32, item 15")
    pool = page.locator("[data-figure='Pool in use']")
    assert pool.locator(".key").all_text_contents() == ["item 150", "others 30", "user 320", "free 500"]
    widths = [float(str(bar.get_attribute("width"))) for bar in pool.locator("rect").all()]
    assert widths == pytest.approx([150, 30, 320, 500])
    assert figure(page, "Fresh features") == ("75", "fresh 30, stale 10")
    assert figure(page, "Refused") == ("2", "too_late 3, quota 1")
    assert figure(page, "Late or failed") == ("3", "4 late, 2 batches failed")
    assert figure(page, "Device") == ("25", "25 % of it for nobody")
    # Three of four between 1e-4 and 1e-3, one up to 0.1: the 3.96th lies in the last bucket.
    assert float(figure(page, "Drift, P99")[0]) == pytest.approx(1e-2 + 0.96 * 9e-2, rel=1e-2)
    assert figure(page, "Drift, P99")[1] == f"4 answers checked without the cache; repaired {NONE}"
    page.locator("#watched").select_option("other")
    assert pool.locator(".key").all_text_contents() == ["item 50", "others 430", "user 20", "free 500"]
    assert figure(page, "Tokens from the cache") == (NONE, "0 tokens/s")


def test_the_live_view_reads_series_that_exist() -> None:
    named = set(re.findall(r'"((?:jgr|process)_\w+?)"', (FOLDER / "live.js").read_text()))
    suffixes = ("_total", "_bucket", "_sum", "_count")
    families = {
        next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name) for name in named
    }
    assert len(families) > 15 and families <= documentation().keys()


def test_a_live_view_without_a_key_says_so_and_stops_asking(visit: Visit) -> None:
    from playwright.sync_api import expect

    page = visit.page
    page.clock.install(time=0)
    visit.open(key="")
    visit.refused.add(401)
    page.clock.pause_at(60_000)
    asked: list[str] = []
    page.on("request", lambda request: request.url.endswith("/metrics") and asked.append(request.url))
    page.get_by_role("tab", name="Live").click()
    page.clock.run_for(1)
    expect(page.locator("#trouble")).to_contain_text("The API key is missing or wrong")
    page.clock.run_for(20_000)
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Tab")
    page.clock.run_for(1)
    page.get_by_text("Figures of the last 0 s").wait_for()
    assert len(asked) == 2
    expect(page.locator("#trouble")).to_be_empty()


CUT_OFF = """{
  const {text} = Response.prototype;
  Response.prototype.text = function () {
    return this.url.endsWith("/metrics") && window.cuts ? Promise.reject(new TypeError()) : text.call(this);
  };
}"""


def test_answers_that_cannot_be_read_are_told_and_asked_for_again(visit: Visit) -> None:
    """A gateway's page in place of the models, readings that break off, and one that does not come."""
    from playwright.sync_api import expect

    page = visit.page
    page.add_init_script(CUT_OFF)
    page.clock.install(time=0)
    page.route("**/v1/models", lambda route: route.fulfill(body="<html>Please log in</html>"))
    visit.open()
    expect(page.locator("#server")).to_contain_text("What came is not the answer of a jgr server.")
    page.evaluate("window.cuts = true")
    page.clock.pause_at(60_000)
    page.get_by_role("tab", name="Live").click()
    page.clock.run_for(1)
    trouble = page.locator("#trouble")
    expect(trouble).to_contain_text("The answer was cut off.")
    page.evaluate("window.cuts = false")
    page.clock.run_for(2000)
    page.get_by_text("Figures of the last 0 s").wait_for()
    expect(trouble).to_be_empty()
    page.evaluate("AbortSignal.timeout = () => AbortSignal.abort(new DOMException('', 'TimeoutError'))")
    page.clock.run_for(2000)
    expect(trouble).to_contain_text("The server does not answer in time.")


def test_a_key_that_comes_while_the_other_is_refused_is_tried(visit: Visit) -> None:
    from playwright.sync_api import expect

    page, held = visit.page, []
    page.clock.install(time=0)
    visit.open(key="")
    visit.refused.add(401)
    page.clock.pause_at(60_000)
    page.route("**/metrics", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/metrics"):
        page.get_by_role("tab", name="Live").click()
        page.clock.run_for(1)
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Tab")
    page.clock.run_for(1)
    held[0].continue_()
    expect(page.locator("#trouble")).to_contain_text("The API key is missing or wrong")
    page.clock.run_for(2000)
    page.get_by_text("Figures of the last 0 s").wait_for()


def test_only_the_last_question_is_asked_and_shown(visit: Visit) -> None:
    """Enter that is held down asks many times a second."""
    page, held = visit.open(), list[Any]()
    visit.refused.add(404)  # /v1/explain, which is off
    page.route("**/v1/explain/recommend", lambda route: held.append(route))
    fill(page, "History, oldest first", "a")
    page.get_by_label("Items to return").fill("4")
    given_up: list[str] = []
    page.on("requestfailed", lambda request: given_up.append(request.url))
    ask = page.get_by_role("button", name="Ask", exact=True)
    for _ in range(3):
        with page.expect_request("**/v1/explain/recommend"):
            ask.click()
    held[-1].continue_()
    assert len(rows(page.locator("#answer"))) == 4
    assert len(given_up) == 2


def test_the_docs_page_authorizes_and_executes(visit: Visit) -> None:
    from playwright.sync_api import expect

    page = visit.open("/docs")
    page.get_by_role("button", name="Authorize").click()
    scheme = page.locator(".auth-container").filter(has=page.locator("code", has_text=re.compile("^key$")))
    scheme.locator("input").fill(KEY)
    scheme.get_by_role("button", name="Apply credentials").click()
    scheme.get_by_role("button", name="Close").click()
    operation = page.locator("#operations-requests-recommend")
    operation.locator(".opblock-summary-control").click()
    body = {"history": ["a"], "top_k": 2, "model": "jgr"}
    operation.locator("textarea").fill(json.dumps(body))
    with page.expect_request("**/v1/recommend") as sent:
        operation.get_by_role("button", name="Execute").click()
    assert sent.value.url.endswith(f"{BASE}/v1/recommend")
    live = operation.locator(".live-responses-table")
    expect(live.locator(".response-col_status").nth(1)).to_contain_text("200")
    answer = json.loads(live.locator(".response-col_description pre").first.inner_text())
    expected = visit.server.call("/v1/recommend", body, **BEARER).json
    assert answer["items"] == expected["items"] and answer["model"] == "jgr"
