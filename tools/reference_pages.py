# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/ from the code: the commands, the HTTP API, the Python API and the metrics.

    python -m tools.reference_pages

Each page is made of what the code says of itself: flags and their helps, the OpenAPI document, signatures and
docstrings, the registry of metrics. A test fails when a page differs from it. The configuration has a page of its own,
by `tools.config_reference`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args, get_overloads

from absl import flags
from prometheus_client.core import Metric

import jgr
from jgr.cache.meta import CacheMeta
from jgr.cli import console
from jgr.cli.main import COMMANDS
from jgr.client import errors, recommender
from jgr.config import Config
from jgr.features.cache import Counts
from jgr.serving.api import ModelInfo
from jgr.serving.engine import metrics
from jgr.serving.http import openapi

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
HEAD = "<!-- written by python -m tools.reference_pages: change the code that it reads, not this page -->"
WIDTH = 110
OF_ALL_COMMANDS = "Flags of every command"
SHOWN_CLASSES = ("Engine", "Client")
STRUCTS = ("Answer", "Item", "Filters", "Prefilled", "ModelInfo")
FIELD_SETS = {"recommend": "RecommendFields", "rank": "RankFields", "prefill": "PrefillFields"}
OPEN_LABELS = ("endpoint", "status", "model", "version", "size", "part", "le")
"""Labels whose values are not a fixed set, or too many to be listed."""
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
_CODE = re.compile(r"(`[^`]*`)")


def text(words: str) -> str:
    """Words as a paragraph of Markdown in one line; what stands between backticks is left as it is."""
    parts = _CODE.split(" ".join(words.split()))
    for at in range(0, len(parts), 2):
        for character, written in (("\\", "\\\\"), ("<", "&lt;"), ("*", "\\*")):
            parts[at] = parts[at].replace(character, written)
    return "".join(parts)


def filled(words: str) -> str:
    """Markdown in lines of at most 120 characters."""
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)


def paragraphs(words: str) -> str:
    """A docstring as paragraphs of Markdown; what is indented in it is shown as it stands."""
    found = []
    for block in inspect.cleandoc(words).split("\n\n"):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            found.append("\n".join(["```text", textwrap.dedent(block), "```"]))
        else:
            found.append(filled(text(block)))
    return "\n\n".join(found)


def cell(words: str) -> str:
    """Words in a cell of a table."""
    return text(words).replace("|", "\\|")


def code(words: str) -> str:
    """Words as code in a cell of a table; nothing for none."""
    return f"`{words}`".replace("|", "\\|") if words else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def page(title: str, *blocks: str) -> str:
    """A page; those of its blocks that are a line of words are wrapped."""
    words = re.compile(r"(?!```)[A-Za-z`].*")
    wrapped = (filled(block) if words.fullmatch(block) else block for block in blocks)
    return "\n\n".join([f"# {title}", HEAD, *wrapped]) + "\n"


# The commands.


def commands() -> str:
    """The page of `jgr` and its commands, with every flag."""
    shared = _defined(console.define_flags)
    blocks = [
        "`jgr COMMAND --help` prints the same in a terminal, and `jgr completion SHELL` completes commands, flags, "
        "fields and values. Flags are written `--name=value`; a flag that is true or false also `--name` and "
        "`--noname`. Results go to stdout, logs and progress to stderr. Exit codes: 0 done, 1 a defect of jgr, 2 a "
        "mistake in what was asked, told in one line, 130 interrupted, 141 nobody reads the output.",
        table(
            ("command", ""),
            [(f"[`jgr {name}`](#jgr-{name})", cell(_command(name).HELP)) for name in COMMANDS],
        ),
        f"## {OF_ALL_COMMANDS}",
        _flag_table(shared),
        "`--help` describes a command's flags; `--help=config` describes every field of the "
        "[configuration](../configuration.md), `--help=config.server` those of a section.",
    ]
    for name in COMMANDS:
        command = _command(name)
        own = _defined(command.define_flags)
        blocks += [f"## jgr {name}", paragraphs(command.__doc__ or "")]
        blocks += [_flag_table(own)] if own else ["No flags of its own."]
    return page("Commands", *blocks)


def _command(name: str) -> Any:
    return importlib.import_module(COMMANDS[name])


def _defined(define: Callable[[], None]) -> list[flags.Flag[Any]]:
    """The flags that a function defines, in its order; they are taken away again, as commands share names."""
    before = set(flags.FLAGS)
    define()
    found = [flags.FLAGS[name] for name in flags.FLAGS if name not in before]
    for flag in found:
        delattr(flags.FLAGS, flag.name)
    return found


def _flag_table(found: Sequence[flags.Flag[Any]]) -> str:
    rows = [
        (f"`--{flag.name}`", cell(_takes(flag)), code(_default(flag)), cell(_help(flag))) for flag in found
    ]
    return table(("flag", "takes", "default", ""), rows)


def _help(flag: flags.Flag[Any]) -> str:
    """A flag's help, without what absl adds of its values: that stands in a column of its own."""
    return re.sub(r"^<[^>]*>: |;\s+repeat this option to specify a list of values$", "", flag.help or "")


def _takes(flag: flags.Flag[Any]) -> str:
    """What the value of a flag may be."""
    if flag.boolean:
        return "true or false"
    if isinstance(flag.parser, flags.EnumParser):
        return ", ".join(f"`{value}`" for value in flag.parser.enum_values)
    kinds = {"int": "a whole number", "float": "a number", "string": "text"}
    kind = kinds.get(
        flag.flag_type(), "values, with commas between" if "list" in flag.flag_type() else "text"
    )
    return f"{kind}; may be repeated" if isinstance(flag, flags.MultiFlag) else kind


def _default(flag: flags.Flag[Any]) -> str:
    if flag.default in (None, "", []):
        return ""
    return ",".join(map(str, flag.default)) if isinstance(flag.default, list) else str(flag.default).lower()


# HTTP.


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


# Python.


def python() -> str:
    """The page of what `import jgr` gives, from signatures and docstrings."""
    blocks = [
        "`jgr.Engine` serves a model folder in this process, `jgr.Client` asks a server; both have the methods of "
        "[a recommender](#calls). [Serving](../serving.md#python) shows them at work. Importing jgr loads nothing "
        "and touches no device.",
    ]
    for name in SHOWN_CLASSES:
        shown = getattr(jgr, name)
        blocks += [
            f"## jgr.{name}",
            _python(_signature(f"jgr.{name}", shown.__init__)),
            paragraphs(shown.__doc__),
        ]
        for member, function in vars(shown).items():
            if not member.startswith("_") and member not in vars(recommender.Recommender):
                blocks += [
                    f"### jgr.{name}.{member}",
                    _python(_signature(member, function)),
                    paragraphs(function.__doc__ or ""),
                ]
    kinds = " or ".join(f"`{kind!r}`" for kind in get_args(recommender.Priority))
    blocks += [
        "## Calls",
        paragraphs(recommender.Recommender.__doc__ or ""),
        "`ItemId` is text or an integer, `History` a sequence of them, `Histories` a sequence of lists or tuples of "
        f"them, `Array` a numpy array of either; `Priority` is {kinds}. PER_HISTORY is "
        + ", ".join(f"`{name}`" for name in sorted(recommender.PER_HISTORY))
        + ".",
    ]
    for member, function in vars(recommender.Recommender).items():
        if not member.startswith("_"):
            blocks += [f"### {member}", *_call(member, function)]
    blocks += ["## Structs", "An answer is a struct, whose fields are those of the HTTP API:"]
    names = [name for name in STRUCTS if _in_schema(name)]
    blocks.append("\n".join(f"- `jgr.{name}`: [{name}](http.md#{name.lower()})" for name in names))
    blocks += [
        "`jgr.Config` is the whole [configuration](../configuration.md): a frozen dataclass of sections.",
        "## Errors",
        "`jgr.Error` is the base of all, and that of a folder or a configuration that cannot be used. "
        "`jgr.RequestFailed` is the base of those that a request gets:",
        paragraphs(errors.RequestFailed.__doc__ or ""),
        table(("error", ""), [(f"`jgr.{kind.__name__}`", cell(kind.__doc__ or "")) for kind in _failures()]),
    ]
    return page("Python API", *blocks)


def _in_schema(name: str) -> bool:
    return f"### {name}\n" in http()


def _failures() -> list[type]:
    found = (kind for kind in vars(errors).values() if isinstance(kind, type))
    return [kind for kind in found if errors.RequestFailed in kind.__bases__]


def _call(name: str, function: Any) -> Iterator[str]:
    """A call of both: its forms, what it does, and the further fields that it takes."""
    if isinstance(function, property):
        yield _python(_signature(name, function))
        yield paragraphs(function.__doc__ or "")
        return
    forms = get_overloads(function) or [function]
    yield _python("\n".join(_signature(name, form) for form in forms))
    yield paragraphs(function.__doc__ or "")
    if name in FIELD_SETS:
        fields = getattr(recommender, FIELD_SETS[name]).__annotations__
        rows = [(f"`{field}`", code(_annotation(kind))) for field, kind in fields.items()]
        yield table(("field", "type"), rows)


def _annotation(kind: Any) -> str:
    """An annotation as it stands in the source; all modules that are shown postpone theirs."""
    return str(getattr(kind, "__forward_arg__", kind))


def _signature(name: str, function: Any) -> str:
    """A function's parameters and result as they stand in the source, in one line or in several."""
    if isinstance(function, property):
        return f"{name}: {inspect.get_annotations(cast(Any, function.fget))['return']}"
    signature = inspect.signature(function)
    parts = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        written = f"{'**' if parameter.kind is parameter.VAR_KEYWORD else ''}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            written += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            written += f" = {'...' if parameter.default is ... else repr(parameter.default)}"
        parts.append(written)
    result = signature.return_annotation
    after = "" if result in (signature.empty, "None") else f" -> {_annotation(result)}"
    before = "async " if inspect.iscoroutinefunction(function) else ""
    one = f"{before}{name}({', '.join(parts)}){after}"
    if len(one) <= WIDTH:
        return one
    return "\n".join([f"{before}{name}(", *(f"    {part}," for part in parts), f"){after}"])


def _python(lines: str) -> str:
    return f"```py\n{lines}\n```"


# Metrics.


def series() -> str:
    """The page of the metrics, from a registry in which everything that may be there is there."""
    rows = []
    for family in _families():
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append((f"`{name}`", family.type, _labels(family), cell(family.documentation)))
    return page(
        "Metrics",
        "`GET /metrics` answers in the text format of Prometheus. All are counters, gauges and histograms over the "
        "server's life: rates are for the reader to compute. A histogram has the series `_bucket`, `_sum` and "
        "`_count`. A server of several models adds the label `model` to all but "
        + ", ".join(f"`{name}`" for name in metrics.OF_THE_PROCESS)
        + ". Series of a cache, of a feature store and of scorers are there where the model has them. The client "
        "library adds its own of the process, `process_*` and `python_*`. Dashboards and alerts that read all this are "
        "in `deploy/`; [Serving](../serving.md#deadlines-and-overload) says what to watch under load.",
        table(("series", "type", "labels", ""), rows),
    )


def _families() -> list[Metric]:
    """Every family of a server, with a sample of each label, in order of their names."""
    shown = metrics.Metrics(lambda: dict.fromkeys(metrics.PHASES, 0))
    shown.watch_queue(lambda: 0)
    shown.watch_flights(lambda: 0)
    shown.watch_memory(lambda: {"weights": 0})
    shown.watch_cache(lambda: cast(CacheMeta, _EMPTY_CACHE))
    shown.feature_counts = Counts
    shown.requests.labels("/v1/recommend", "200")
    shown.parts.labels("0")
    shown.show_model(
        ModelInfo(
            id="", version="", catalog_version="", catalog_items=0, depth=1, normalize="valid", beam_width=1,
            max_beam_width=1, max_candidates=1, max_history=1, max_filter_items=1, segments=[],
            max_history_in_prompt=1,
        )
    )  # fmt: skip
    return sorted(shown.registry.collect(), key=lambda family: family.name)


_EMPTY_CACHE = types.SimpleNamespace(
    pages=types.SimpleNamespace(free=0, count=0),
    kinds=("user", "item"),
    used=lambda kind: 0,
    number=lambda kind: 0,
    fragmentation=lambda kind: 0.0,
    counts=Counter[str](),
)
"""What the collector of the cache's series reads, of a cache that holds nothing."""


def _labels(family: Metric) -> str:
    """The labels of a family, with the values of those that have a fixed set of them."""
    found: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                found.setdefault(label, {})[value] = None
    return "; ".join(
        f"`{label}`" if label in OPEN_LABELS else f"`{label}`: {', '.join(f'`{value}`' for value in values)}"
        for label, values in found.items()
    )


@cache
def pages() -> Mapping[str, str]:
    """The text of each page by its file's name."""
    return {"cli.md": commands(), "http.md": http(), "python.md": python(), "metrics.md": series()}


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, written in pages().items():
        (FOLDER / name).write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
