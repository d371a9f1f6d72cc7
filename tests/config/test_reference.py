# SPDX-License-Identifier: Apache-2.0
"""The reference of the fields is made of the comments beside them, which read alone."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jgr.config import Config, ConfigError
from jgr.config.reference import chosen, comments_of, markdown, plain_text, reference
from jgr.config.tree import field_types, secret_fields
from tools.config_reference import PAGE, main, page

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
SECTIONS = reference(Config)
FIELDS = [field for section in SECTIONS for field in section.fields]
SOURCE = '''
from dataclasses import dataclass, field

@dataclass
class Part:
    """A part."""

    # Not of a: an empty line stands between.

    a: int = 1  # first of two
    b: int = 2
    # Above c, on
    # two lines.
    c: str = "# no comment"
    d: str = field(
        default="",
        repr=False,  # within the brackets
    )

    def method(self) -> None:
        pass  # of the method

    e: bool = True
'''


def test_comments_stand_above_or_behind_a_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some_parts.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("some_parts").Part
    found = comments_of(cls)
    monkeypatch.delitem(sys.modules, "some_parts")
    assert found == {"a": "first of two", "c": "Above c, on two lines.", "d": "within the brackets"}


def test_every_field_is_there_with_its_comment_and_default() -> None:
    assert [field.key for field in FIELDS] == list(field_types(Config))
    by_key = {field.key: field for field in FIELDS}
    assert by_key["server.port"][2:] == ("an integer", "8000", "Port to listen on; 0: any free port.")
    assert by_key["profiles.tokens"].default == "64,256"
    assert by_key["server.default_deadline_ms"][2:4] == ("a finite number or none", "none")
    assert by_key["train.times"][2:4] == ("true or false", "false")
    assert {field.key for field in FIELDS if field.values.endswith(", a secret")} == secret_fields(Config)


def test_comments_read_alone() -> None:
    sentences = {f.key: len(re.findall(r"[.!?](?=\s+[A-Z]|$)", f.text)) for f in FIELDS}
    assert {key: n for key, n in sentences.items() if not 1 <= n <= 2} == {}
    fragment = re.compile(r"(The same|It|They|Them|Its|Their|Of|As above|Also|Others?)\b|.{0,8}$")
    assert [field.key for field in FIELDS if fragment.match(field.text)] == []


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run: python -m tools.config_reference"
    for field in FIELDS:
        assert f"| `{field.key}` |" in PAGE.read_text()


def test_the_tool_writes_the_page_and_tells_of_missing_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "configuration.md"
    copy.write_text(PAGE.read_text().replace("Port to listen on", "Old words"))
    monkeypatch.setattr("tools.config_reference.PAGE", copy)
    assert main() == 0
    assert copy.read_text() == PAGE.read_text()
    copy.write_text("nothing")
    assert main() == 2
    assert "must hold" in capsys.readouterr().err


def test_a_table_holds_no_cell_that_ends_early() -> None:
    rows = [line for line in markdown(SECTIONS).splitlines() if line.startswith("| `")]
    assert len(rows) == len(FIELDS)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}


def test_a_topic_is_all_a_section_or_a_field() -> None:
    assert chosen(SECTIONS, "config") == SECTIONS
    (server,) = chosen(SECTIONS, "config.server")
    assert server.name == "server"
    (one,) = chosen(SECTIONS, "config.server.port")
    assert [field.key for field in one.fields] == ["server.port"]
    nearest = {
        "config.sever": "config.server",
        "server": "config.server",
        "config.server.prot": "config.server.port",
    }
    for topic, near in nearest.items():
        with pytest.raises(ConfigError, match=rf"no such topic; the nearest is --help={near}$"):
            chosen(SECTIONS, topic)


@pytest.mark.parametrize("command", ["serve", "config", "train"])
def test_help_shows_it(command: str) -> None:
    def jgr(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)

    done = jgr(command, "--help=config")
    assert (done.returncode, done.stdout) == (0, plain_text(SECTIONS) + "\n")
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    done = jgr(command, "--help=config.server")
    assert done.stdout.startswith("server: ")
    assert (
        "  server.port: an integer; default: 8000\n      Port to listen on; 0: any free port.\n"
        in done.stdout
    )
    assert "beam.width:" not in done.stdout
    done = jgr(command, "--help=config.sever")
    assert (done.returncode, done.stderr) == (
        2, "jgr: --help=config.sever: there is no such topic; the nearest is --help=config.server\n"
    )  # fmt: skip
    assert "--help=config " in jgr(command, "--help").stdout
