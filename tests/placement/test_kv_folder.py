# SPDX-License-Identifier: Apache-2.0
"""Blocks in files: what is written is read, a build that was ended goes on, and what is wrong is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.fields import UserError
from jgr.placement import kv_folder
from jgr.placement.kv_folder import FORMAT, RECORD, About, KvBuilder, KvFolder, require_room
from jgr.placement.shared_items import Block, block_of

WORDS, MODEL = 4, "model@1/float32"
ABOUT = About(FORMAT, MODEL, WORDS, "model@1")


def digest(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def block(number: int) -> Block:
    rng = np.random.default_rng(number)
    return block_of(rng.integers(0, 2**32, (1 + number % 3, WORDS), np.uint32))


def add(folder: Path, *numbers: int) -> None:
    with KvBuilder(folder, ABOUT) as builder:
        for number in numbers:
            builder.add({digest(number): block(number)})


def require(folder: Path, *numbers: int) -> None:
    found = KvFolder(folder, MODEL)
    assert len(found) == len(numbers)
    for number in numbers:
        read = found.read(digest(number))
        assert read is not None and found.has(digest(number))
        np.testing.assert_array_equal(read.words, block(number).words)
        assert read.checksum == block(number).checksum
    assert found.read(digest(999)) is None


def test_a_folder_gives_what_was_added_also_by_several_builds(tmp_path: Path) -> None:
    add(tmp_path / "kv", 1, 2, 3)
    add(tmp_path / "kv", 2, 4)
    require(tmp_path / "kv", 1, 2, 3, 4)


def test_a_folder_that_was_begun_has_nothing(tmp_path: Path) -> None:
    add(tmp_path)
    require(tmp_path)


@settings(max_examples=30, deadline=None)
@given(blocks=st.integers(0, 200), index=st.integers(0, 200), more=st.lists(st.integers(0, 6), max_size=3))
def test_a_build_that_was_ended_anywhere_goes_on(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, index: int, more: list[int]
) -> None:
    """Whatever part of the files reached the disk, a builder believes only whole blocks, and ends with all."""
    folder = tmp_path_factory.mktemp("kv")
    add(folder, 0, 1, 2, 3)
    for name, size in (("blocks.bin", blocks), ("index.bin", index)):
        path = folder / name
        os.truncate(path, min(size, path.stat().st_size))
    with KvBuilder(folder, ABOUT) as builder:
        known = [number for number in range(4) if builder.has(digest(number))]
        for number in (*more, 0, 1, 2, 3):
            builder.add({digest(number): block(number)})
    assert known == list(range(len(known)))
    require(folder, *sorted({0, 1, 2, 3, *more}))


def test_a_block_that_changed_on_the_disk_is_none(tmp_path: Path) -> None:
    add(tmp_path, 1, 2)
    with open(tmp_path / "blocks.bin", "r+b") as stream:
        stream.write(b"\0\0\0\1")
    found = KvFolder(tmp_path, MODEL)
    assert found.read(digest(1)) is None
    assert found.read(digest(2)) is not None
    with KvBuilder(tmp_path, ABOUT) as builder:
        assert not builder.has(digest(1)), "and is built again"


def test_a_file_that_is_cut_short_or_goes_while_it_is_read_ends_nothing(tmp_path: Path) -> None:
    add(tmp_path, 1, 2)
    found = KvFolder(tmp_path, MODEL)
    os.truncate(tmp_path / "blocks.bin", block(1).nbytes)
    read = found.read(digest(1))
    assert read is not None and read.checksum == block(1).checksum
    assert found.read(digest(2)) is None
    (tmp_path / "blocks.bin").unlink()
    assert found.read(digest(1)) is not None, "which is open"
    with pytest.raises(UserError, match="cannot be read"):
        KvFolder(tmp_path, MODEL)


def test_two_builders_do_not_work_at_one_folder(tmp_path: Path) -> None:
    with KvBuilder(tmp_path, ABOUT):
        with pytest.raises(UserError, match="another jgr kv build is at work there"):
            KvBuilder(tmp_path, ABOUT).__enter__()
    add(tmp_path, 1)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    add(tmp_path, 1)
    for open_it in (
        lambda: KvFolder(tmp_path, "model@2/float32"),
        lambda: KvBuilder(tmp_path, About(FORMAT, "model@2/float32", WORDS)).__enter__(),
    ):
        with pytest.raises(UserError, match=r"of another model.*model@1/float32.*model@2/float32"):
            open_it()
    require(tmp_path, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not what jgr kv build writes"),
        ('{"format": 0, "identity": "", "cell_words": 1}', "another version of jgr"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "kv.json").write_text(text)
    with pytest.raises(UserError, match=says):
        KvFolder(tmp_path, MODEL)
    with pytest.raises(UserError, match="no such folder"):
        KvFolder(tmp_path / "other", MODEL)


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, inner: Any, room: int) -> None:
        self._inner, self._room = inner, room

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self._inner.write(data[: self._room])
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_disk_that_is_full_is_told_and_what_is_there_stays(tmp_path: Path) -> None:
    with KvBuilder(tmp_path, ABOUT) as builder:
        builder.add({digest(1): block(1)})
        builder._blocks = Full(builder._blocks, 10)  # type: ignore[assignment]
        with pytest.raises(UserError, match=r"the disk is full after 1 items; make room and start again"):
            builder.add({digest(2): block(2)})
    require(tmp_path, 1)
    add(tmp_path, 2)
    require(tmp_path, 1, 2)


def test_a_file_that_a_full_disk_keeps_from_closing_hides_no_error_and_keeps_no_lock(tmp_path: Path) -> None:
    """What was not taken is tried again as the file is closed."""
    with pytest.raises(UserError, match=r"the disk is full after 1 items"):
        with KvBuilder(tmp_path, ABOUT) as builder:
            builder.add({digest(1): block(1)})
            builder._blocks.close()
            builder._blocks = open("/dev/full", "ab")
            builder.add({digest(2): block(2)})
    add(tmp_path, 2)
    require(tmp_path, 1, 2)


def test_a_disk_that_is_too_small_is_told_before_the_work(tmp_path: Path) -> None:
    require_room(tmp_path, 1)
    with pytest.raises(UserError, match=r"the disk has \d+ MB left, the items' keys and values need"):
        require_room(tmp_path, 1 << 60)


def test_records_are_as_they_were_written_by_other_versions() -> None:
    assert (RECORD.itemsize, kv_folder.FORMAT) == (48, 1)
