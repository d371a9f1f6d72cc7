# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested without an end, or holds bytes that are no text, is refused by the name of its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from jgr.data.prepared import load_manifest, read_ids
from jgr.fields import UserError
from jgr.library.corpus import read_corpus
from jgr.library.folder import read_about
from jgr.placement.kv_folder import KvFolder
from jgr.serving.engine import journal
from jgr.traffic import view_file
from jgr.traffic.arrival_files import read_arrivals
from jgr.traffic.mixes import read_mix
from jgr.traffic.schedule import read_trace

DEEP = b"[" * 20_000
BAD_TEXT = b'{"text": "\xff"}'
BAD_ID = b'"\xff"'


def _corpus(path: Path) -> Any:
    return read_corpus(path, cast(Any, None), 8, 0.0)


@pytest.mark.parametrize(
    "content",
    [
        b'{"timestamp": 1, "x": ' + DEEP,
        b'{"at_ms": 1, "path": "/v1/rank", "body": ' + DEEP,
        b'{"classes": [{"name": "a", "fields": {"x": ' + DEEP,
        BAD_TEXT,
        BAD_ID,
    ],
    ids=["field", "body", "fields", "text", "id"],
)
@pytest.mark.parametrize(
    "read",
    [
        _corpus,
        read_mix,
        read_trace,
        read_arrivals,
        view_file.read,
        lambda path: list(journal.read(path)),
        read_ids,
    ],
    ids=["corpus", "mix", "trace", "arrivals", "views", "journal", "ids"],
)
def test_a_file(tmp_path: Path, read: Callable[..., Any], content: bytes) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(content + b"\n")
    with pytest.raises(UserError, match=r"file\.jsonl"):
        read(path, 10) if read is read_trace else read(path)


@pytest.mark.parametrize("content", [b'{"format": 1, "x": ' + DEEP, BAD_TEXT], ids=["field", "text"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("manifest.json", load_manifest),
        ("library.json", read_about),
        ("kv.json", lambda path: KvFolder(path, "")),
    ],
)
def test_a_folder(tmp_path: Path, name: str, read: Callable[[Path], Any], content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read(tmp_path)
