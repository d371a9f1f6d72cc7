# SPDX-License-Identifier: Apache-2.0
"""The golden files in the tree are the ones that were copied, and a copy replaces folders as a whole."""

import hashlib
import json
from pathlib import Path

import pytest

from jgr.config import UserError
from tools.copy_golden import GOLDEN, MANIFEST, copy, hashes


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_golden_files_match_their_manifest() -> None:
    listed = json.loads((GOLDEN / MANIFEST).read_text())
    assert {name.split("/")[0] for name in listed} >= {"hf", "metrics"}
    assert hashes(GOLDEN) == listed


def test_copy_replaces_its_folders_only(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name, content in (("a/x/1.bin", b"one"), ("a/2.bin", b"two"), ("b/3.bin", b"three")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    (source / MANIFEST).write_text(json.dumps({"a/2.bin": {"sha256": _sha256(b"two")}}))
    for stale in ("a/stale.bin", "c/kept.bin"):
        (target / stale).parent.mkdir(parents=True)
        (target / stale).write_bytes(b"old")

    expected = {"a/2.bin": _sha256(b"two"), "a/x/1.bin": _sha256(b"one"), "c/kept.bin": _sha256(b"old")}
    assert copy(source, target, ["a"]) == expected
    assert json.loads((target / MANIFEST).read_text()) == expected
    assert (target / "a/x/1.bin").read_bytes() == b"one"


def test_a_damaged_or_missing_source_changes_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a").mkdir(parents=True)
    (source / "a/1.bin").write_bytes(b"damaged")
    (source / MANIFEST).write_text(json.dumps({"a/1.bin": {"sha256": _sha256(b"whole")}}))
    with pytest.raises(UserError, match=r"1\.bin differs"):
        copy(source, target, ["a"])
    with pytest.raises(UserError, match="no folder 'z'"):
        copy(source, target, ["z"])
    assert not target.exists()
