# SPDX-License-Identifier: Apache-2.0
"""The live view of /ui in Chromium, by the page's own clock: it shows what /metrics counted between two readings.

Prometheus's own reader, and its formula for quantiles, say what is right.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jgr.features.cache import Counts
from jgr.serving.engine.metrics import ENTRY_EVENTS, Metrics, documentation, render
from jgr.serving.engine.paging_metrics import PagingCounts
from tests.serving.http.pages.browsing import BEARER, KEY, NONE, Visit
from tests.serving.http.test_ui import FOLDER

pytestmark = pytest.mark.chromium

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
    assert figure(page, "Requests") == ("3", "status 200: 5, 422: 1")
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
    metrics.paging = lambda: PagingCounts({"items": {"hits": 5, "misses": 5}}, 40, 50, 200, 0, {"moves": 1})
    for one, info in zip((metrics, other), visit.server.listener.models.infos, strict=True):
        one.show_model(info)

    def read(route: Any) -> None:
        route.fulfill(body=render({"jgr": metrics, "other": other}), content_type="text/plain")

    def between() -> None:
        metrics.feature_counts = lambda: Counts(fresh=40, stale=20)
        metrics.paging = lambda: PagingCounts(
            {"items": {"hits": 23, "misses": 7}}, 50, 58, 200, 0, {"moves": 4}
        )
        metrics._cached_tokens.inc(30)
        metrics._computed_tokens.inc(10)
        for difference in (5e-4, 5e-4, 5e-4, 5e-2):
            metrics.drift.observe(difference)
        metrics.rejected["too_late"].inc(3)
        metrics.refused["quota"].inc(1)
        metrics.deadline_expired.inc(4)
        metrics.executor_failures.inc(2)
        metrics.observe_run(0.5, 0.125)

    visit.page.route("**/metrics", read)
    page = watch(visit, between)
    assert figure(page, "Tokens from the cache") == ("75", "20 tokens/s")
    assert figure(page, "Pool in use") == ("50", "entries user 32, item 15")
    pool = page.locator("[data-figure='Pool in use']")
    assert pool.locator(".key").all_text_contents() == ["item 150", "others 30", "user 320", "free 500"]
    widths = [float(str(bar.get_attribute("width"))) for bar in pool.locator("rect").all()]
    assert widths == pytest.approx([150, 30, 320, 500])
    assert figure(page, "Fresh features") == ("75", "fresh 30, stale 10")
    rows = figure(page, "Embeddings on the device")
    assert rows == ("90", "border at 29 % of 200 pages, rows hold 50; 3 moves")
    assert figure(page, "Refused") == ("2", "too_late 3, quota 1")
    assert figure(page, "Late or failed") == ("3", "4 late, 2 batches failed")
    assert figure(page, "Device") == ("25", "25 % of it wasted")
    # Three of four between 1e-4 and 1e-3, one up to 0.1: the 3.96th lies in the last bucket.
    assert float(figure(page, "Drift, P99")[0]) == pytest.approx(1e-2 + 0.96 * 9e-2, rel=1e-2)
    drift = figure(page, "Drift, P99")[1]
    assert drift == f"4 answers checked without the cache; in 8 bits {NONE}, repaired {NONE}"
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
    expect(page.locator("#trouble")).to_contain_text("asks for an API key that it knows")
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
    expect(page.locator("#trouble")).to_contain_text("asks for an API key that it knows")
    page.clock.run_for(2000)
    page.get_by_text("Figures of the last 0 s").wait_for()
