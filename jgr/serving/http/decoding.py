# SPDX-License-Identifier: Apache-2.0
"""Decodes the bodies of requests, and explains what is wrong with a body in the caller's terms.

The one idea: msgspec parses and validates in one pass. Only if that fails, its message is turned into an error that
starts with the field, so that a good request pays nothing for it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from jgr.fields import nearest
from jgr.serving.errors import MAX_QUOTED_CHARS, RequestError, invalid, quoted

R = TypeVar("R", bound=msgspec.Struct)

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a body raises."""
ALIKE = 0.6
"""How much a field's name must look like an unknown one to be suggested, as difflib counts it."""
MAX_SEARCHED_BYTES = 1 << 16
"""A longer body is not searched for the field of a NaN, which takes Python a step for each value on the event loop."""


def decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Parse and validate a body in one pass. Raises RequestError, which names the field or where the JSON breaks."""
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise refusal(error, body, decoder.type) from None


def refusal(error: Exception, body: bytes, type: Any) -> RequestError:
    """What is wrong with a body that should be a `type`. error: one of UNREADABLE, which decoding the body raised."""
    if isinstance(error, msgspec.ValidationError):
        return _explain(str(error), type)
    field = _non_finite_field(body)
    if field is not None:
        return invalid(field, f"{field} must be a finite number: JSON has no NaN or Infinity")
    return RequestError("invalid_json", f"the body is not JSON: {error}")


def _explain(message: str, type: Any) -> RequestError:
    """Turn msgspec's message about a body of `type` into one that starts with the field."""
    if match := re.fullmatch(
        r"Object contains unknown field `(.*?)`(?: - at `\$\.([\w.[\]]+)`)?", message, re.DOTALL
    ):
        name, path = match[1], match[2] or ""
        there = f"{path}: " if path else ""
        return invalid(
            path or name[:MAX_QUOTED_CHARS],
            f"{there}unknown field {quoted(name)}{_instead(type, path, name)}",
        )
    if match := re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.([\w.[\]]+)`)?", message):
        field = f"{match[2].replace('[...]', '')}.{match[1]}" if match[2] else match[1]
        return invalid(field, f"{field} is required")
    if match := re.fullmatch(r"(.*) - at `\$\.(.*)`", message):
        field = match[2].replace("[...]", "")  # msgspec does not say which entry of an object is wrong
        wrong = re.fullmatch(r"Invalid enum value (.*)|Expected .*, got `(\w+)`", match[1])
        if wrong and (choices := _choices(type, match[2])):
            found = _cut(wrong[1]) if wrong[1] else _GOT.get(wrong[2], wrong[2])
            return invalid(field, f"{field}: must be {choices}, not {found}")
        return invalid(field, f"{field}: {in_words(match[1])}")
    return RequestError("invalid_request", f"the body: {in_words(message)}")


def in_words(problem: str) -> str:
    """What msgspec says is wrong with a value, in the words of this API: what it must be, and what it is not."""
    match = _EXPECTED.fullmatch(problem)
    if not match:
        return problem[0].lower() + problem[1:]
    kinds, got, more = match.groups()
    *first, last = (_KINDS.get(kind, kind) for kind in kinds.split(" | "))
    wanted = f"{', '.join(first)} or {last}" if first else last
    if got:
        return f"must be {wanted}, not {_GOT.get(got, got)}"
    if limit := _LIMIT.fullmatch(more):
        length, sign, number = limit.groups()
        return f"must be {wanted}{length or ','} {_SIGNS[sign].format(number)}"
    return f"must be {wanted}{more.replace(' matching regex', ' that matches', 1)}"


_EXPECTED = re.compile(r"Expected `(\w+(?: \| \w+)*)`(?:, got `(\w+)`)?(.*)", re.DOTALL)
_LIMIT = re.compile(r"( of length)? ([<>]=?) (\S+)")
_SIGNS = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_GOT = _KINDS | {"float": "a decimal number"}


def _instead(type: Any, path: str, name: str) -> str:
    """In words, the field of the object at the path that a name may stand for; all of them where it is like none."""
    kinds = (kind for kind in _at(type, path) if isinstance(kind, inspect.StructType))
    fields = [field.encode_name for kind in kinds for field in kind.fields]
    if near := nearest(name, fields, ALIKE):
        return f"; the nearest is {near!r}"
    return f"; there are {', '.join(fields)}" if fields else ""


def _at(type: Any, path: str) -> list[inspect.Type]:
    """The types of what stands in a `type` at a path, as msgspec writes it; the type itself at an empty one."""
    kinds = list(_plain(_described(type)))
    for step in re.findall(r"\[[^]]*\]|[^.[]+", path):
        kinds = [kind for above in kinds for below in _below(above, step) for kind in _plain(below)]
    return kinds


def _choices(type: Any, path: str) -> str:
    """What a field of `type` may be, in words, where its type lists the values; else "". path: see _at."""
    kinds = _at(type, path)
    listed = [repr(value) for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
    others = [_BESIDE.get(kind.__class__) for kind in kinds if not isinstance(kind, inspect.LiteralType)]
    if not listed or None in others:
        return ""
    *first, last = [*listed, *filter(None, others)]
    return f"{', '.join(first)} or {last}" if first else last


_described = functools.cache(inspect.type_info)  # takes a millisecond; a server has few types of bodies

_BESIDE: dict[Any, str] = {inspect.ListType: "a list", inspect.NoneType: "null"}
"""What may stand beside listed values."""


def _plain(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, or the one that this is, without what only describes them."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _plain(one)
    elif not isinstance(kind, inspect.CustomType):
        yield kind


def _below(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The types of what a step of a path leads to: a field's name, or brackets for what a list or dict holds."""
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, inspect.ListType):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type


def _cut(text: str) -> str:
    """A value as msgspec quotes it, shortened."""
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[: MAX_QUOTED_CHARS - 4]}...{text[-1]}"


def _non_finite_field(body: bytes) -> str | None:
    """The first field with NaN or Infinity, which are not JSON but which the standard parser reads. None where there is
    none, or where the body is too long to search."""
    if len(body) > MAX_SEARCHED_BYTES or (b"NaN" not in body and b"Infinity" not in body):
        return None
    try:
        path = _path_to_non_finite(json.loads(body, parse_constant=_NonFinite))
    except (ValueError, RecursionError):
        return None
    return path[1 : 1 + MAX_QUOTED_CHARS] if path and path[0] == "." else None


def _path_to_non_finite(value: Any) -> str | None:
    """The path from `value` to the first NaN or Infinity in it, such as `.filters.deny[0]`; None if it has none."""
    if isinstance(value, _NonFinite):
        return ""
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        parts = ((f".{str(name)[:MAX_QUOTED_CHARS]}", part) for name, part in value.items())
    elif isinstance(value, list):
        parts = ((f"[{at}]", part) for at, part in enumerate(value))
    for step, part in parts:
        below = _path_to_non_finite(part)
        if below is not None:
            return step + below
    return None


class _NonFinite:
    """Stands for NaN, Infinity or -Infinity in a parsed body."""

    def __init__(self, name: str) -> None:
        self.name = name
