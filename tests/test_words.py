# SPDX-License-Identifier: Apache-2.0
"""Docstrings, flag helps and API descriptions read alone: none begins with a fragment whose noun stands elsewhere.

A cheap check of the forms that readers tripped over most; it cannot tell whether a text is clear.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from jgr.serving.api import ModelInfo
from jgr.serving.http import openapi

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("jgr", "tools", "benchmarks")
FRAGMENTS = re.compile(
    r"""
    (Of|From|By|To|In|At|As|For|With|Behind|Beside|Beyond|Among|Above|Below)\s+(?!course\b)
        (an?|the|this|that|these|those|each|all|both|every|some|one|which|what|`\w+`,?|[a-z]+\.$)\b[^.:]*[.:]\s*\Z
    | (Of|Behind|Beside|Among|Whose)\b          # a genitive or a place without its noun
    | (Those|These|They|Them|Theirs|Its|It|His|Others|The\ others)\b(?!\ (is|are)\ not\ )   # no referent yet
    | What\ `                                   # "What `f` gives": say what that is
    | As\ `                                     # "As `f`, but ...": say what it does
    | (\w+Error)\b(?!:)                         # the error before the thing
    | \[[^\]]*\](\.|:|,|\ of\b|\ each\b)        # a shape in place of a name
    """,
    re.VERBOSE,
)
"""Beginnings of a text that does not read alone."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every public docstring and of every help of a flag in a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            text = ast.get_docstring(node)
            if text and not getattr(node, "name", "").startswith("_"):
                yield getattr(node, "lineno", 1), text
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("DEFINE_"):
            for argument in [*node.args[1:], *(k.value for k in node.keywords if k.arg == "help")]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value:
                    yield node.lineno, argument.value[0].upper() + argument.value[1:]


def test_no_docstring_or_help_begins_with_a_fragment() -> None:
    wrong = []
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        wrong += [
            f"{name}:{line}: {text.splitlines()[0]}" for line, text in texts(path) if FRAGMENTS.match(text)
        ]
    assert wrong == []


def descriptions(node: object, at: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every summary and description in an OpenAPI document."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in entries:
        if name in ("description", "summary") and isinstance(value, str):
            yield at, value
        yield from descriptions(value, f"{at}/{name}")


def test_no_description_of_the_api_begins_with_a_fragment() -> None:
    info = ModelInfo(
        id="m", version="m@0", catalog_version="0", catalog_items=1, depth=1, normalize="valid", beam_width=1,
        max_beam_width=1, max_candidates=1, max_history=1, max_filter_items=1, segments=[], max_history_in_prompt=1,
    )  # fmt: skip
    found = dict(descriptions(openapi.document([info], keyed=True)))
    assert len(found) > 100
    assert {at: text for at, text in found.items() if FRAGMENTS.match(text)} == {}
