# SPDX-License-Identifier: Apache-2.0
"""The page of the HTTP API, for `tools.reference_pages`: the OpenAPI document in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jgr.config import Config
from jgr.serving.api import ModelInfo
from jgr.serving.http import openapi
from tools.reference_markdown import cell, code, page, table, text

TITLES = {
    "requests": "Requests",
    "compatible": "Shapes of other APIs",
    "kserve": "KServe",
    "models": "Models",
    "catalogs": "Catalogs",
    "users": "Users",
    "server": "Server",
}
"""The headings of the API's tags."""


def http() -> str:
    """The page of the HTTP API, from the OpenAPI document of a server with keys and the default limits."""
    limits = Config()
    info = ModelInfo(
        id="shop",
        version="shop@1a2b3c4d",
        catalog_version="",
        catalog_items=1,
        depth=3,
        normalize="valid",
        beam_width=1,
        max_beam_width=1,
        max_candidates=limits.server.max_candidates,
        max_history=limits.server.max_history,
        max_filter_items=limits.server.max_filter_items,
        segments=[],
        max_history_in_prompt=1,
    )
    document = openapi.document([info], keyed=True)
    blocks = [
        "Bodies are JSON in UTF-8. An unknown field, a value of another type and a list that is too long are refused "
        "with a 4xx that names the field. Every answer carries `X-Request-Id`; a request may choose its own, of up to "
        "128 printable ASCII characters. Limits of lists are those of the default configuration, and a server's own "
        "`/openapi.json` has its own. What the fields are for, and what happens under load, stands in "
        "[Serving](../serving.md).",
        "A server without keys asks nobody for one. Where it has keys, each call but `/health/*` needs "
        "`Authorization: Bearer KEY`; *admin* below means an admin's key.",
    ]
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for tag in document["tags"]:
        blocks += [f"## {TITLES.get(tag['name'], tag['name'].capitalize())}", text(tag["description"])]
        for title, operation in operations:
            if operation["tags"] == [tag["name"]]:
                blocks += [f"### {title}", _operation(operation)]
    blocks += [
        "## Types",
        "A field without a default must be given in a request, and is always in an answer.",
    ]
    for name, schema in sorted(document["components"]["schemas"].items()):
        blocks += [f"### {name}", *_struct(schema)]
    return page("HTTP API", *blocks)


def _operation(operation: Mapping[str, Any]) -> str:
    """The lines of one operation: what it is for, takes and answers."""
    admin = {"admin_key": []} in operation.get("security", ())
    lines = [text(operation["summary"]) + "." + (" *admin*" if admin else "")]
    lines += [
        f"- `{parameter['name']}` in the {parameter['in']}: {text(parameter.get('description', 'required.'))}"
        for parameter in operation["parameters"]
        if parameter["name"] != "X-Request-Id"
    ]
    if "requestBody" in operation:
        lines.append(f"- request: {_body(operation['requestBody'])}")
    responses = sorted(operation["responses"].items())
    lines += [f"- {status}: {_body(response)}" for status, response in responses if status < "300"]
    refused = [f"{status} {response['description']}" for status, response in responses if status >= "300"]
    lines += [f"- refusals: {text(', '.join(refused))}"] if refused else []
    return "\n".join([lines[0], "", *lines[1:]])


def _body(content: Mapping[str, Any]) -> str:
    return " or ".join(
        _type(media["schema"]) if "$ref" in media.get("schema", {}) else f"`{kind}`"
        for kind, media in content["content"].items()
    )


def _struct(schema: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a type: its description, and a table of its fields."""
    if "description" in schema:
        yield text(schema["description"])
    needed = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "" if name in needed else code(_json(field["default"])) if "default" in field else "absent"
        rows.append((f"`{name}`", _type(field).replace("|", "\\|"), default, cell(_description(field))))
    if rows:
        yield table(("field", "type", "default", ""), rows)


def _description(field: Mapping[str, Any]) -> str:
    return str(field.get("description", ""))


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{_json(value)}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        of = f" of {_type(schema['items'])}" if schema.get("items") else ""
        return f"list{of}{_bounds(schema)}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object{f' of {_type(values)}' if isinstance(values, Mapping) and values else ''}{_bounds(schema)}"
    return f"{kind or 'any JSON'}{_bounds(schema)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    """The limits on a value, in brackets."""
    signs = {
        "minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "&lt; {}",
        "minItems": "at least {} of them", "maxItems": "at most {} of them", "maxLength": "at most {} characters",
        "minLength": "at least {} characters", "maxProperties": "at most {} of them",
    }  # fmt: skip
    found = [sign.format(f"{schema[name]:,}") for name, sign in signs.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _json(value: Any) -> str:
    return json.dumps(value)
