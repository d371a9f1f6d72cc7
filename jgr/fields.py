# SPDX-License-Identifier: Apache-2.0
"""Checks and parses a dataclass's fields by their annotations; also the base class of errors that users can mend."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints

LARGEST = 1e15
"""Above every number that a configuration can mean; sums and products of smaller ones stay finite."""

COMPARED_CHARS = 80
"""How much of an unknown name is compared with the known ones."""

REDACTED = "***"
"""Printed in place of a secret. No secret may be this text, so that what was printed is never taken for a key."""

CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
"""What no id may have: it could not be named in a path, or break a line of a log."""

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class UserError(ValueError):
    """A mistake that the user can mend; the base class of every such error in jgr.

    The message is one line that names the file, field or flag and says what to change. The command line
    prints it without a traceback and exits with code 2.
    """


class ConfigError(UserError):
    """A configuration file, or an override of it, that cannot be used."""


def parse(text: str, hint: Any) -> Any:
    """Read `text` as a value of annotation `hint`. Raises ValueError if it is none."""
    options = get_args(hint)
    if hint is str:
        return text
    if hint is int or hint is float:
        return hint(text)
    text = text.strip()
    if get_origin(hint) is tuple:
        inner = text.removeprefix("(").removesuffix(")").removesuffix(",").strip()
        if not inner and (text == "()" or options[0] is not str):  # a name may be the empty text
            return ()
        return tuple(parse(part.strip(), options[0]) for part in inner.split(","))
    if get_origin(hint) is types.UnionType:
        return None if text.lower() == "none" else parse(text, options[0])
    if hint is bool:
        text = text.lower()
    words = {"true": True, "false": False} if hint is bool else {option: option for option in options}
    if text not in words:
        raise ValueError(text)
    return words[text]


def _too_large(value: Any) -> bool:
    """Whether `value` is a finite number that no configuration can mean."""
    return isinstance(value, int | float) and LARGEST <= abs(value) < inf


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value` has the type that `hint` states; numbers must be finite and below `LARGEST`."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return value in options
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(v, options[0]) for v in value)
    if get_origin(hint) is types.UnionType:
        return value is None or _fits(value, options[0])
    if isinstance(value, bool):
        return hint is bool
    if hint is float or hint is int:
        return (
            isinstance(value, int if hint is int else int | float) and abs(value) < LARGEST
        )  # false for nan
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """Say in words what values the annotation `hint` allows, for error messages."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(option or '""' for option in options)
    if get_origin(hint) is tuple:
        listed = {float: "numbers such as (1, 0.5)", str: "names such as (a, b)"}
        return listed.get(options[0], "integers such as (1, 8)")
    if get_origin(hint) is types.UnionType:
        return f"{describe(options[0])} or none"
    names = {str: "text", int: "an integer", float: "a finite number", bool: "true or false"}
    return names.get(hint) or f"a {hint.__name__}"


def field_hints(cls: Any) -> Mapping[str, Any]:
    """The annotated type of every field of a class, kept: each is a text that Python would compile again."""
    return _field_hints(cls)


@functools.cache
def _field_hints(cls: Any) -> Mapping[str, Any]:
    return types.MappingProxyType(get_type_hints(cls))


def is_secret(field: dataclasses.Field[Any]) -> bool:
    """Whether a field holds a key or a password.

    `repr=False` marks it where it is declared, so no text of a section shows it; nothing else prints or logs it either.
    """
    return not field.repr


def check(section: Any, **minimum: float) -> None:
    """Raise ConfigError unless every field has its annotated type and is at least its minimum."""
    # A section's class is called <Section>Config, so that messages can name a field as --set does.
    place = _CAPITAL.sub("_", type(section).__name__.removesuffix("Config")).lower()
    hidden = {f.name for f in dataclasses.fields(section) if is_secret(f)}
    for name, hint in field_hints(type(section)).items():
        value = getattr(section, name)
        key = f"{place}.{name}" if place else name
        shown = REDACTED if name in hidden else repr(value)
        mark = f"{key}: {REDACTED} is printed in place of a secret, and is none; give the secret itself"
        require(name not in hidden or value != REDACTED, mark)
        # Said first: such a number has the right type, so "must be a finite number, not 1e+30" would be untrue.
        require(not _too_large(value), f"{key} must be between -{LARGEST:g} and {LARGEST:g}")
        require(_fits(value, hint), f"{key} must be {describe(hint)}, not {shown}")
        if name in minimum:
            require(value >= minimum[name], f"{key} must be at least {minimum[name]}, not {value}")


def nearest(name: str, known: Iterable[str], alike: float = 0.0) -> str:
    """The one of `known`, which is not empty, that looks most like `name`, for an error message.

    alike: how much, from 0 to 1, as difflib counts it; "" where none does.
    Only the beginning of `name` is compared: the time is the product of the lengths, and a client may choose this one.
    """
    return next(iter(difflib.get_close_matches(name[:COMPARED_CHARS], known, n=1, cutoff=alike)), "")


def sizes(name: str, given: tuple[int, ...]) -> None:
    """Raise ConfigError unless the sizes `given` for the field `name` are positive and ascending."""
    fits = len(given) > 0 and given[0] >= 1 and all(a < b for a, b in pairwise(given))
    require(fits, f"{name} must be ascending sizes such as (1, 8), not {given}")


def distinct(name: str, given: Sequence[str]) -> None:
    """Raise ConfigError if two of the values `given` for the field `name` are equal."""
    for at, value in enumerate(given):
        require(value not in given[:at], f"{name}: there are two of {value!r}; each must be different")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of these fields, for json.loads, which alone keeps the last of equal keys. Raises UserError."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise UserError(f"key {one_line(repr(key), 80)} occurs twice")
        fields[key] = value
    return fields


def one_line(text: object, most: int = 500) -> str:
    """A text that may come from a damaged file, on one line of bounded length, fit for a terminal."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else line[: most - 3] + "..."


def printable(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def require(holds: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `holds`."""
    if not holds:
        raise ConfigError(message)
