# SPDX-License-Identifier: Apache-2.0
"""Requests that a server should refuse well: made from its OpenAPI document, good ones with something broken in them,
and bytes that are hardly HTTP. And `faults`, which says where an answer is not what the document says.

All is drawn from one seeded generator, so a request that found a fault can be made again.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

Schema = Mapping[str, Any]

TEXTS = (
    "", " ", "0", "a" * 300, "\x00", "\n", "é", "\U0001d518" * 40, "\ud800", "\u202e", "null", "../..", "%00",
    "{}", "'", "all",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 7, 255, 2**31 - 1, 2**31, -(2**63), 2**63, 2**64, 10**40, 0.5, -0.0, 1e-320, 1e308, 5e-324,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
DEEP = (10, 200, 5_000)
"""How deep a nested value is; the last is beyond what parsers recurse into."""
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


@dataclass
class Call:
    """A request as it is sent. known: whether the server's document has the operation."""

    method: str
    path: str
    template: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Document:
    """What a server says of itself in /openapi.json."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.paths: Mapping[str, Any] = document["paths"]
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]

    @property
    def operations(self) -> list[tuple[str, str]]:
        """Method and path of each operation."""
        return [(method.upper(), path) for path, methods in self.paths.items() for method in methods]

    def request(self, method: str, path: str) -> Schema | None:
        """The schema of an operation's body; None where it takes no JSON."""
        content = self.paths[path][method.lower()].get("requestBody", {"content": {}})["content"]
        schema: Schema | None = content.get("application/json", {}).get("schema")
        return schema

    def faults(self, method: str, path: str, status: int, kind: str, body: bytes) -> list[str]:
        """What of an answer is not as the document has it. kind: the answer's content-type."""
        responses = self.paths[path][method.lower()]["responses"]
        if str(status) not in responses:
            return [f"status {status} is not among {', '.join(responses)}"]
        content = responses[str(status)]["content"]
        if kind.partition(";")[0] not in content:
            return [f"content-type {kind} is not among {', '.join(content)}"]
        schema = content[kind.partition(";")[0]].get("schema")
        return [] if schema is None else self.misfits(json.loads(body, parse_constant=_no_json), schema)

    def misfits(self, value: Any, schema: Schema, at: str = "$") -> list[str]:
        """Where a value does not meet a schema; the keywords are those that the document uses, others are KeyErrors."""
        schema = self._resolved(schema)
        if "anyOf" in schema:
            found = [self.misfits(value, option, at) for option in schema["anyOf"]]
            return [] if [] in found else min(found, key=len)
        if "enum" in schema:
            return [] if value in schema["enum"] else [f"{at}: {value!r} is not in {schema['enum']}"]
        if "type" in schema:
            fits = isinstance(value, _TYPES[schema["type"]])
            if not fits or (isinstance(value, bool) and schema["type"] in ("integer", "number")):
                return [f"{at}: {value!r} is no {schema['type']}"]
        wrong = [f"{at}: {value!r} against {key}" for key in schema if not _meets(value, key, schema[key])]
        if isinstance(value, list) and "items" in schema:
            for number, part in enumerate(value):
                wrong += self.misfits(part, schema["items"], f"{at}[{number}]")
        if isinstance(value, dict):
            named, other = schema.get("properties", {}), schema.get("additionalProperties", {})
            for name, part in value.items():
                below = named.get(name, other)
                if below is False or (named and name not in named):
                    wrong.append(f"{at}: {name!r} is not documented")
                elif isinstance(below, Mapping):
                    wrong += self.misfits(part, below, f"{at}.{name}")
        return wrong

    def drawn(self, schema: Schema, rng: random.Random) -> Any:
        """A value that meets a schema, but for its patterns."""
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self.drawn(rng.choice(schema["anyOf"]), rng)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type", "null")
        if kind == "object":
            return self._drawn_object(schema, rng)
        if kind == "array":
            length = rng.randint(schema.get("minItems", 0), min(schema.get("maxItems", 4), 4))
            return [self.drawn(schema["items"], rng) for _ in range(length)]
        if kind in ("integer", "number"):
            low, high = (
                schema.get("minimum", schema.get("exclusiveMinimum", -1000)),
                schema.get("maximum", 2**40),
            )
            if kind == "number":
                return rng.choice((high, low + (high - low) * rng.uniform(1e-3, 1)))
            return rng.choice((low, high, rng.randint(low, high), rng.randint(low, min(high, low + 10))))
        if kind == "boolean":
            return rng.random() < 0.5
        return rng.choice(TEXTS)[: schema.get("maxLength", 1000)] if kind == "string" else None

    def _drawn_object(self, schema: Schema, rng: random.Random) -> dict[str, Any]:
        needed = schema.get("required", ())
        drawn = {
            name: self.drawn(part, rng)
            for name, part in schema.get("properties", {}).items()
            if name in needed or rng.random() < 0.3
        }
        other = schema.get("additionalProperties")
        if isinstance(other, Mapping) and other:
            drawn |= {rng.choice(TEXTS): self.drawn(other, rng) for _ in range(rng.randint(0, 3))}
        return drawn

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _meets(value: Any, key: str, bound: Any) -> bool:
    """Whether a value of the right type meets one keyword; what only describes, and what others check, is met."""
    if key in (
        "title",
        "description",
        "examples",
        "default",
        "type",
        "properties",
        "items",
        "additionalProperties",
    ):
        return True
    met: dict[str, Callable[[], bool]] = {
        "required": lambda: all(name in value for name in bound),
        "minItems": lambda: len(value) >= bound,
        "maxItems": lambda: len(value) <= bound,
        "maxLength": lambda: len(value) <= bound,
        "maxProperties": lambda: len(value) <= bound,
        "pattern": lambda: re.search(bound, value) is not None,
        "minimum": lambda: bool(value >= bound),
        "exclusiveMinimum": lambda: bool(value > bound),
        "maximum": lambda: bool(value <= bound),
    }
    return met[key]()


def mutated(value: Any, rng: random.Random, spare: Sequence[Any] = ()) -> Any:
    """A copy of a JSON value with something broken in it. spare: values to put into wrong places."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return strange(rng)
        holder, key = rng.choice(places)
        how = rng.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[rng.choice((*TEXTS, str(key).upper(), f"{key} "))] = holder[key]
        elif how == 1:
            holder.extend([holder[key]] * rng.choice((1, 50, 5_000)))
            return value  # two of these would be one of millions
        elif how == 2:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {str(key): holder[key]}
        elif how == 3 and spare:
            holder[key] = copy.deepcopy(rng.choice(spare))
        else:
            holder[key] = strange(rng)
    return value


def strange(rng: random.Random) -> Any:
    """A value that few fields take."""
    return rng.choice((
        None, True, False, [], {}, [[]], [None], {"": {}}, rng.choice(TEXTS), rng.choice(TEXTS),
        rng.choice(NUMBERS), rng.choice(NUMBERS), _nested(rng.choice(DEEP[:2])),
    ))  # fmt: skip


def _places(value: Any) -> Any:
    """Every place in a value: what holds it, and its key or index."""
    if isinstance(value, dict | list):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(part)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def rendered(value: Any, rng: random.Random) -> bytes:
    """JSON of a value; now and then broken as text: cut, bytes changed, fields twice, not UTF-8, far too deep."""
    text = json.dumps(value).encode()
    how = rng.randrange(12)
    if how == 0:
        return text[: rng.randrange(len(text) + 1)]
    if how == 1:
        at = rng.randrange(len(text))
        return text[:at] + bytes([rng.randrange(256)]) + text[at + rng.randrange(2) :]
    if how == 2 and text.startswith(b"{") and len(text) > 2:
        return text[:-1] + b"," + text[1:]
    if how == 3:
        depth = rng.choice(DEEP)
        return text[:-1] + b',"user_id":' + rng.choice((b"[", b'{"a":')) * depth + b"}"
    if how == 4:
        return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b" " * 5_000, b"[", b"")) + text
    if how == 5:
        return text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-7")))
    return text


NAMES = ("jgr", "tiny", "none", *TEXTS[1:12], "a/b", "jgr@00000000", "rollback")


def filled(template: str, rng: random.Random, known: Sequence[str]) -> str:
    """A path of the document with something in place of its parameters. known: names that may be there."""

    def fill(match: re.Match[str]) -> str:
        text = rng.choice((rng.choice(known), rng.choice(NAMES)))
        return quote(text.encode("utf-8", "surrogatepass"), safe=rng.choice(("", "/", "%")))

    path = re.sub(r"{\w+}", fill, template)
    if rng.random() < 0.6:
        name = rng.choice(known if rng.random() < 0.8 else NAMES).encode("utf-8", "surrogatepass")
        path += f"?{rng.choice(('model', 'model', 'tenant', 'query', 'limit', 'x'))}={quote(name)}"
    return path


def raw(good: bytes, rng: random.Random) -> bytes:
    """Bytes that are hardly HTTP, out of a good request of a head with Content-Length, and a body."""
    head, _, body = good.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    others = [h for h in headers if not h.lower().startswith(b"content-length")]
    how = rng.randrange(16)
    chunked = b"\r\n".join([line, *others, b"transfer-encoding: chunked", b"", b""])
    sizes = (
        b"-1",
        b"0x10",
        b"1e3",
        b"",
        b"99999999999999999999",
        b"5,5",
        b" 7 ",
        b"\xff",
        b"%d" % (len(body) + 5),
    )
    if how == 0:
        return b"\r\n".join([line, *others, b"content-length: " + rng.choice(sizes), b"", body])
    if how == 1:
        return b"\r\n".join([line, *headers, b"content-length: 3", b"", body])
    if how == 2:
        return chunked + rng.choice(sizes) + b"\r\n" + body + b"\r\n0\r\n\r\n"
    if how == 3:
        parts = [
            b"%x;x=%b\r\n%b\r\n" % (len(body[a : a + 7]), b"y" * 50, body[a : a + 7])
            for a in range(0, len(body), 7)
        ]
        return chunked + b"".join(parts) + b"0\r\nx-trailer: " + b"t" * rng.choice((10, 70_000)) + b"\r\n\r\n"
    if how == 4:
        return good[: rng.randrange(len(good))]
    if how == 5:
        return good * rng.randint(2, 40) + good[: rng.randrange(len(good))]
    if how == 6:
        return b"\r\n".join([line, *headers, b"x: " + b"h" * rng.choice((60_000, 200_000)), b"", body])
    if how == 7:
        return b"\r\n".join([line, *[b"x-%d: y" % n for n in range(5_000)], *headers, b"", body])
    if how == 8:
        at = rng.randrange(len(head))
        return good[:at] + rng.choice((b"\x00", b"\xff\xfe", b"\n", b"\r", b" ", b":")) + good[at + 1 :]
    if how == 9:
        return bytes(rng.randrange(256) for _ in range(rng.randint(1, 2_000)))
    if how == 10:
        return (
            line.replace(
                b"/v1", rng.choice((b"/" + b"p" * 70_000, b"//v1", b"/%ff%00", b"http://x/v1", b"/\xc3\xa9"))
            )
            + good[len(line) :]
        )
    if how == 11:
        return (
            line.replace(b"HTTP/1.1", rng.choice((b"HTTP/9.9", b"HTTP/1.0", b"", b"HTTP/1.1 x")))
            + good[len(line) :]
        )
    if how == 12:
        return b"\r\n".join(
            [
                line,
                *others,
                b"transfer-encoding: " + rng.choice((b"gzip", b"chunked, chunked", b"x")),
                b"",
                body,
            ]
        )
    if how == 13:
        return b"\r\n".join([line, b"expect: 100-continue", *headers, b"", body])
    if how == 14:
        return b"\r\n".join(
            [
                line,
                b"upgrade: " + rng.choice((b"websocket", b"h2c")),
                b"connection: upgrade",
                *headers,
                b"",
                body,
            ]
        )
    return (
        rng.choice(
            (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01",
                b"\r\n" * 1_000,
                b"GET / \r\n\r\n",
            )
        )
        + good
    )
