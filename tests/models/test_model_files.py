# SPDX-License-Identifier: Apache-2.0
"""Digests of a checkpoint: one bit that is another is refused by its file's name, and what has none is compared."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jgr.models import checkpoint, hf, room, sasrec, scorers
from jgr.models import params as parameters
from jgr.models.model_files import ModelFiles
from jgr.models.params import CheckpointError

HF = Path(__file__).parents[1] / "golden" / "hf"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "own"
    cfg, weights = hf.load(HF / "qwen2")
    checkpoint.save(folder, cfg, weights, lambda f: (f / "tokenizer.json").write_text("{}"))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_flipped_bit_is_refused_with_the_file_named(whole: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in names(whole):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        content = bytearray((folder / name).read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load(folder)
        told = str(refused.value)
        assert "damaged checkpoint" in told and "\n" not in told
        assert name == "digests.json" or str(folder / name) in told
        shutil.rmtree(folder)


def test_files_that_are_missing_longer_or_new_are_refused(whole: Path, tmp_path: Path) -> None:
    data = max((whole / "params").rglob("*"), key=lambda path: path.stat().st_size).relative_to(whole)
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    os.truncate(folder / data, 8 << 30)  # sparse; to hash it would take a minute
    with pytest.raises(CheckpointError, match=rf"{data}: damaged checkpoint: it has 8589934592 bytes"):
        checkpoint.load(folder)
    (folder / data).unlink()
    with pytest.raises(CheckpointError, match=rf"{data}: damaged checkpoint: it is missing"):
        checkpoint.load(folder)
    shutil.copy(whole / data, folder / data)
    checkpoint.load(folder)
    (folder / "params" / "more").write_text("")
    with pytest.raises(
        CheckpointError, match=r"params/more: damaged checkpoint: digests.json does not name it"
    ):
        checkpoint.load(folder)


def test_an_older_checkpoint_is_read_with_a_warning(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "older"
    shutil.copytree(whole, folder)
    (folder / "digests.json").unlink()
    with caplog.at_level(logging.WARNING):
        _, found = checkpoint.load(folder)
    assert "has no digests.json" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, found, checkpoint.load(whole)[1])
    data = max((folder / "params").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(data, 8 << 30)
    with pytest.raises(CheckpointError, match=r"params: holds 85\d+ bytes, its model needs at most \d+"):
        checkpoint.load(folder)


def test_scorers_are_checked_too(tmp_path: Path) -> None:
    cfg = sasrec.SasrecConfig(12, 8, 16, 1, 1, 16, "0")
    scorers.save(tmp_path / "m", cfg, parameters.initialize(sasrec.spec(cfg), jax.random.key(0)))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "max_items": 9}, indent=2) + "\n")
    with pytest.raises(CheckpointError, match=r"config\.json: damaged checkpoint: its SHA-256"):
        scorers.load(tmp_path / "m")


@pytest.mark.parametrize("again", ["same time", "another time", "another file"])
def test_bytes_that_nobody_wrote_are_damage_and_a_written_file_is_a_version(
    tmp_path: Path, again: str
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(HF / "qwen3", folder)
    path = folder / "model.safetensors"
    before, content = path.stat(), bytearray(path.read_bytes())
    first = ModelFiles(folder).revision()
    assert ModelFiles(folder).revision() == first
    content[-1] ^= 1
    if again == "another file":
        path.unlink()
        (folder / "taken").write_text("")  # so that no new file gets the inode
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (again == "another time")))
    if again == "same time":
        with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged: its content has changed"):
            ModelFiles(folder).revision()
    elif path.stat().st_ino != before.st_ino or again == "another time":
        assert ModelFiles(folder).revision() != first


@pytest.mark.parametrize("form", ["own", "hf"])
def test_weights_for_which_there_is_no_memory_are_refused_before_they_are_read(
    whole: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = whole if form == "own" else HF / "qwen3"
    with monkeypatch.context() as patched:
        patched.setattr(room, "free_bytes", lambda: room.SPARE_BYTES)
        with pytest.raises(
            CheckpointError, match=r"no room for this model: it needs \d+ MB of memory, 64 MB"
        ):
            checkpoint.load(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + room.SPARE_ADDRESSES, hard))
    try:
        with pytest.raises(CheckpointError, match=r"MB of address space \(RLIMIT_AS\), \d+ MB are free"):
            checkpoint.load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    checkpoint.load(folder)


def test_a_head_that_is_another_than_the_embedding_is_no_tied_one(tmp_path: Path) -> None:
    cfg, weights = hf.load(HF / "llama3")
    assert weights.head is not None
    hf.export(tmp_path / "m", cfg, weights)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    for tied, words in ((True, "is another than the embedding"), ("yes", "must be true or false")):
        path.write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(tmp_path / "m")
