# SPDX-License-Identifier: Apache-2.0
"""What the documentation names is there: pages, headings, files and modules, from pages and from code.

Addresses of other sites are only read, never asked.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:benchmarks|configs|deploy|docs|examples|jgr|requirements|tests|tools)/[\w./-]*[\w/]")
MODULE = re.compile(r"python -m ((?:benchmarks|tools)\.\w+)")
PAGE = re.compile(r"\bdocs/[\w/]+\.(?:md|svg)\b")
SITE = re.compile(r"""https?://[^\s"'`<>()\[\]{},;|\\]+""")
PICTURES = sorted((ROOT / "docs" / "concepts").glob("*.svg"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def slug(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    return {slug(heading) for heading in re.findall(r"^#{1,4} (.*)$", text, re.MULTILINE)}


def missing(page: Path, text: str) -> list[str]:
    """The links of a page, and the files and modules that it names in backticks, that lead nowhere."""
    wrong = []
    prose = FENCE.sub("", text)
    for link in LINK.findall(CODE.sub("", prose)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        known = path.exists() and (not anchor or (path.suffix == ".md" and anchor in anchors(path)))
        wrong += [] if known else [link]
    for code in CODE.findall(prose):
        wrong += [path for path in PATH.findall(code) if path == code and not (ROOT / path).exists()]
    wrong += [m for m in MODULE.findall(text) if not (ROOT / m.replace(".", "/")).with_suffix(".py").exists()]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert missing(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One & two\n\n```text\n# No heading\n```\n")
    page = tmp_path / "page.md"
    text = (
        "[a](other.md) [b](other.md#one--two) [c](gone.md) [d](other.md#no-heading) [e](#here)\n`docs/gone.md` "
        "`jgr/gone.py` `jgr/cli/` `python -m tools.gone` `[f](in_code.md)`\n```text\n[g](in_a_block.md)\n```\n# Here\n"
    )
    page.write_text(text)
    assert missing(page, text) == [
        "gone.md",
        "other.md#no-heading",
        "docs/gone.md",
        "jgr/gone.py",
        "tools.gone",
    ]


def sources() -> list[Path]:
    """The files of the repository that people write: code, settings, pages."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    found = [ROOT / name for name in names] or [
        path for path in ROOT.rglob("*.py") if ".venv" not in path.parts
    ]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".svg", ""}
    skipped = ("benchmarks/results", "tests/golden", "requirements", "jgr/serving/http/swagger_ui")
    return [
        path
        for path in found
        if path.suffix in kinds and path.is_file() and not name(path).startswith(skipped)
    ]


def test_pages_that_code_names_are_there() -> None:
    wrong = [
        f"{name(path)}: {page}"
        for path in sources()
        if path != Path(__file__)
        for page in PAGE.findall(path.read_text(errors="replace"))
        if not (ROOT / page).exists()
    ]
    assert wrong == []


def test_addresses_of_other_sites_can_be_read() -> None:
    wrong, count = [], 0
    for path in [
        *PAGES,
        *(p for p in sources() if p.suffix == ".py" and name(p).startswith(("jgr/", "examples/"))),
    ]:
        for address in SITE.findall(path.read_text()):
            count += 1
            parts = urlsplit(address.rstrip(".:*"))
            host = parts.hostname or ""
            local = host in ("127.0.0.1", "localhost", "redis", "host", "server", "url")
            if not (local or re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", host)):
                wrong.append(f"{name(path)}: {address}")
    assert wrong == [] and count > 20


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_pictures_read_on_any_ground_and_ask_nobody(picture: Path) -> None:
    """A picture stands on a card of its own, so that it reads on light and on dark pages."""
    text = picture.read_text()
    svg = ElementTree.fromstring(text)
    tag = "{http://www.w3.org/2000/svg}"
    assert svg.find(f"{tag}title") is not None and svg.find(f"{tag}desc") is not None
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    first = svg.find(f"{tag}rect")
    assert first is not None and first.get("class") == "card"
    fills = dict(re.findall(r"(text|\.\w+)[^{}\n]*\{[^}]*fill: (#\w{6})", text))
    inks = [fills.pop(selector) for selector in ("text", ".small")]
    assert len(fills) > 3
    for ink in inks:
        for ground in fills.values():
            light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5
    assert f"concepts/{picture.name}" in (ROOT / "docs" / "concepts.md").read_text()
