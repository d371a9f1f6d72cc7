# SPDX-License-Identifier: Apache-2.0
"""Files of a model's folder that are larger than any of its model, by the loader of the server: refused unread."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jgr.catalog.catalog import save_catalog
from jgr.config import Config, override
from jgr.models import scorers
from jgr.models.model_files import DIGESTS, INDEX, ModelFiles
from jgr.models.params import CheckpointError
from jgr.serving.versions.loading import load_any
from tests.serving import scorer_fakes, tiny_model

HUGE = 3 << 30
"""To hash so many bytes takes many seconds, and no test waits for that: see `refusal`."""
HF = Path(__file__).parents[2] / "golden" / "hf" / "qwen3"


def grow(folder: Path, place: str) -> None:
    """Make the largest file of a place of a folder huge; it takes no room on the disk."""
    files = [path for path in folder.glob(place) if path.is_file()]
    os.truncate(max(files, key=lambda path: path.stat().st_size), HUGE)


def refusal(config: Config) -> str:
    """Why a folder is refused, without that any of its files is hashed."""

    def hashed(files: ModelFiles, name: str) -> bytes:
        raise AssertionError(f"{name} is hashed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as refused:
        patch.setattr(ModelFiles, "_hash", hashed)
        load_any(config)
    return str(refused.value)


def test_parameters_of_a_decoder(tmp_path: Path) -> None:
    config = tiny_model.make_folder(tmp_path / "m")
    (tmp_path / "m" / DIGESTS).unlink()
    grow(tmp_path / "m", "params/**/*")
    told = refusal(config)
    assert "params: holds 32" in told and "its model needs at most 1" in told and "\n" not in told


@pytest.mark.parametrize("place", ["params/**/*", "embeddings/*"])
@pytest.mark.parametrize("paged", [False, True])
def test_parameters_and_tables_of_a_scorer(place: str, paged: bool, tmp_path: Path) -> None:
    folder, cfg = tmp_path / "m", scorer_fakes.HSTU
    settings = ("embeddings.tables=paged",) if paged else ()
    config = scorer_fakes.make_folder(folder, cfg, *settings)
    shutil.rmtree(folder)
    scorers.save(
        folder,
        cfg,
        scorer_fakes.draw(cfg),
        lambda to: save_catalog(scorer_fakes.CATALOG, to / "catalog.jsonl"),
        "float32",
    )
    (folder / DIGESTS).unlink()
    grow(folder, place)
    assert f"{place.partition('/')[0]}: holds 32" in refusal(config)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.safetensors", f"its weights: holds {HUGE} bytes, its model needs at most 10"),
        *((name, f"{name}: holds more than") for name in ("config.json", "tokenizer.json", INDEX)),
    ],
)
def test_files_of_a_hugging_face_folder(name: str, told: str, tmp_path: Path) -> None:
    shutil.copytree(HF, tmp_path / "m")
    (tmp_path / "m" / name).touch()
    os.truncate(tmp_path / "m" / name, HUGE)
    config = override(Config(), f"model.path={tmp_path / 'm'}", "model.compilation_cache=")
    assert told in refusal(config)


def test_a_file_that_digests_name_by_another_size_is_refused_by_that(tmp_path: Path) -> None:
    config = tiny_model.make_folder(tmp_path / "m")
    grow(tmp_path / "m", "params/**/*")
    assert f"it has {HUGE} bytes, {DIGESTS} says" in refusal(config)
