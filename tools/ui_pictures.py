# SPDX-License-Identifier: Apache-2.0
r"""Writes the pictures of docs/ui.md, of the page /ui of a server of the demo's shop.

    jgr train --config=shop --set train.out=runs/short --set train.steps=150 --set model.name=short
    jgr serve runs/shop runs/short --set server.explain=true --set cache.policy=user --set cache.device_mb=64 \
      --set cache.shadow=0.1
    python -m tools.ui_pictures http://127.0.0.1:8000

It needs Debian's chromium, and playwright and matplotlib's pillow, which jgr[dev] has. For the live view it asks the
server twenty times a second for half a minute. `--folder` writes the pictures elsewhere.
"""

from __future__ import annotations

import argparse
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import jgr
from jgr.data.shop import Shop, make_shop

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
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
WIDTH, HEIGHT = 1280, 860
USER, ITEMS = 15, 6
COLOURS = 256
EVERY_S, WATCHED_MS = 0.05, 32_000


def opened(browser: Browser, url: str, shop: Shop, scheme: str) -> Page:
    """The page with the last items of a user of the shop as the history. scheme: light or dark."""
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"{url}/ui")
    page.get_by_text("(ready)").wait_for()
    page.get_by_label("User id").fill(shop.names[USER])
    history = page.get_by_role("combobox", name="History, oldest first")
    history.fill(" ".join(shop.catalog.item_ids[row] for row in shop.sequences[USER][-ITEMS:]))
    history.press("Enter")
    return page


def ask(page: Page) -> None:
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("[role=tabpanel]:not([hidden]) table.items").first.wait_for()
    page.wait_for_load_state("networkidle")


@contextmanager
def load(url: str, shop: Shop) -> Iterator[None]:
    """Users of the shop ask one after the other, while the body runs."""
    over = threading.Event()

    def ask_all() -> None:
        with jgr.Client(url) as client:
            for at in range(1 << 30):
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


def take(page: Page, folder: Path, name: str) -> None:
    path = folder / f"ui-{name}.png"
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    few_colours(shot).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def pictures(browser: Browser, url: str, folder: Path) -> None:
    """Write all pictures."""
    shop = make_shop()
    page = opened(browser, url, shop, "light")
    page.get_by_label("Items to return").fill("5")
    ask(page)  # the second time, the user is in the cache
    ask(page)
    page.locator(".beams-picture").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    page.locator(".beams-picture").evaluate("(picture) => picture.blur()")
    take(page, folder, "ask")
    page.get_by_label("Items to return").fill("8")
    page.get_by_role("tab", name="Compare").click()
    ask(page)
    take(page, folder, "compare")
    page = opened(browser, url, shop, "dark")
    page.get_by_role("tab", name="Live").click()
    with load(url, shop):
        page.wait_for_timeout(WATCHED_MS)
        take(page, folder, "live")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pictures of docs/ui.md.")
    parser.add_argument("url", help="where the server of the shop is")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures go")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        pictures(browser, options.url, options.folder)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
