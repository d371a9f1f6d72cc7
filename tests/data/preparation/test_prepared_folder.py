# SPDX-License-Identifier: Apache-2.0
"""A prepared folder: it is made once, a run that ended anywhere goes on, and what is damaged is never loaded."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgr.data.preparation.prepare as pipeline
from jgr.config import UserError
from jgr.data.interactions import DataError
from jgr.data.preparation import reading
from jgr.data.preparation.prepare import prepare
from jgr.data.prepared import load_prepared
from tests.data.preparation.rows import LOG, log_options, write_rows


def _tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_again_is_nothing_to_do_and_other_inputs_are_refused(tmp_path: Path) -> None:
    options = log_options(tmp_path)
    prepare(options)
    before = _tree(options.out)
    assert set(before) == {"items.jsonl", "users.jsonl", "interactions.npz", "manifest.json"}
    assert prepare(options)[1] is False
    assert _tree(options.out) == before
    with pytest.raises(UserError, match="other parameters: --overwrite replaces it, or give another --out"):
        prepare(replace(options, min_item=2))
    write_rows(options.raw, LOG[:-1])
    with pytest.raises(UserError, match="a dataset of other files"):
        prepare(options)
    assert _tree(options.out) == before


def test_manifest_names_inputs_and_outputs_by_hash(tmp_path: Path) -> None:
    options = log_options(tmp_path)
    manifest, _ = prepare(options)
    assert json.loads((options.out / "manifest.json").read_text()) == manifest
    for folder, records in ((options.raw, manifest["inputs"]), (options.out, manifest["outputs"])):
        for name, entry in records.items():
            content = (folder / name).read_bytes()
            assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["parameters"] == {
        "source": "generic",
        "split": "leave_one_out",
        "min_user": 0,
        "min_item": 0,
        "bpe_vocab": 0,
        "columns": True,
    }


class _Killed(BaseException):
    """Stands for the end of the process at any write."""


@pytest.mark.parametrize("survived", range(10))
def test_a_run_that_ends_anywhere_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    options = log_options(tmp_path)
    whole = replace(options, out=tmp_path / "whole")
    prepare(whole)
    writes = 0
    write = pipeline.writing

    def failing(path: Path, error: type[UserError]) -> Any:
        nonlocal writes
        writes += 1
        if writes > survived:
            raise _Killed
        return write(path, error)

    for module in (pipeline, reading):
        monkeypatch.setattr(module, "writing", failing)
    # Four files, then three, and a marker for each of the two stages; the tenth write is the manifest.
    with pytest.raises(_Killed):
        prepare(options)
    with pytest.raises(DataError, match="did not finish"):
        load_prepared(options.out)
    for module in (pipeline, reading):
        monkeypatch.setattr(module, "writing", write)
    (options.out / ".items.jsonl.1.partial").write_text("half")
    reads = 0
    read = reading.read

    def counting(*arguments: Any) -> None:
        nonlocal reads
        reads += 1
        read(*arguments)

    monkeypatch.setattr(reading, "read", counting)
    prepare(options)
    assert reads == (survived < 5)
    assert _tree(options.out) == _tree(whole.out)


def test_a_stage_of_other_inputs_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = log_options(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_write", lambda *_: (_ for _ in ()).throw(_Killed()))
        with pytest.raises(_Killed):
            prepare(options)
    assert (options.out / ".work" / "read.json").exists()
    write_rows(options.raw, LOG[:12])
    assert prepare(options)[0]["counts"]["interactions"] == 12


DAMAGE = [
    ("items.jsonl", lambda content: content[:-5], "has .* bytes, the manifest says"),
    ("users.jsonl", lambda content: content.replace(b"u0", b"u9"), "its content is not what the manifest"),
    ("interactions.npz", lambda content: content[:200] + b"x" + content[201:], "its content is not"),
    ("interactions.npz", None, "is missing"),
    ("manifest.json", lambda content: content[:-9], "not JSON"),
    ("manifest.json", lambda content: b"[]", "not a manifest of format 1"),
    (
        "manifest.json",
        lambda content: content.replace(b'"format": 1', b'"format": 2'),
        "not a manifest of format",
    ),
    ("manifest.json", lambda content: content.replace(b"users.jsonl", b"../x.jsonl_"), "outputs must be"),
    ("manifest.json", lambda content: content.replace(b'"sha256"', b'"sha257"'), "outputs: "),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_a_damaged_folder_is_never_loaded(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    options = log_options(tmp_path)
    prepare(options)
    path = options.out / name
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
        assert path.read_bytes() != content
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}"):
        load_prepared(options.out)
    if name != "manifest.json":
        assert prepare(options)[1]
        assert path.read_bytes() == content


def test_an_npz_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = log_options(tmp_path)
    prepare(options)
    path = options.out / "interactions.npz"
    good = dict(np.load(path))
    # The hashes agree in all of these.
    monkeypatch.setattr("jgr.data.prepared.first_difference", lambda *_: None)
    for changes, message in [
        ({"rows": good["rows"].astype(np.float32)}, "rows is float32"),
        ({"train": good["train"][:3]}, r"train is int64 \(3, "),
        ({"more": good["rows"]}, "holds other arrays"),
        ({"test": good["test"][[0, 1, 3, 2]] + [[0], [0], [1], [0]]}, "the split leaks"),
    ]:
        np.savez(path, **(good | changes))
        with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}"):
            load_prepared(options.out)
    path.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match="is damaged"):
        load_prepared(options.out)
    np.savez(path, **(good | {"times": np.array([{}], object)}))  # would have to be unpickled
    with pytest.raises(DataError, match="is damaged"):
        load_prepared(options.out)
