# SPDX-License-Identifier: Apache-2.0
"""`jgr prepare` as a user meets it, each run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jgr.data.prepared import load_prepared

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


def _prepare(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, "prepare", *argv], capture_output=True, text=True, check=False
    )


def _raw(folder: Path) -> Path:
    folder.mkdir()
    rows = [f"u{i % 3},i{i * i % 5},{i}\n" for i in range(20)]
    (folder / "interactions.csv").write_text("user_id,item_id,timestamp\n" + "".join(rows))
    return folder


def test_it_prepares_then_finds_it_prepared(tmp_path: Path) -> None:
    flags = [
        "--source=generic",
        f"--raw={_raw(tmp_path / 'raw')}",
        f"--out={tmp_path / 'out'}",
        "--split=time",
    ]
    done = _prepare(*flags)
    assert done.returncode == 0, done.stderr
    name, *notes, counts = done.stdout.splitlines()
    assert name == str(tmp_path / "out")
    prepared = load_prepared(tmp_path / "out")
    assert json.loads(counts) == prepared.manifest["counts"]
    assert json.loads(counts)["interactions"] == 20
    again = _prepare(*flags)
    assert notes == ["timestamp: whole numbers of s, by their size (--time_unit says otherwise); from 1970-01-01 to "
                     "1970-01-01 UTC"]  # fmt: skip
    assert again.stdout.splitlines() == [f"{name} is prepared already", *notes, counts]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--source is not set"),
        (["--source=generic", "--out=x"], "--raw is not set"),
        (["--source=nothing", "--raw=x", "--out=y"], "no 'nothing'; known: movielens-100k"),
        (["--source=generic", "--raw=/no/such", "--out=y"], "/no/such: there is no such folder"),
        (["--split=random"], "leave_one_out|time|given"),
        (["--min_item=-1"], "min_item"),
        (["more"], "unexpected argument 'more'"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str) -> None:
    done = _prepare(*flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_malformed_row_is_named_and_nothing_loads(tmp_path: Path) -> None:
    raw = _raw(tmp_path / "raw")
    path = raw / "interactions.csv"
    path.write_text(path.read_text() + "u1,i1\n")
    done = _prepare("--source=generic", f"--raw={raw}", f"--out={tmp_path / 'out'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}:22: has 2 fields, the header 3" in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
