# SPDX-License-Identifier: Apache-2.0
"""The site of this folder: `make docs` builds it into build/docs with Sphinx. It needs `pip install 'jgr[docs]'`.

Pages are Markdown that reads as well on a code host; so what the site alone needs stands here. A page that NAVIGATION
does not name is shown at its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAVIGATION = {
    "Start": ("quickstart/own_data", "quickstart/checkpoint", "quickstart/systems"),
    "Ideas": ("concepts", "architecture"),
    "How to": (
        "install",
        "training",
        "catalogs",
        "evaluation",
        "convert",
        "serving",
        "ui",
        "cache",
        "ranking",
        "features",
        "load",
        "fleet",
        "fleet-operations",
    ),
    "Reference": (
        "configuration",
        "reference/cli",
        "reference/http",
        "reference/python",
        "reference/metrics",
    ),
    "Evidence": ("benchmarks", "pictures", "ablations"),
}
"""The pages by their captions, in their order; those that are not there are left out."""

project = "jgr"
author = "the authors of jgr"
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["_build"]
highlight_language = "text"
# Shortened JSON, with dots in place of what is left out, is shown without colours.
suppress_warnings = ["misc.highlighting_failure"]

smartquotes = False  # it makes one dash of the two of a flag, as in --set

myst_heading_anchors = 4  # as code hosts make them: links to #headings are checked

html_theme = "furo"
html_static_path = ["site"]
html_css_files = ["names.css"]
html_title = "jgr"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False


def toctrees(names: set[str]) -> str:
    """The sidebar, as MyST's directives. names: all pages there are."""
    listed = {name for pages in NAVIGATION.values() for name in pages}
    more = tuple(sorted(names - listed - {root_doc}))
    blocks = []
    for caption, pages in {**NAVIGATION, "More": more}.items():
        there = [name for name in pages if name in names]
        if there:
            blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *there, "```"]))
    return "\n\n".join(blocks)


def _add_sidebar(app: Any, name: str, content: list[str]) -> None:
    if name == root_doc:
        folder = Path(app.srcdir)
        names = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.md")}
        content[0] += f"\n\n{toctrees(names)}\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _add_sidebar)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
