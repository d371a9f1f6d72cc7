# SPDX-License-Identifier: Apache-2.0
"""serving.json: all that serving a model needs besides its weights, so that a folder is a model.

`jgr train` and `jgr convert` write it; `jgr serve FOLDER`, `jgr evaluate FOLDER` and `jgr.Engine(FOLDER)` read it. The
catalog lies in the folder, so the folder can be moved; the dataset lies outside, and is named by its absolute path.
What belongs to a machine and not to the model (the section `server`, the feature store) is not written.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.config import Config, ConfigError, DataConfig, ModelConfig, UserError, from_json, named, to_json
from jgr.config.formats import is_document
from jgr.fields import one_line, require
from jgr.files import is_pipe, read_whole
from jgr.models import hub

NAME = "serving.json"
CATALOG = "catalog.jsonl"
SCHEMA = 1
"""The version of the file's form. A reader refuses a newer one, whose fields may mean something else."""
MAX_BYTES = 1 << 20
LEARNT_VALID = "learnt_valid"
"""A metric that is 1 if the model has learnt the validation targets (train.learn_valid). It is a metric because older
versions of jgr refuse a file with fields that they do not know."""

_SECTIONS = (
    "model", "catalog", "prompt", "beam", "rank", "executors", "cache", "features", "profiles", "batching",
)  # fmt: skip
_OF_THE_MACHINE = {
    "model": {"path", "compilation_cache", "native", "tensor_parallel"},
    "catalog": {"path", "max_versions", "max_upload_bytes"},
    "features": {"store"},
}
_LEARNT = (
    ("prompt", "template"), ("prompt", "item"), ("prompt", "separator"),
    ("rank", "method"), ("rank", "item"), ("rank", "instruction"),
)  # fmt: skip
_log = logging.getLogger(__name__)


class CatalogReference(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The catalog of a model folder. path: a file of the folder. version: the catalog's content hash."""

    path: Annotated[str, Meta(pattern=r"^[^/\\\x00]+\Z", max_length=255)] = CATALOG
    version: str


class DatasetReference(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The model's training data, as config.data; the catalog's copy lies in the model folder.

    version: SHA-256 of a prepared dataset's manifest, else null.
    """

    kind: str
    path: str = ""
    catalog: str = ""
    version: str | None = None


class Manifest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The content of serving.json.

    settings: sections of the configuration. metrics: what the training reached, by name, and LEARNT_VALID; empty for a
    conversion.
    """

    schema: int = SCHEMA
    settings: dict[str, dict[str, Any]]
    catalog: CatalogReference
    dataset: DatasetReference | None = None
    metrics: dict[str, float] = {}


def write(folder: Path, config: Config, catalog: Catalog, metrics: Mapping[str, float] | None = None) -> None:
    """Write the manifest of a folder that holds `catalog` as catalog.jsonl.

    metrics: what a training on config.data reached; None for a conversion.
    """
    settings = {
        name: {
            field: value for field, value in section.items() if field not in _OF_THE_MACHINE.get(name, set())
        }
        for name, section in to_json(config).items()
        if name in _SECTIONS
    }
    manifest = Manifest(
        settings=settings,
        catalog=CatalogReference(version=catalog.version),
        dataset=None if metrics is None else _reference(config.data),
        metrics=dict(metrics or {}),
    )
    (folder / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def read(folder: Path) -> Manifest | None:
    """The manifest of a model folder; None where it has none. ConfigError names the field that cannot be used."""
    path = folder / NAME
    if not os.path.lexists(path):  # a link to nothing is refused by what reads it, and does not count as none
        return None
    if is_pipe(path):
        raise ConfigError(f"{path}: cannot be read: it is not a regular file")
    content = read_whole(path, ConfigError, MAX_BYTES)
    try:
        schema = msgspec.json.decode(content, type=_Versioned).schema
        if schema > SCHEMA:
            raise ConfigError(
                f"{path}: schema: {schema} is newer than {SCHEMA}, the newest that this jgr reads; update jgr"
            )
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: is damaged: {one_line(error)}; restore it, or train or convert again"
        ) from None


def folder_config(folder: str | Path) -> Config:
    """The configuration that serves a model folder: its manifest's, or the defaults where there is none."""
    require(
        "\0" not in str(folder), f"model.path: {str(folder)!r} has a zero byte, which no folder's name has"
    )
    place = hub.local(str(folder))
    if not os.path.isdir(place):
        is_file = place.suffix == ".py" or is_document(place)
        is_config = is_file or str(place) in named.names()
        hint = (
            f"; a configuration {'file ' * is_file}is given as --config={place}"
            if is_config
            else hub.hint(place)
        )
        raise ConfigError(f"model.path: there is no model folder {place}{hint}")
    manifest = read(place)
    if manifest is None:
        return Config(model=ModelConfig(path=str(place)))
    sections: dict[str, dict[str, Any]] = dict(manifest.settings)
    if manifest.dataset is not None:
        used = manifest.dataset
        sections["data"] = {"kind": used.kind, "path": used.path, "catalog": used.catalog}
    try:
        for name, section in manifest.settings.items():
            for field in section if name in _SECTIONS else ("*",):
                allowed = field != "*" and field not in _OF_THE_MACHINE.get(name, set())
                require(allowed, f"{name}.{field} is not part of a model: give it with --set")
        config = from_json(sections)
    except ConfigError as error:
        raise ConfigError(
            f"{place / NAME}: settings: {one_line(error)}; correct the file, or train or convert again with this jgr"
        ) from None
    return replace(config, model=replace(config.model, path=str(place)))


def told_otherwise(config: Config) -> list[str]:
    """The fields of a model's prompt in which a configuration is not what the manifest of config.model.path says; none
    where there is no manifest. ConfigError for one that cannot be used."""
    if not config.model.path or read(Path(config.model.path)) is None:  # one of the hub has none
        return []
    own = folder_config(config.model.path)
    return [
        f"{section}.{field}"
        for section, field in _LEARNT
        if getattr(getattr(config, section), field) != getattr(getattr(own, section), field)
    ]


def own_catalog(folder: Path) -> Catalog:
    """The catalog that lies in a model folder, which must be the one that its manifest names, where it has one."""
    manifest = read(folder)
    if manifest is None:
        return load_catalog(folder / CATALOG)
    path, recorded = folder / manifest.catalog.path, manifest.catalog.version
    remedy = "put the file back, or name a catalog with --set catalog.path=FILE"
    if not path.exists() or is_pipe(path):
        raise ConfigError(f"catalog.path: {path}, which {NAME} names, is not there: {remedy}")
    catalog = load_catalog(path)
    if catalog.version != recorded:
        raise ConfigError(
            f"catalog.version: {path} is of version {catalog.version}, {NAME} says {recorded}: {remedy}"
        )
    return catalog


def learnt_catalog(config: Config) -> Catalog | None:
    """The catalog that a trained model learnt on, from its folder, whatever `jgr ids` has made since.

    None where there is no such model, or config.catalog.path or config.data.catalog names another.
    """
    if not config.model.path or config.catalog.path:
        return None
    folder = Path(config.model.path)
    manifest = read(folder)
    if manifest is None or manifest.dataset is None or manifest.dataset.catalog != config.data.catalog:
        return None
    return own_catalog(folder)


def check_dataset(config: Config) -> None:
    """Check that the dataset which the model's manifest names is there, where `config` names no other.

    Raises ConfigError where it is gone, or where a converted model names none. Warns where it was prepared again after
    the model learnt from it.
    """
    manifest = read(Path(config.model.path)) if config.model.path else None
    reference = None if manifest is None else manifest.dataset
    if manifest is not None and reference is None and config.data == DataConfig():
        raise ConfigError(
            f"data.path: {config.model.path} was converted, and names no dataset: name one with "
            "--set data.kind=prepared --set data.path=FOLDER"
        )
    if reference is None or (reference.kind, reference.path) != (config.data.kind, config.data.path):
        return
    if reference.path and not Path(reference.path).exists():
        raise ConfigError(
            f"data.path: {reference.path}, which {NAME} names, is not there: name the dataset with "
            "--set data.path=FOLDER"
        )
    if _reference(config.data).version != reference.version:
        _log.warning("data.path: %s was prepared again after the model learnt from it", reference.path)


def refuse_learnt_valid(folder: str, name: str, remedy: str) -> None:
    """Raise UserError if a folder's model has learnt the validation targets. name: the flag or field that asks."""
    manifest = read(Path(folder)) if folder else None
    if manifest is not None and LEARNT_VALID in manifest.metrics:
        raise UserError(
            f"{name}: {folder} has learnt the validation targets (train.learn_valid), so its figures "
            f"would be too high: {remedy}"
        )


class _Versioned(Struct):
    """What every version of the file holds."""

    schema: Annotated[int, Meta(ge=1)]


def _reference(data: DataConfig) -> DatasetReference:
    path = Path(data.path).absolute() if data.path else None
    prepared = None if path is None else path / "manifest.json"
    version = None
    if data.kind == "prepared" and prepared is not None and prepared.is_file():
        version = hashlib.sha256(read_whole(prepared, UserError)).hexdigest()
    return DatasetReference(
        kind=data.kind, path="" if path is None else str(path), catalog=data.catalog, version=version
    )


def warn_of_prompt(config: Config, path: str) -> None:
    """Warn where a configuration file takes the place of what the model's folder says of the prompt it has learnt."""
    if fields := told_otherwise(config):
        _log.warning(
            "%s: %s: not what %s/%s says, which a file takes the place of; jgr config %s prints that",
            path, ", ".join(fields), config.model.path, NAME, config.model.path,
        )  # fmt: skip
