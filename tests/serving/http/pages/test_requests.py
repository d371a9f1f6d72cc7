# SPDX-License-Identifier: Apache-2.0
"""The pages /ui and /docs in Chromium: what they send, and what they show of the answers.

What a page shows is held against what the API answers to the test itself.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from tests.serving.http.pages.browsing import (
    BASE,
    BEARER,
    BRAND,
    KEY,
    NONE,
    REMOVE,
    STEP,
    TITLES,
    Visit,
    fill,
    rows,
    told,
)

pytestmark = pytest.mark.chromium

WIDE = 128
HINT = "The server asks for an API key that it knows: see the top of the page."


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
    bold = page.locator("b").count()  # the figures of the tiles
    _, refused = visit.ask("/v1/rank")
    expect(error).to_contain_text("The request cannot be answered as it is")
    expect(error.locator("p").first).to_have_text(refused["error"]["message"])
    expect(error).to_contain_text("Field: candidates[0] · HTTP 422 invalid_request · Request ")
    assert "<b>x</b>" in refused["error"]["message"]
    assert page.locator("b").count() == bold, "an item's name is never markup"
    page.locator("summary", has_text="More").click()
    page.get_by_label("Further fields").fill("[1]")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(error).to_have_text("Further fields must be a JSON object.")
    page.route("**/v1/rank", lambda route: route.abort())
    page.get_by_label("Further fields").fill("")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(error).to_contain_text("The server cannot be reached.")
    visit._faults[:] = [text for text in visit._faults if "ERR_FAILED" not in text]


def test_a_key_that_is_wrong_is_told_once_wherever_it_was_noticed(visit: Visit) -> None:
    from playwright.sync_api import expect

    page, sentence = visit.open(key="wrong-key"), "The API key is missing or wrong"
    expect(page.locator("#server")).to_contain_text(sentence)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#answer")).to_have_text(HINT)
    expect(page.get_by_text(sentence)).to_have_count(1)
    page.get_by_role("tab", name="Compare").click()
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("region", name="Second")).to_contain_text(HINT)
    page.get_by_role("tab", name="Live").click()
    expect(page.locator("#trouble")).to_have_text(HINT)
    expect(page.get_by_text(sentence)).to_have_count(1)

    # The models are known, and then the key is taken away: the place beside it says so.
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#server")).to_have_text("jgr (ready), other (ready)")
    refusal = {"error": {"type": "unauthorized", "message": "gone", "request_id": "r"}}
    page.route("**/v1/recommend", lambda route: route.fulfill(status=401, json=refusal))
    page.get_by_role("tab", name="Compare").click()
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#server")).to_contain_text(sentence)
    expect(page.get_by_text(sentence)).to_have_count(1)


def test_a_pasted_list_is_looked_up_in_one_call(visit: Visit) -> None:
    from playwright.sync_api import expect

    visit.page.clock.install()
    page, asked = visit.open(), list[str]()
    expect(page.locator("#server")).to_have_text("jgr (ready), other (ready)")
    page.on("request", lambda request: "/v1/items?" in request.url and asked.append(request.url))
    history = page.get_by_role("list", name="History, oldest first").locator("li")
    pasted = ["b", *(f"none{at}" for at in range(200)), "a", "b"]
    field = page.get_by_role("combobox", name="History, oldest first")
    field.fill(" ".join(pasted))
    page.clock.run_for(1000)  # what rests in the field is searched for, but not a list
    field.press("Enter")
    expect(page.locator(".chips .unknown")).to_have_count(62)  # of the last 64
    expect(history.last).to_have_text(f"title of b{REMOVE}")
    assert history.all_text_contents()[:3] == [f"{name}{REMOVE}" for name in ("title of b", "none0", "none1")]
    (named,) = (url for url in asked if "item_id=" in url)
    assert named.count("item_id=") == 64
    fill(page, "History, oldest first", "none199 a")
    expect(history).to_have_count(205)
    expect(history.last).to_have_text(f"title of a{REMOVE}")
    assert sum("item_id=none199" in url for url in asked) == 1, "what is known is not asked again"
    assert not any("query=b" in url for url in asked)


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

    # On a phone the sides stand below each other, and nothing of the page beside the screen.
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360


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

    # A line ends at the rim of its dot, since a pale dot would show it inside; a level's name stands beside its dots.
    drawn = """() => [...document.querySelectorAll(".level")].map((level) => {
        const dots = [...level.querySelectorAll("circle")];
        const tops = dots.map(({ cy, r }) => cy.baseVal.value - r.baseVal.value);
        const edges = [...level.querySelectorAll(".edge")];
        const ends = edges.map((edge) => Number(edge.getAttribute("d").split(" ").at(-1)));
        const left = Math.min(...dots.map((dot) => dot.getBoundingClientRect().left));
        return [tops, ends, left - level.querySelector(".depth").getBoundingClientRect().right];
    })"""
    for tops, ends, apart in page.evaluate(drawn):
        assert ends in ([], pytest.approx(tops)) and apart >= 0

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

    dark = page.locator("html.dark-mode")
    expect(dark).to_have_count(0)
    page.emulate_media(color_scheme="dark")
    expect(dark).to_have_count(1)


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
