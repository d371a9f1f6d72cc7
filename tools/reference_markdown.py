# SPDX-License-Identifier: Apache-2.0
"""The forms of the pages that `tools.reference_pages` writes: paragraphs, tables, code, a page."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence

HEAD = "<!-- written by python -m tools.reference_pages: change the code that it reads, not this page -->"
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
