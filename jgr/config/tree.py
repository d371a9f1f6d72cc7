# SPDX-License-Identifier: Apache-2.0
"""Changes, reads and shows a tree of sections, a frozen dataclass of frozen dataclasses, which `jgr.config` declares.

A field is named "section.field" everywhere: by `--set`, in files, in environment variables, in errors.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin

from jgr.fields import REDACTED, ConfigError, describe, field_hints, is_secret, nearest, parse

T = TypeVar("T")

RENAMED = {"rank.scorer": "rank.method"}
"""Old names of fields; whoever still uses one is told the new one."""


def field_types(tree: type) -> Mapping[str, Any]:
    """The annotation of every field, by "section.field"."""
    sections = field_hints(tree).items()
    return {f"{s}.{name}": hint for s, section in sections for name, hint in field_hints(section).items()}


def secret_fields(tree: type) -> frozenset[str]:
    """The fields that hold a key or a password."""
    sections = field_hints(tree).items()
    return frozenset(
        f"{s}.{f.name}" for s, section in sections for f in dataclasses.fields(section) if is_secret(f)
    )


def override(config: T, *assignments: str) -> T:
    """Return `config` with each `section.field=value` applied; the last value of a field wins.

    The values of one call are checked together, so that fields of a section that depend on each other can
    change in one step. Raises ConfigError for an unknown field, naming the nearest one, and for a value that the
    field's annotation or its section excludes.
    """
    hints = field_types(type(config))
    updates: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"cannot override by '{assignment}': write section.field=value")
        require_field(key, hints)
        section, name = key.split(".")
        try:
            updates.setdefault(section, {})[name] = parse(text, hints[key])
        except ValueError:
            raise ConfigError(f"{key} must be {describe(hints[key])}, not '{text}'") from None
    return _replace(config, updates)


def from_sections(default: T, sections: Mapping[str, Any]) -> T:
    """Return `default` with the fields that `sections` names, as `to_json` writes them or a file has them.

    A list is a tuple; where a field may be None, so may the text "none", for formats without a null. Raises ConfigError
    for an unknown section or field, naming the nearest one, and for a value that the field excludes.
    """
    hints = field_types(type(default))
    known = field_hints(type(default))
    updates: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        if section not in known:
            raise ConfigError(
                f"there is no section '{section}' in the configuration; {_nearest_to(section, hints)}"
            )
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} must be a section with fields")
        for name, value in values.items():
            key = f"{section}.{name}"
            require_field(key, hints)
            updates.setdefault(section, {})[name] = _plain(value, hints[key])
    return _replace(default, updates)


def _plain(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    optional = get_origin(hint) is types.UnionType
    return None if optional and isinstance(value, str) and value.lower() == "none" else value


def _nearest_to(name: str, hints: Mapping[str, Any]) -> str:
    """What somebody meant who wrote an unknown name where sections stand: a section, or a field without its section."""
    fields = [key for key in hints if key.partition(".")[2] == name]
    return f"the field is '{fields[0]}'" if fields else f"the nearest is '{nearest(name, _sections(hints))}'"


def _sections(hints: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in hints))


def require_field(key: str, hints: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `key` is a field; the message says the new name of an old one, else the nearest."""
    if key in RENAMED:
        raise ConfigError(f"there is no field '{key}' any more; it is called '{RENAMED[key]}' now")
    if key not in hints:
        near = nearest(key, hints)
        raise ConfigError(f"there is no field '{key}' in the configuration; the nearest is '{near}'")


def _replace(config: T, updates: Mapping[str, Mapping[str, Any]]) -> T:
    sections = {s: dataclasses.replace(getattr(config, s), **values) for s, values in updates.items()}
    replaced: T = dataclasses.replace(config, **sections)  # type: ignore[type-var]
    return replaced


def without_secrets(config: T) -> T:
    """The configuration with the default in every field that holds a key or a password."""
    updates: dict[str, dict[str, Any]] = {}
    for key in secret_fields(type(config)):
        section, name = key.split(".")
        updates.setdefault(section, {})[name] = getattr(type(getattr(config, section)), name)
    return _replace(config, updates)


def to_json(config: Any) -> dict[str, Any]:
    """The whole tree as JSON values. Secrets that are set are shown as REDACTED, which cannot be read back."""
    return {s.name: _section_to_json(getattr(config, s.name)) for s in dataclasses.fields(config)}


def _section_to_json(section: Any) -> dict[str, Any]:
    shown = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        secret = value and is_secret(f)
        shown[f.name] = REDACTED if secret else list(value) if isinstance(value, tuple) else value
    return shown
