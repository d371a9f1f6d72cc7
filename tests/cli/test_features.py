# SPDX-License-Identifier: Apache-2.0
"""`jgr features load` into both stores, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jgr.data.interactions import leave_one_out
from jgr.data.prepared import Arrays, record
from jgr.features.addresses import open_store
from jgr.features.extraction import category
from jgr.features.schema import Schema
from tests.commands import run_here
from tests.features.redis_process import RedisProcess

N = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of five items."""
    data = tmp_path / "data"
    data.mkdir()
    taken = leave_one_out([np.arange(N, dtype=np.int32)] * 2)
    items = [
        {"item_id": f"i{row}", "metadata": {"title": f"t{row}", "kind": "AB"[row % 2], "year": row}}
        for row in range(N)
    ]
    (data / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (data / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in taken.user_ids))
    np.savez(data / "interactions.npz", **Arrays.of(taken).to_dict())
    outputs = {path.name: record(path) for path in sorted(data.iterdir())}
    (data / "manifest.json").write_text(json.dumps({"format": 1, "outputs": outputs}))
    return data


def _features(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_here("features", *argv)


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_load(folder: Path, tmp_path: Path, kind: str) -> None:
    server = RedisProcess(tmp_path) if kind == "redis" else None
    address = server.address if server else str(tmp_path / "features.sqlite")
    try:
        done = _features("load", f"--data={folder}", f"--feature_store={address}")
        assert (done.returncode, done.stderr) == (0, "")
        loaded = json.loads(done.stdout.splitlines()[-1])
        assert loaded == {"items": N, "record_bytes": 24, "schema": "kind:int32,year:int32"}
        store = open_store(address, 5.0)
        schema = Schema.parse(store.schema() or "")
        found = store.get_many([f"i{row}" for row in range(N)])
        assert schema.faults(found) == [] and None not in found
        records = schema.records([value for value in found if value])
        assert records["year"][:, 0].tolist() == list(range(N))
        assert records["kind"][:, 0].tolist() == [category("AB"[row % 2]) for row in range(N)]
        again = ["load", f"--data={folder}", f"--set=features.store={address}"]
        done = _features(*again, "--set=features.schema=year:int8")
        assert done.returncode == 2
        assert (
            "holds features of items: --overwrite replaces it, or give another --feature_store" in done.stderr
        )
        assert store.schema() == str(schema)
        done = _features(*again, "--set=features.schema=year:int8", "--overwrite")
        assert done.stdout.startswith("the schema was kind:int32,year:int32: restart what serves")
        assert store.schema() == "year:int8"
        store.close()
    finally:
        if server:
            server.kill()


def test_a_field_that_cannot_be_a_feature_is_named(folder: Path, tmp_path: Path) -> None:
    items, manifest = folder / "items.jsonl", folder / "manifest.json"
    items.write_text(items.read_text().replace('"year"', '"release year"'))
    outputs = json.loads(manifest.read_text())["outputs"] | {items.name: record(items)}
    manifest.write_text(json.dumps({"format": 1, "outputs": outputs}))
    done = _features("load", f"--data={folder}", f"--feature_store={tmp_path / 'features.sqlite'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("left out: 'release year': a feature's name has ASCII letters, digits, ")
    assert json.loads(done.stdout.splitlines()[-1])["schema"] == "kind:int32"


def test_mistakes_are_named(tmp_path: Path, folder: Path) -> None:
    for argv, message in [
        (
            [
                "load",
                f"--data={folder}",
                f"--feature_store={tmp_path / 'f'}",
                "--set=features.schema=yaer:int8",
            ],
            "features.schema: no item has yaer; there are kind, title, year",
        ),
        (["unload"], "there is no 'jgr features unload'; there is load"),
        (["load"], "--data: name the folder"),
        (["load", "--data=x"], "--feature_store: name a store"),
        (["load", f"--data={tmp_path}", "--feature_store=y"], "jgr prepare did not run"),
    ]:
        done = _features(*argv)
        assert done.returncode == 2 and message in done.stderr
