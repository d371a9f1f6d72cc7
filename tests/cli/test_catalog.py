# SPDX-License-Identifier: Apache-2.0
"""`jgr catalog`, in a process of its own: what it writes, tells, and refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from jgr.catalog.catalog import Catalog, CatalogError, load_catalog, save_catalog
from jgr.cli import catalog as command
from tests.commands import run_here

CATALOG = Catalog.build(["x", "y", "z"], [[5, 1], [5, 2], [7, 1]], [{"title": "X"}, {}, {}])


def _jgr(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return run_here("catalog", *map(str, argv))


def test_build_and_inspect(tmp_path: Path) -> None:
    save_catalog(CATALOG, tmp_path / "c.jsonl.gz")
    out = tmp_path / "c.catalog"
    done = _jgr("build", f"--catalog={tmp_path / 'c.jsonl.gz'}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["version"], told["items"]) == (CATALOG.version, 3)
    assert load_catalog(out).metadata == CATALOG.metadata
    done = _jgr("inspect", f"--catalog={out}")
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["items"], told["semantic_ids"], told["max_degrees"]) == (3, 3, [2, 2])
    assert (told["nodes"], told["level_sizes"], told["version"]) == ([2, 3], [2, 2], CATALOG.version)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["build", "--catalog=c.jsonl", "--out=x.jsonl"], "--out: a folder named *.catalog, found 'x.jsonl'"),
        (["build", "--out=x.catalog"], "--catalog: name a catalog"),
        (["inspect", "--catalog=none.catalog"], "none.catalog/catalog.json: cannot be read: No such file"),
        (["change"], "there is no 'jgr catalog change'"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], words: str) -> None:
    done = _jgr(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_built_catalog_is_replaced_only_where_asked(tmp_path: Path) -> None:
    other = Catalog.build(["x", "y"], [[5, 1], [5, 2]], [{}, {}])
    save_catalog(CATALOG, tmp_path / "c.jsonl")
    save_catalog(other, tmp_path / "d.jsonl")
    out = tmp_path / "c.catalog"
    build = ("build", f"--out={out}")
    assert _jgr(*build, f"--catalog={tmp_path / 'c.jsonl'}").returncode == 0
    done = _jgr(*build, f"--catalog={tmp_path / 'd.jsonl'}")
    assert done.returncode == 2 and "holds a catalog: --overwrite replaces it" in done.stderr
    assert load_catalog(out).version == CATALOG.version
    assert _jgr(*build, f"--catalog={tmp_path / 'gone.jsonl'}", "--overwrite").returncode == 2
    assert load_catalog(out).version == CATALOG.version
    assert _jgr(*build, f"--catalog={tmp_path / 'd.jsonl'}", "--overwrite").returncode == 0
    assert load_catalog(out).version == other.version
    (tmp_path / "mine.catalog").mkdir()
    (tmp_path / "mine.catalog" / "diary.txt").write_text("dear")
    done = _jgr(
        "build", f"--out={tmp_path / 'mine.catalog'}", f"--catalog={tmp_path / 'd.jsonl'}", "--overwrite"
    )
    assert done.returncode == 2 and (tmp_path / "mine.catalog" / "diary.txt").exists()


def test_the_old_catalog_can_be_loaded_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, out = Catalog.build(["x", "y"], [[5, 1], [5, 2]], [{}, {}]), tmp_path / "c.catalog"
    save_catalog(CATALOG, out)
    save_catalog(new, tmp_path / "d.jsonl")
    seen: list[str] = []

    def saving(catalog: Catalog, path: Path) -> None:
        seen.append(load_catalog(out).version)
        save_catalog(catalog, path)
        seen.append(load_catalog(out).version)
        if len(seen) == 2:
            raise CatalogError("the disk is full")

    monkeypatch.setattr("jgr.catalog.catalog.save_catalog", saving)
    monkeypatch.setattr(command, "flags", SimpleNamespace(FLAGS=SimpleNamespace(overwrite=True)))
    with pytest.raises(CatalogError, match="the disk is full"):
        command._build(tmp_path / "d.jsonl", str(out))
    assert load_catalog(out).version == CATALOG.version
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.catalog", "d.jsonl"]
    command._build(tmp_path / "d.jsonl", str(out))
    assert load_catalog(out).version == new.version
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.catalog", "d.jsonl"]
    assert seen == [CATALOG.version] * 4


def test_a_link_leads_to_the_catalog_that_is_replaced(tmp_path: Path) -> None:
    new = Catalog.build(["x", "y"], [[5, 1], [5, 2]], [{}, {}])
    save_catalog(CATALOG, tmp_path / "first.catalog")
    (tmp_path / "first.catalog").rename(tmp_path / "first")
    (tmp_path / "c.catalog").symlink_to("first")
    save_catalog(new, tmp_path / "d.jsonl")
    done = _jgr(
        "build", f"--out={tmp_path / 'c.catalog'}", f"--catalog={tmp_path / 'd.jsonl'}", "--overwrite"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.catalog").is_symlink() and load_catalog(
        tmp_path / "c.catalog"
    ).version == new.version
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.catalog", "d.jsonl", "first"]
