# SPDX-License-Identifier: Apache-2.0
"""What every field of the configuration means, read from the comments beside the fields: there is no second text.

A field's comment stands above it, on lines of its own, or behind it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jgr.fields import ConfigError, describe, field_hints, is_secret, nearest

WIDTH = 100


class Field(NamedTuple):
    """A field. key: "section.field". hint: its annotation. values: what it may be. default: as `--set` takes it.

    text: its comment, in sentences.
    """

    key: str
    hint: Any
    values: str
    default: str
    text: str


class Section(NamedTuple):
    """A section, with its fields in the order in which they are declared."""

    name: str
    text: str
    fields: tuple[Field, ...]


@cache
def reference(tree: type) -> tuple[Section, ...]:
    """Every section of a tree of dataclasses."""
    return tuple(_section(name, cls) for name, cls in field_hints(tree).items())


def _section(name: str, cls: type) -> Section:
    comments, defaults, hints = comments_of(cls), cls(), field_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        values = describe(hint) + (", a secret" if is_secret(field) else "")
        default = _written(getattr(defaults, field.name))
        found.append(
            Field(f"{name}.{field.name}", hint, values, default, _sentence(comments.get(field.name, "")))
        )
    return Section(name, " ".join(inspect.cleandoc(cls.__doc__ or "").split()), tuple(found))


def comments_of(cls: type) -> dict[str, str]:
    """The comment of each field of a dataclass that has one, as it stands in the source."""
    lines, own_line, body = _source(cls.__module__)
    found = {}
    last = 0
    for node in body[cls.__name__]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno
            while above - 1 > last and above - 1 in own_line:
                above -= 1
            texts = [lines[at] for at in range(above, (node.end_lineno or node.lineno) + 1) if at in lines]
            if texts:
                found[node.target.id] = " ".join(texts)
        last = node.end_lineno or node.lineno
    return found


@cache
def _source(module: str) -> tuple[Mapping[int, str], frozenset[int], Mapping[str, Sequence[ast.stmt]]]:
    """A module's comments by line, the lines that hold nothing else, and the statements of its classes."""
    source = inspect.getsource(sys.modules[module])
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.lstrip("#").strip() for token in tokens}
    own_line = frozenset(token.start[0] for token in tokens if token.line.lstrip().startswith("#"))
    classes = {node.name: node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return comments, own_line, classes


def _sentence(text: str) -> str:
    return "" if not text else text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def chosen(sections: Sequence[Section], topic: str) -> tuple[Section, ...]:
    """The part that a topic of --help names: "config" is all, "config.server" a section, "config.server.port" a field.

    Raises ConfigError for anything else, naming the nearest.
    """
    fields = {f"config.{field.key}": (section, field) for section in sections for field in section.fields}
    by_name = {f"config.{section.name}": section for section in sections}
    if topic == "config":
        return tuple(sections)
    if topic in by_name:
        return (by_name[topic],)
    if topic in fields:
        section, field = fields[topic]
        return (section._replace(fields=(field,)),)
    near = nearest(topic, ["config", *by_name, *fields])
    raise ConfigError(f"--help={topic}: there is no such topic; the nearest is --help={near}")


def plain_text(sections: Sequence[Section]) -> str:
    """The sections for a terminal."""
    blocks = []
    for section in sections:
        lines = textwrap.wrap(f"{section.name}: {section.text}", WIDTH)
        for field in section.fields:
            default = field.default or "empty"
            lines += textwrap.wrap(f"{field.key}: {field.values}; default: {default}", WIDTH, **_indented(2))
            lines += textwrap.wrap(field.text, WIDTH, **_indented(6))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _indented(spaces: int) -> dict[str, Any]:
    return {
        "initial_indent": " " * spaces,
        "subsequent_indent": " " * max(spaces, 6),
        "break_long_words": False,
        "break_on_hyphens": False,
    }


def markdown(sections: Sequence[Section]) -> str:
    """The sections as Markdown: a heading and a table for each."""
    blocks = []
    for section in sections:
        rows = [
            f"| `{field.key}` | {_cell(field.values)} | {_code(field.default)} | {_cell(field.text)} |"
            for field in section.fields
        ]
        head = ["| field | value | default | |", "|---|---|---|---|"]
        blocks.append("\n".join([f"## {section.name}", "", _cell(section.text), "", *head, *rows]))
    return "\n\n".join(blocks)


def _cell(text: str) -> str:
    """A text in a cell of a table, where < would begin a tag and * an emphasis."""
    for character, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*")):
        text = text.replace(character, written)
    return text


def _code(text: str) -> str:
    return "`{}`".format(text.replace("|", "\\|")) if text else "empty"
