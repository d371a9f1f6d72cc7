# SPDX-License-Identifier: Apache-2.0
"""docs/reference is what the code says: each page is up to date, and has every command, operation, call and series."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import jgr
from jgr.cli.main import COMMANDS
from jgr.serving.engine import metrics
from jgr.serving.http.operations import OPERATIONS
from tools import reference_pages
from tools.reference_pages import FOLDER, main, pages

TOLD = "run: python -m tools.reference_pages"
RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


def test_the_pages_are_up_to_date() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == set(pages()), TOLD
    for name, text in pages().items():
        assert (FOLDER / name).read_text() == text, TOLD


def test_reading_the_flags_leaves_none_defined() -> None:
    before = set(flags.FLAGS)
    reference_pages.commands()
    assert set(flags.FLAGS) == before


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^#{2,3} (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("command", ["bench", "ids"])
def test_a_command_has_the_flags_of_its_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, command, "--help"], capture_output=True, text=True, check=True
    )
    told = set(re.findall(r"^  --(\w+)", done.stdout, re.MULTILINE)) - {"help"}
    found = sections(pages()["cli.md"])
    shown = found[reference_pages.OF_ALL_COMMANDS] + found[f"jgr {command}"]
    assert set(re.findall(r"^\| `--(\w+)`", shown, re.MULTILINE)) == told and len(told) > 10


def test_everything_is_there() -> None:
    assert {f"jgr {command}" for command in COMMANDS} <= sections(pages()["cli.md"]).keys()
    http = sections(pages()["http.md"])
    assert {f"{one.method.upper()} {one.path}" for one in OPERATIONS} <= http.keys()
    assert (
        "| `history` | list of string or integer (at least 1 of them, at most 4,096 of them) |"
        in http["RankRequest"]
    )
    python = pages()["python.md"]
    assert [name for name in jgr._PUBLIC if f"jgr.{name}" not in python] == []
    assert (
        "recommend(history: History, *, top_k: int = ..., **fields: Unpack[RecommendFields]) -> Answer"
        in python
    )
    shown = set(re.findall(r"^\| `(jgr_\w+?)(?:_total)?` \|", pages()["metrics.md"], re.MULTILINE))
    assert shown == {name for name in metrics.documentation() if name.startswith("jgr_")}
    assert "| `source`: `cached`, `computed` |" in pages()["metrics.md"]


def test_each_series_has_the_labels_that_dashboards_sum_by() -> None:
    labels = dict(re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) \|", pages()["metrics.md"], re.MULTILINE))
    assert labels["jgr_fleet_item_bytes_total"] == "`from`; `to`; `purpose`: `request`, `placement`"
    assert labels["jgr_fleet_items_missing_total"] == "`outcome`: `fetched`, `computed`"


def test_links_between_the_types_lead_to_them() -> None:
    http = pages()["http.md"]
    assert set(re.findall(r"\]\(#(\w+)\)", http)) <= {name.lower() for name in sections(http)}


def test_no_table_holds_a_cell_that_ends_early() -> None:
    for text in pages().values():
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
            assert len(cells) == 1, block


def test_the_tool_writes_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_pages, "FOLDER", tmp_path / "reference")
    assert main() == 0
    written = {path.name: path.read_text() for path in (tmp_path / "reference").iterdir()}
    assert written == pages()
