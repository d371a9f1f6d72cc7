# SPDX-License-Identifier: Apache-2.0
"""`make docs`: the site is built without a warning, has every page in its sidebar, and asks nobody."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PATIENCE_S = 120.0


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", str(source), str(out)]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(DOCS, out)
    assert (done.returncode, done.stderr) == (0, "")
    return out


class Loads(HTMLParser):
    """Collects what a page loads, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a":
            self.linked.append(found.get("href") or "")
        elif tag == "link":
            self.loaded.append(found.get("href") or "")
        else:
            self.loaded += [
                found[name] or "" for name in ("src", "srcset", "data", "poster") if name in found
            ]


def pages(site: Path) -> Iterator[tuple[Path, Loads]]:
    for path in site.rglob("*.html"):
        loads = Loads()
        loads.feed(path.read_text())
        yield path, loads


def test_every_page_is_in_the_sidebar(site: Path) -> None:
    (home,) = (loads for path, loads in pages(site) if path == site / "index.html")
    names = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert len(names) > 20 and names - {"index.html"} <= set(home.linked)


def test_flags_keep_their_two_dashes(site: Path) -> None:
    commands = (site / "reference" / "cli.html").read_text()
    assert "as in --set server.port=8001" in commands and "\u2013" not in commands


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    count = 0
    for path, loads in pages(site):
        for address in filter(lambda found: not found.startswith("#"), loads.loaded):
            target = (path.parent / address.partition("?")[0].partition("#")[0]).resolve()
            assert address.startswith("data:") or target.is_file(), f"{path.name}: {address}"
            count += 1
    assert count > 100
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    known = {path: set(re.findall(r'id="([^"]+)"', path.read_text())) for path, _ in pages(site)}
    for path, loads in pages(site):
        for link in loads.linked:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            to = (path.parent / target).resolve() if target else path
            assert to.is_file() and (not anchor or to.suffix != ".html" or anchor in known[to]), (
                f"{path.name}: {link}"
            )


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    shutil.copy(DOCS / "conf.py", source)
    shutil.copytree(DOCS / "site", source / "site")
    (source / "index.md").write_text("# Home\n\n[there](new.md#here)\n")
    (source / "new.md").write_text("# A page that the navigation does not know\n\n## Here\n")
    assert build(source, tmp_path / "good").returncode == 0
    assert "new.html" in (tmp_path / "good" / "index.html").read_text()
    (source / "new.md").write_text("# A page that the navigation does not know\n")
    done = build(source, tmp_path / "bad")
    assert done.returncode != 0 and "here" in done.stderr
