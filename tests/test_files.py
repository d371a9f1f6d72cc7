# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a file becomes the caller's error; what is written is whole or absent."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import pytest

from jgr import files
from jgr.config import UserError
from jgr.files import read_lines, read_whole, writing


class Mistake(UserError):
    pass


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with writing(path, Mistake) as stream:
        stream.write(b"one\r\n\ntwo")
    assert list(read_lines(path, Mistake)) == [(1, b"one"), (2, b""), (3, b"two")]
    assert read_whole(path, Mistake) == b"one\r\n\ntwo"
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    first = path.read_bytes()
    with writing(path, Mistake) as stream:
        stream.write(b"one\r\n\ntwo")
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == [name]


def test_reading_errors_name_the_file(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(5000))
    (tmp_path / "short.gz").write_bytes(whole[:3000])
    (tmp_path / "plain.gz").write_bytes(b"no gzip at all")
    (tmp_path / "broken.gz").write_bytes(whole[:100] + bytes(100) + whole[200:])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.gz")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, reason in [
        ("short.gz", "cut short"),
        ("plain.gz", "cannot be read"),
        ("broken.gz", "cannot be read"),
        ("folder", "cannot be read"),
        ("missing", "cannot be read: No such file"),
        ("pipe", "cannot be read: it is not a regular file"),
        ("pipe.gz", "cannot be read: it is not a regular file"),
        ("device", "cannot be read: it is not a regular file"),
    ]:
        with pytest.raises(Mistake, match=f"{re.escape(str(tmp_path / name))}: .*{reason}"):
            read_whole(tmp_path / name, Mistake)
        with pytest.raises(Mistake, match=reason):
            list(read_lines(tmp_path / name, Mistake))


def test_a_name_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"^'.*a\\x00b': cannot be read: no file's name has a zero byte$"):
        read_whole(tmp_path / "a\0b", Mistake)


def test_endless_lines_and_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 30)
    path = tmp_path / "a"
    path.write_bytes(b"123456789\n" * 3)
    assert len(list(read_lines(path, Mistake))) == 3
    assert len(read_whole(path, Mistake)) == 30
    path.write_bytes(b"123456789\n" * 3 + b"1234567890\n")
    with pytest.raises(Mistake, match="a:4: the line is longer than 10 bytes"):
        list(read_lines(path, Mistake))
    with pytest.raises(Mistake, match="more than 30 bytes"):
        read_whole(path, Mistake)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), writing(path, Mistake) as stream:
        stream.write(b"half of the ne")
        raise KeyError
    with pytest.raises(Mistake, match="No space left"), writing(path, Mistake) as stream:
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(Mistake, match="cannot be written"), writing(tmp_path / "no" / "a", Mistake):
        pass
