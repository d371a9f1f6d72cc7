# SPDX-License-Identifier: Apache-2.0
r"""The pictures of docs/ui.md, taken of the page /ui of a server of the demo's shop with two models.

    JGR_PICTURES=docs/images JAX_DISABLE_MOST_OPTIMIZATIONS=0 \
      python -m pytest -n0 tests/serving/http/pages/test_pictures.py

trains both models in earnest, watches the live view for half a minute and writes them into docs/images. Without
JGR_PICTURES the models are small and trained for a step, two seconds are watched, and the pictures go to a temporary
folder.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import jgr
from jgr.config import load_config, override
from jgr.data.datasets import load_dataset
from jgr.data.shop import Shop, make_shop
from jgr.training.generator import train_generator
from tests.serving.fakes import PATIENCE_S
from tests.test_docs import ROOT, SMALL, Terminal

WIDTH, HEIGHT = 1280, 860
USER, ITEMS = 15, 6
COLOURS = 256
EVERY_S = 0.05
FOLDER = os.environ.get("JGR_PICTURES")
STEPS = {"shop": 600, "short": 150} if FOLDER else {"shop": 1, "short": 1}
WATCHED = re.compile(rf"courses of the last {r'[3-9][0-9]' if FOLDER else '[2-9]'} s")
"""What the live view says once it was watched for long enough."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("project")
    terminal = Terminal(folder)
    for name, steps in STEPS.items():
        small = () if FOLDER else (f"{key}={value}" for key, value in SMALL.items())
        settings = (
            f"train.out={folder / 'runs' / name}",
            f"train.steps={steps}",
            f"model.name={name}",
            *small,
        )
        config = override(load_config("shop"), *settings)
        train_generator(config, load_dataset(config.data))
    cache = "--set cache.policy=user --set cache.device_mb=64 --set cache.shadow=0.1"
    yield terminal.run("sh", f"jgr serve runs/shop runs/short --set server.explain=true {cache}\n")
    terminal.stop()


def opened(browser: Any, url: str, shop: Shop, scheme: str) -> Any:
    """The page with the last items of a user of the shop as the history. scheme: light or dark."""
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    page.goto(f"{url}/ui")
    page.get_by_text("(ready)").wait_for()
    page.get_by_label("User id").fill(shop.names[USER])
    history = page.get_by_role("combobox", name="History, oldest first")
    history.fill(" ".join(shop.catalog.item_ids[row] for row in shop.sequences[USER][-ITEMS:]))
    history.press("Enter")
    return page


def ask(page: Any) -> None:
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("[role=tabpanel]:not([hidden]) table.items").first.wait_for()
    page.wait_for_load_state("networkidle")


@contextmanager
def load(url: str, shop: Shop) -> Iterator[None]:
    """Users of the shop ask one after the other, while the body runs."""
    over = threading.Event()

    def ask_all() -> None:
        with jgr.Client(url, model="shop") as client:
            for at in itertools.count():
                if over.wait(EVERY_S):
                    return
                rows = shop.sequences[at % 40][-10:]
                history = [shop.catalog.item_ids[row] for row in rows]
                client.recommend(history, user_id=shop.names[at % 40], exclude_history=True)

    thread = threading.Thread(target=ask_all)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def few_colours(shot: Image.Image) -> Image.Image:
    """The picture with a palette. By coverage of the colours: one that counts pixels turns a small green arrow grey."""
    return shot.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def take(page: Any, path: Path) -> None:
    few_colours(Image.open(io.BytesIO(page.screenshot(full_page=True)))).save(path, optimize=True)


def take_all(browser: Any, url: str, folder: Path) -> None:
    shop = make_shop()
    page = opened(browser, url, shop, "light")
    page.get_by_label("Items to return").fill("5")
    ask(page)  # the second time, the user is in the cache
    ask(page)
    page.locator(".beams-picture").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    page.locator(".beams-picture").evaluate("(picture) => picture.blur()")
    take(page, folder / "ui-ask.png")
    page.get_by_label("Items to return").fill("8")
    page.get_by_role("tab", name="Compare").click()
    ask(page)
    take(page, folder / "ui-compare.png")
    page = opened(browser, url, shop, "dark")
    page.get_by_role("tab", name="Live").click()
    with load(url, shop):
        page.get_by_text(WATCHED).wait_for(timeout=3000 * PATIENCE_S)
        take(page, folder / "ui-live.png")


@pytest.mark.chromium
@pytest.mark.slow
def test_the_pictures_of_the_docs_are_those_of_the_page(browser: Any, url: str, tmp_path: Path) -> None:
    """They are all that docs/ui.md shows, each full of letters, the live view on a dark ground."""
    folder = Path(FOLDER).resolve() if FOLDER else tmp_path
    take_all(browser, url, folder)
    shown = re.findall(r"\(images/(.*?)\)", (ROOT / "docs" / "ui.md").read_text())
    assert sorted(shown) == sorted(path.name for path in folder.glob("ui-*.png"))
    ground = {}
    for name in shown:
        with Image.open(folder / name) as shot:
            pixels = np.asarray(shot.convert("L")).astype(int)
        assert pixels.shape[1] == WIDTH and pixels.shape[0] >= HEIGHT
        ground[name] = int(np.median(pixels))
        inked = np.abs(pixels - ground[name]).max(axis=1) > 60
        assert inked.mean() > 0.3, f"{name} is nearly empty"
    assert ground["ui-ask.png"] > 200 and ground["ui-compare.png"] > 200 and ground["ui-live.png"] < 60


def test_a_small_thing_keeps_its_colour_among_many_greys_and_blues() -> None:
    """A page has thousands of shades at the edges of its letters, and an arrow that is better has few pixels."""
    green = (26, 127, 75)
    rng = np.random.default_rng(0)
    shot = np.full((400, 400, 3), 255, np.uint8)
    shot[:300] = rng.integers(0, 256, (300, 400, 1), dtype=np.uint8)
    shot[:100, :, 2] = rng.integers(120, 256, (100, 400))
    shot[350:356, 20:30] = green
    kept = np.asarray(few_colours(Image.fromarray(shot)).convert("RGB")).astype(int)
    assert np.abs(kept[350:356, 20:30] - green).max() <= 12
