# SPDX-License-Identifier: Apache-2.0
"""Configurations as TOML, JSON and YAML: a table for each section, with the names of its fields.

The one idea: a format only says which text stands at which field; the field's annotation says what it means. So YAML's
own types play no part: a plain `no` is a text for a text field, and `1e-3` a number for a number.

No error shows a value of the file beyond what the field's own check says, for it may be a key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from jgr.config.tree import field_types, from_sections, to_json
from jgr.fields import ConfigError, one_line, parse
from jgr.files import read_whole

T = TypeVar("T")

FORMATS = ("json", "toml", "yaml")
SUFFIXES = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
MAX_BYTES = 1 << 20
MAX_LINES = 1000
"""Most lines of a TOML file in which the line of a mistake is looked for: each line costs a reading of the file."""
NO_PYYAML = "reading YAML needs pyyaml: pip install 'jgr[yaml]'; TOML and JSON need nothing"
_NULLS = ("", "~", "null", "Null", "NULL")
_JSON_TOKEN = re.compile(r'([{}\[\]])|("(?:[^"\\]|\\.)*")\s*(:)?')
_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "seq", "map")
}
"""Those that a text without a tag may get."""


class _Document(NamedTuple):
    """The content of a file. line_of: the line of "section" or "section.field", None where it is not known."""

    sections: Any
    line_of: Callable[[str], int | None]


class _Unreadable(Exception):
    """What is wrong with a file, and on which line."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def is_document(path: Path) -> bool:
    """Whether the name of a configuration says that it is TOML, JSON or YAML; all others are Python."""
    return path.suffix.lower() in SUFFIXES


def load(path: Path, default: T) -> T:
    """Read a file of one of the SUFFIXES; sections and fields that it leaves out are as in `default`.

    Raises ConfigError with the path, and the line where it is known.
    """
    try:
        text = read_whole(path, ConfigError, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    try:
        document = _READERS[SUFFIXES[path.suffix.lower()]](text, field_types(type(default)))
        if not isinstance(document.sections, dict):
            raise _Unreadable("must hold sections with fields, such as server with port")
    except _Unreadable as error:
        raise ConfigError(f"{path}{_at(error.line)}: {error}") from None
    try:
        return from_sections(default, document.sections)
    except ConfigError as error:
        at = _at(_line(document, str(error)))
        raise ConfigError(f"{path}{at}: {error}") from None


def _at(line: int | None) -> str:
    return "" if line is None else f", line {line}"


def _line(document: _Document, message: str) -> int | None:
    """The line of the field of the document that the message names first, else of the section."""
    places = []
    for section, values in document.sections.items():
        for name in values if isinstance(values, dict) else ():
            found = re.search(rf"(?<![\w.]){re.escape(f'{section}.{name}')}(?!\w)", message)
            if found:
                places.append((found.start(), f"{section}.{name}"))
        if message.startswith((f"{section} must be", f"there is no section '{section}'")):
            places.append((len(message), section))
    return document.line_of(min(places)[1]) if places else None


def _read_toml(text: str, hints: Mapping[str, Any]) -> _Document:
    try:
        sections = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        at = re.search(r" \(at line (\d+), column \d+\)", str(error))
        message = str(error).replace(at.group(), "") if at else str(error)
        raise _Unreadable(f"is not TOML: {one_line(message)}", int(at.group(1)) if at else None) from None
    return _Document(sections, lambda key: _toml_line(text.split("\n"), key))


def _toml_line(lines: list[str], key: str) -> int | None:
    """The line where the statement of `key` begins, which tomllib does not tell.

    That is a line with its name, all before which is TOML without the key, and with which, or with more, it is there.
    """
    for at, line in enumerate(lines if len(lines) <= MAX_LINES else ()):
        if key.rpartition(".")[2] in line and _has(lines[:at], key) is False:
            ends = (_has(lines[:end], key) for end in range(at + 1, len(lines) + 1))
            if next((found for found in ends if found is not None), False):
                return at + 1
    return None


def _has(lines: list[str], key: str) -> bool | None:
    """Whether some first lines of a file say something of `key`; None where they end within a statement."""
    try:
        found: Any = tomllib.loads("\n".join(lines))
    except ValueError:
        return None
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


def _read_json(text: str, hints: Mapping[str, Any]) -> _Document:
    try:
        sections = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Unreadable(f"is not JSON: {error.msg}", error.lineno) from None
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"is not JSON: {one_line(error)}") from None
    return _Document(sections, _json_lines(text).get)


def _json_lines(text: str) -> dict[str, int]:
    """The lines of "section" and "section.field" in a text that is JSON, which its reader does not tell.

    Raises _Unreadable for a name that stands twice in one object.
    """
    lines: dict[str, int] = {}
    inside: list[set[str]] = []  # the names so far of each object, or list, that is open
    line, at, section = 1, 0, ""
    for token in _JSON_TOKEN.finditer(text):
        bracket, quoted, is_name = token.groups()
        if bracket:
            inside.append(set()) if bracket in "{[" else inside.pop()
        elif is_name:
            line, at = line + text.count("\n", at, token.start()), token.start()
            name = json.loads(quoted)
            if name in inside[-1]:
                raise _Unreadable(f"the name '{one_line(name, 80)}' stands twice in one place", line)
            inside[-1].add(name)
            if len(inside) == 1:
                section, lines[name] = name, line
            elif len(inside) == 2:
                lines[f"{section}.{name}"] = line
    return lines


def _read_yaml(text: str, hints: Mapping[str, Any]) -> _Document:
    root = _compose(text)
    if root is None:
        return _Document({}, lambda key: None)
    if root.id != "mapping":
        return _Document(None, lambda key: None)
    sections: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for section, line, node in _entries(root):
        lines[section] = line
        if node.id != "mapping":
            sections[section] = {} if node.id == "scalar" and node.value in _NULLS else None
            continue
        sections[section] = {}
        for name, at, value in _entries(node):
            key = f"{section}.{name}"
            lines[key] = at
            sections[section][name] = _yaml_value(value, hints.get(key, str))
    return _Document(sections, lines.get)


def _compose(text: str) -> Any:
    """The tree of a YAML file's texts; no object is made of them. None for an empty file."""
    try:
        import yaml
    except ImportError:
        raise _Unreadable(NO_PYYAML) from None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or "a character is not allowed")
        # The name of an alias may be a key that stands there without quotes.
        problem = re.sub(r"(['\"])(?!<).{3,}\1", "...", problem)
        raise _Unreadable(f"is not YAML: {one_line(problem)}", mark.line + 1 if mark else None) from None
    except RecursionError:
        raise _Unreadable("is not YAML: it is nested too deeply") from None


def _entries(node: Any) -> Iterator[tuple[str, int, Any]]:
    """The names of a YAML mapping, each once, with their lines and what stands there."""
    seen = set()
    for name, value in node.value:
        line = name.start_mark.line + 1
        if name.id != "scalar":
            raise _Unreadable("a name must be a plain text", line)
        if name.value in seen:
            raise _Unreadable(f"the name '{one_line(name.value, 80)}' stands twice in one place", line)
        seen.add(name.value)
        yield name.value, line, value


def _yaml_value(node: Any, hint: Any) -> Any:
    """What a node means for a field of this annotation; a text that means nothing stays, for the field's check."""
    line = node.start_mark.line + 1
    if node.tag not in _TAGS:
        raise _Unreadable("a value that begins with ! must stand in quotes: tags are not read", line)
    if node.id == "mapping":
        raise _Unreadable("a value must be a text, a number or a list: fields have no fields", line)
    if node.id == "sequence":
        item = get_args(hint)[0] if get_origin(hint) is tuple else str
        if any(child.id != "scalar" for child in node.value):
            raise _Unreadable("a list must hold texts or numbers only", line)
        return [_yaml_value(child, item) for child in node.value]
    text: str = node.value
    if node.style is not None:  # in quotes, or a block
        return text
    if text in _NULLS:
        return None
    if hint is str or get_origin(hint) in (Literal, tuple):
        return text
    if re.fullmatch(r"[-+]?0[0-9_]+", text):  # octal for some readers of YAML, decimal for others
        return text
    try:
        return parse(text, hint)
    except ValueError:
        return text


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], _Document]] = {
    "json": _read_json,
    "toml": _read_toml,
    "yaml": _read_yaml,
}


def dump(config: Any, format: str) -> str:
    """The whole configuration as a text of one of the FORMATS, in ASCII, which `load` reads back as an equal one.

    Secrets that are set are redacted, and do not read back. Raises ConfigError for a text with half a character, such
    as a path that is not UTF-8, which JSON alone can hold.
    """
    sections = to_json(config)
    if format == "json":
        return json.dumps(sections, indent=2) + "\n"
    blocks = []
    for section, values in sections.items():
        if format == "toml":
            lines = [
                f"[{section}]",
                *(f"{name} = {_written(value, format)}" for name, value in values.items()),
            ]
        else:
            lines = [
                f"{section}:",
                *(f"  {name}: {_written(value, format)}" for name, value in values.items()),
            ]
        blocks.append("\n".join(lines) + "\n")
    return ("\n" if format == "toml" else "").join(blocks)


def _written(value: Any, format: str) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_written(item, format) for item in value)}]"
    if value is None:
        return "null" if format == "yaml" else '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # 1e-05 is a text for readers of YAML 1.1; all read 1.0e-05.
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    return _quoted(value, format) if isinstance(value, str) else repr(value)


def _quoted(text: str, format: str) -> str:
    written = []
    for character in text:
        code = ord(character)
        if 0xD800 <= code < 0xE000:
            raise ConfigError(f"{text!r} has half a character, which {format} cannot hold: write it as json")
        if character in '"\\':
            written.append(f"\\{character}")
        elif 0x20 <= code < 0x7F:
            written.append(character)
        else:
            written.append(f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}")
    return f'"{"".join(written)}"'
