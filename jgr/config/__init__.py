# SPDX-License-Identifier: Apache-2.0
"""The configuration: a tree of frozen dataclasses, one section per part of jgr.

The one idea: a field's annotation is the only statement of its type. It checks the values of a config file
and types the text of `--set section.field=value`; the field's default stands nowhere else.

Invariants: a Config that exists is valid, section by section; nothing here reads flags or the environment. The comment
of a field, above or behind it, is all that the reference (docs/configuration.md, `--help=config`) says of it. A field
that holds a key or a password has `repr=False`, and is printed nowhere.
Whether two sections fit together (such as a beam width and the compiled profiles) is checked by the code that
reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jgr.config.fleet import FleetConfig as FleetConfig
from jgr.config.formats import is_document, load
from jgr.config.memory import CacheConfig as CacheConfig
from jgr.config.memory import EmbeddingsConfig as EmbeddingsConfig
from jgr.config.memory import FeaturesConfig as FeaturesConfig
from jgr.config.memory import MemoryConfig as MemoryConfig
from jgr.config.model import BeamConfig as BeamConfig
from jgr.config.model import CatalogConfig as CatalogConfig
from jgr.config.model import DataParallelConfig as DataParallelConfig
from jgr.config.model import ModelConfig as ModelConfig
from jgr.config.model import PromptConfig as PromptConfig
from jgr.config.model import RankConfig as RankConfig
from jgr.config.named import find
from jgr.config.python_file import line_in, run_python
from jgr.config.serving import BatchingConfig as BatchingConfig
from jgr.config.serving import ExecutorsConfig as ExecutorsConfig
from jgr.config.serving import ProfilesConfig as ProfilesConfig
from jgr.config.serving import ServerConfig as ServerConfig
from jgr.config.training import DataConfig as DataConfig
from jgr.config.training import FeedbackConfig as FeedbackConfig
from jgr.config.training import TrainConfig as TrainConfig
from jgr.config.tree import RENAMED, from_sections
from jgr.config.tree import override as override
from jgr.config.tree import to_json as to_json
from jgr.fields import ConfigError as ConfigError
from jgr.fields import UserError as UserError
from jgr.fields import check


@dataclass(frozen=True)
class Config:
    """The whole configuration. Each part of jgr is given only the sections that it reads."""

    model: ModelConfig = field(default_factory=ModelConfig)
    catalog: CatalogConfig = field(default_factory=CatalogConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    beam: BeamConfig = field(default_factory=BeamConfig)
    rank: RankConfig = field(default_factory=RankConfig)
    executors: ExecutorsConfig = field(default_factory=ExecutorsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    profiles: ProfilesConfig = field(default_factory=ProfilesConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)

    def __post_init__(self) -> None:
        check(self)


def load_config(path: str | Path) -> Config:
    """Return the configuration of a file: Python whose `get_config()` returns it, or TOML, JSON or YAML by its suffix.

    path: the file, or the name of a configuration that comes with jgr, `industrial`. Raises ConfigError for anything
    that goes wrong in it, with the line of the file if it is known.
    """
    path = find(path)
    if is_document(path):
        return load(path, Config())
    try:
        module = run_python(path)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except (Exception, SystemExit) as e:
        line = line_in(path, e)
        renamed = [new for old, new in RENAMED.items() if _is_unknown(e, old)]
        hint = f"; the field is called {renamed[0]} now" if renamed else ""
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {kind}{e}{hint}") from e
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: define get_config() so that it returns a jgr.config.Config")
    return config


def from_json(sections: Mapping[str, Any]) -> Config:
    """The configuration that `to_json` wrote; sections and fields that are left out have their defaults.

    Raises ConfigError for an unknown field, and for a value that the field excludes.
    """
    return from_sections(Config(), sections)


def _is_unknown(error: BaseException, key: str) -> bool:
    """Whether `error` says that a section's class has no field of the name `key`, "section.field"."""
    section, name = key.split(".")
    return (
        str(error) == f"{section.capitalize()}Config.__init__() got an unexpected keyword argument '{name}'"
    )
