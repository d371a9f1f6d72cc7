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
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args, get_overloads

import numpy as np
from absl import flags
from prometheus_client.core import Metric

import jgr
from jgr.cache.meta import CacheMeta
from jgr.cache.neighbours import Copied
from jgr.cli import console
from jgr.cli.main import COMMANDS
from jgr.client import errors, recommender
from jgr.features.cache import Counts
from jgr.serving.api import ModelInfo
from jgr.serving.cluster.series import Series
from jgr.serving.engine import metrics
from jgr.serving.engine.paging_metrics import PagingCounts
from jgr.serving.policies.jobs import Priority
from tools.reference_http import http
from tools.reference_markdown import cell, code, page, paragraphs, table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
WIDTH = 110
OF_ALL_COMMANDS = "Flags of every command"
SHOWN_CLASSES = ("Engine", "Client")
STRUCTS = ("Answer", "Item", "Filters", "Prefilled", "ModelInfo")
FIELD_SETS = {"recommend": "RecommendFields", "rank": "RankFields", "prefill": "PrefillFields"}
OPEN_LABELS = (
    "endpoint", "status", "model", "version", "size", "part", "le", "front", "replica", "rule",
    "from", "to",
)  # fmt: skip
"""Labels whose values are not a fixed set, or too many to be listed."""


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
    kinds = " or ".join(f"`{kind!r}`" for kind in get_args(Priority))
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
        f"`_count`; those of values that may be negative ({without_sum()}) have no `_sum`. "
        "A server of several models adds the label `model` to all but "
        + ", ".join(f"`{name}`" for name in metrics.OF_THE_PROCESS)
        + ", and a [fleet](../fleet.md) the label `replica` to all. Series of a cache, of a feature store and of "
        "scorers are there where the model has them, `jgr_fleet_*` of a fleet alone. The client "
        "library adds its own of the process, `process_*` and `python_*`. Dashboards and alerts that read all this are "
        "in `deploy/`; [Serving](../serving.md#deadlines-and-overload) says what to watch under load.",
        table(("series", "type", "labels", ""), rows),
    )


def without_sum() -> str:
    """The names of the histograms whose series have no `_sum`, which the client library leaves out."""
    histograms = [family for family in _families() if family.type == "histogram" and family.samples]
    found = [
        family.name for family in histograms if all(not one.name.endswith("_sum") for one in family.samples)
    ]
    return ", ".join(f"`{name}`" for name in found)


def _families() -> list[Metric]:
    """Every family of a server, with a sample of each label, in order of their names."""
    shown = metrics.Metrics(lambda: dict.fromkeys(metrics.PHASES, 0))
    shown.watch_queue(lambda: 0)
    shown.watch_flights(lambda: 0)
    shown.watch_memory(lambda: {"weights": 0})
    shown.watch_cache(lambda: cast(CacheMeta, _EMPTY_CACHE))
    shown.feature_counts = Counts
    shown.paging = lambda: PagingCounts({"items": {}, "features": {}}, 0, 0, 0, 0, {})
    shown.requests.labels("/v1/recommend", "200")
    shown.parts.labels("0")
    for purpose in ("request", "placement"):
        shown.item_bytes.labels("", "", purpose)
    for outcome in ("fetched", "computed"):
        shown.items_missing.labels(outcome)
    shown.show_model(
        ModelInfo(
            id="", version="", catalog_version="", catalog_items=0, depth=1, normalize="valid", beam_width=1,
            max_beam_width=1, max_candidates=1, max_history=1, max_filter_items=1, segments=[],
            max_history_in_prompt=1,
        )
    )  # fmt: skip
    front = Series("")
    front.become([""])
    front.routed("", "")
    devices = metrics.reads_of_devices(cast(Copied, _NO_READS))
    return sorted((*shown.registry.collect(), *devices, *front.families()), key=lambda family: family.name)


_EMPTY_CACHE = types.SimpleNamespace(
    pages=types.SimpleNamespace(free=0, count=0),
    kinds=("user", "item"),
    used=lambda kind: 0,
    number=lambda kind: 0,
    fragmentation=lambda kind: 0.0,
    counts=Counter[str](),
)
"""What the collector of the cache's series reads, of a cache that holds nothing."""
_NO_READS = types.SimpleNamespace(bytes=np.zeros((2, 2), np.int64), sent=0)


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
