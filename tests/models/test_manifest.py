# SPDX-License-Identifier: Apache-2.0
"""A folder's serving.json: what it keeps, what moves with the folder, and what is refused by which name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, ConfigError, DataConfig, ModelConfig, ServerConfig, TrainConfig, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.models import manifest
from jgr.serving.engine.opening import counting_metrics, read_catalog
from jgr.serving.versions.sources import _load_again, configurations
from jgr.training.generator import train_generator
from jgr.training.retriever import train_retriever
from tests.serving.tiny_model import N_ITEMS, make_catalog, make_folder, shuffled_catalog
from tests.training.shortcuts import without_curves

METRICS = {"steps": 7.0, "recall@10": 0.25}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = override(make_folder(folder), "rank.probe=<sid>", "cache.policy=user", "server.max_history=77")
    manifest.write(folder, config, make_catalog(), METRICS)
    return folder, config


@pytest.fixture
def folder(made: tuple[Path, Config], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made[0], tmp_path / "elsewhere" / "moved"))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / manifest.NAME).read_text())
    change(content)
    (folder / manifest.NAME).write_text(json.dumps(content))


def test_a_folder_says_how_it_is_served_wherever_it_lies(made: tuple[Path, Config], folder: Path) -> None:
    expected = replace(
        made[1],
        model=ModelConfig(name="tiny", path=str(folder)),  # the compilation cache is the machine's
        server=ServerConfig(),
        train=TrainConfig(),
    )
    assert manifest.folder_config(folder) == expected
    assert read_catalog(folder, expected).version == make_catalog().version
    found = manifest.read(folder)
    assert found is not None
    assert (found.schema, found.metrics, found.catalog.path) == (1, METRICS, "catalog.jsonl")
    assert configurations([], ["beam.width=4", "tiny:prompt.max_items=3"], [str(folder)]) == [
        override(expected, "beam.width=4", "prompt.max_items=3")
    ]


def test_a_folder_without_the_file_is_served_as_before(folder: Path) -> None:
    (folder / manifest.NAME).unlink()
    assert manifest.folder_config(folder) == Config(model=ModelConfig(path=str(folder)))
    save_catalog(shuffled_catalog(), folder / "catalog.jsonl")  # any catalog will do
    assert read_catalog(folder, Config()).version == shuffled_catalog().version
    manifest.check_dataset(manifest.folder_config(folder))


def test_a_link_to_nothing_is_not_taken_for_a_folder_without_the_file(folder: Path) -> None:
    (folder / "serving.json").rename(folder / "elsewhere.json")
    (folder / "serving.json").symlink_to(folder / "gone.json")
    with pytest.raises(ConfigError, match=r"serving\.json: cannot be read: No such file"):
        manifest.folder_config(folder)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: there is no model folder .*none$"):
        manifest.folder_config(tmp_path / "none")
    with pytest.raises(
        ConfigError, match=r"^model\.path: 'a\\x00b' has a zero byte, which no folder's name has$"
    ):
        manifest.folder_config("a\0b")
    (tmp_path / "shop.py").write_text("")
    with pytest.raises(ConfigError, match=r"no model folder .*; a configuration file is given as --config="):
        manifest.folder_config(tmp_path / "shop.py")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: m.update(schema=2),
            "schema: 2 is newer than 1, the newest that this jgr reads; update jgr",
        ),
        (lambda m: m.update(schema=2, catalog=None, more=[]), "schema: 2 is newer than 1"),
        (lambda m: m.update(schema=0), r"is damaged: .*schema"),
        (lambda m: m.pop("schema"), "is damaged: .*schema.*train or convert again"),
        (lambda m: m.update(more=1), "is damaged: .*unknown field `more`"),
        (lambda m: m["catalog"].update(path="../other.jsonl"), r"is damaged: .*\$\.catalog\.path"),
        (lambda m: m["settings"]["beam"].update(width="8"), r"settings: beam\.width must be an integer"),
        (lambda m: m["settings"]["beam"].update(width=0), r"settings: beam\.width must be at least 1"),
        (
            lambda m: m["settings"]["beam"].update(widht=8),
            r"no field 'beam\.widht'.* nearest is 'beam\.width'; corr",
        ),
        (
            lambda m: m["settings"].update(server={"host": "0.0.0.0"}),
            "not part of a model: give it with --set",
        ),
        (lambda m: m["settings"]["catalog"].update(path="/etc/x"), r"catalog\.path is not part of a model"),
        (lambda m: m.update(dataset={"kind": "films"}), r"settings: data\.kind must be one of shop"),
    ],
)
def test_what_cannot_be_served_names_the_file_and_the_field(
    folder: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    changed(folder, change)
    with pytest.raises(ConfigError, match=rf"^{folder / manifest.NAME}: .*{words}"):
        manifest.folder_config(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_damaged_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / manifest.NAME).write_bytes(content)
    for read in (manifest.folder_config, lambda folder: read_catalog(folder, Config())):
        with pytest.raises(ConfigError, match=rf"{manifest.NAME}: is damaged: .*; restore it, or train"):
            read(folder)


def test_a_file_without_an_end_is_not_read(folder: Path) -> None:
    with (folder / manifest.NAME).open("ab") as file:
        file.truncate(manifest.MAX_BYTES + 1)
    with pytest.raises(ConfigError, match=r"holds more than 1048576 bytes"):
        manifest.folder_config(folder)


def test_the_catalog_must_be_the_one_that_is_recorded(folder: Path, tmp_path: Path) -> None:
    config = manifest.folder_config(folder)
    save_catalog(shuffled_catalog(), folder / "catalog.jsonl")
    with pytest.raises(ConfigError, match=r"^catalog\.version: .*--set catalog\.path=FILE") as caught:
        read_catalog(folder, config)
    assert make_catalog().version in str(caught.value) and shuffled_catalog().version in str(caught.value)
    (folder / "catalog.jsonl").rename(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match=r"^catalog\.path: .*catalog\.jsonl.* is not there: .*--set"):
        read_catalog(folder, config)
    chosen = override(config, f"catalog.path={tmp_path / 'other.jsonl'}")
    assert read_catalog(folder, chosen).version == shuffled_catalog().version


def test_the_dataset_is_remembered_and_looked_for(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = tmp_path / "data"
    prepared.mkdir()
    (prepared / "manifest.json").write_text("{}")
    data = DataConfig("prepared", str(prepared))
    manifest.write(folder, replace(manifest.folder_config(folder), data=data), make_catalog(), METRICS)
    config = manifest.folder_config(folder)
    assert config.data == data
    manifest.check_dataset(config)
    assert caplog.records == []
    (prepared / "manifest.json").write_text('{"another": 1}')
    manifest.check_dataset(config)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "was prepared again" in caplog.text
    shutil.rmtree(prepared)
    with pytest.raises(ConfigError, match=r"^data\.path: .*data, .*is not there: .*--set data\.path=FOLDER"):
        manifest.check_dataset(config)
    manifest.check_dataset(override(config, "data.path=/another"))  # whoever reads it refuses it
    manifest.write(folder, config, make_catalog())  # as a conversion does
    with pytest.raises(ConfigError, match=r"^data\.path: .* names no dataset: .*--set data\.kind=prepared"):
        manifest.check_dataset(manifest.folder_config(folder))


def test_a_reload_takes_the_settings_that_stand_there_then(folder: Path) -> None:
    changed(folder, lambda m: m["settings"]["cache"].update(policy="none"))
    assignments = ["tiny:prompt.max_items=3", "other:prompt.max_items=4", "server.max_history=9"]
    (config,) = configurations([], [assignments[0], assignments[2]], [str(folder)])
    changed(folder, lambda m: m["settings"]["beam"].update(width=5))
    changed(folder, lambda m: m["settings"]["model"].update(name="renamed"))
    info = _load_again(str(folder), config, assignments, None, counting_metrics()).info
    assert (info.id, info.beam_width, info.max_history, info.max_history_in_prompt) == ("tiny", 5, 9, 3)


@pytest.mark.slow
def test_trainings_write_it_with_what_they_reached(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dataset = Dataset(
        make_catalog(), leave_one_out([rng.integers(0, N_ITEMS, rng.integers(4, 9)) for _ in range(8)])
    )
    config = override(
        Config(),
        "model.name=small",
        "prompt.max_items=6",
        "beam.width=10",
        "train.steps=2",
        "train.batch=4",
        "train.hidden=16",
        "train.layers=1",
        "train.evaluate_every=1",
    )
    generator = override(config, f"train.out={tmp_path / 'generator'}")
    measured = iter((0.5, 0.25))  # the first step is the better one
    with without_curves():
        folder = train_generator(generator, dataset, validate=lambda cfg, params: next(measured))
    found = manifest.read(folder)
    assert found is not None and found.catalog.version == dataset.catalog.version
    assert found.metrics == {"steps": 1.0, "recall@10": 0.5}
    assert found.dataset == manifest.DatasetReference(kind="shop")
    served = manifest.folder_config(folder)
    assert (served.model.name, served.prompt, served.beam) == ("small", config.prompt, config.beam)

    retriever = override(
        config, f"train.out={tmp_path / 'sasrec'}", "train.model=sasrec", "train.evaluate_every=0"
    )
    with without_curves():
        found = manifest.read(train_retriever(retriever, dataset))
        assert found is not None and found.metrics == {"steps": 2.0}
        whole = override(retriever, "train.learn_valid=true", f"train.out={tmp_path / 'whole'}")
        found = manifest.read(train_retriever(whole, dataset))
    assert found is not None and found.metrics == {"steps": 2.0, "learnt_valid": 1.0}


def test_a_catalog_keeps_its_version_in_the_folder(tmp_path: Path) -> None:
    catalog = Catalog.build(["x", "7"], [[5, 6], [5, 7]], [{"n": 1.5, "s": "é"}, {}])
    save_catalog(catalog, tmp_path / "catalog.jsonl")
    manifest.write(tmp_path, Config(), catalog)
    assert manifest.own_catalog(tmp_path).version == catalog.version
