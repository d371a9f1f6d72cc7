# SPDX-License-Identifier: Apache-2.0
"""A run of a server or a fleet, kept as views in a file of JSON lines, and drawn as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jgr.fields import UserError
from jgr.files import MAX_LINE_BYTES, reading, writing
from jgr.traffic.view import View, events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_VIEWS = 100_000
"""More than a day of them, one a second."""
MARKS = {"lost": ("tab:red", ":"), "begun": ("tab:green", ":"), "changed": ("tab:purple", "--")}
FORMATS = (".svg", ".png")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(View).decode


def line(view: View) -> bytes:
    """A view as a line of the file."""
    return _encode(view) + b"\n"


def read(path: Path) -> list[View]:
    """The views of a file, in their order. UserError names the line that is none; a last line that was cut off is
    left out."""
    views: list[View] = []
    with reading(path, UserError) as stream:
        while text := stream.readline(MAX_LINE_BYTES):
            if len(views) == MOST_VIEWS:
                raise UserError(f"{path} has more than {MOST_VIEWS} lines; draw a part of it")
            try:
                views.append(_decode(text))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if text.endswith(b"\n") or len(text) == MAX_LINE_BYTES:
                    raise UserError(f"{path}, line {len(views) + 1}: {error}") from None
    if not views:
        raise UserError(f"{path} holds no views")
    return views


def check_picture(picture: Path) -> None:
    """Raise UserError for a picture whose name says another format, or that has no folder."""
    if picture.suffix not in FORMATS:
        raise UserError(f"--picture must name a file that ends in {' or '.join(FORMATS)}, not {picture}")
    if not picture.parent.is_dir():
        raise UserError(f"--picture: there is no folder {picture.parent}")


def draw(views: Sequence[View], picture: Path) -> None:
    """Draw load, goodput, P99, queue and the share of cached tokens over time, by replica; reloads and losses are
    marked. An SVG or a PNG; UserError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s of import time, and no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(5, 1, sharex=True)
    begin = views[0].time
    times = [view.time - begin for view in views]
    load: Axes = plots[0]
    for name, colour in (("requests_per_s", "gray"), ("goodput_per_s", "tab:blue")):
        values = [getattr(view.total, name) for view in views]
        load.plot(times, values, color=colour, label={"gray": "asked", "tab:blue": "in time"}[colour])
    load.set_ylabel("all: requests/s")
    names = sorted({row.replica for view in views for row in view.replicas})
    parts = (("goodput_per_s", "in time/s"), ("p99_ms", "P99, ms"), ("queue", "queue"), ("cached", "cached"))
    for axes, (name, label) in zip(plots[1:], parts, strict=True):
        for replica in names:
            axes.plot(times, _values(views, replica, name), label=replica, linewidth=1.2)
        axes.set_ylabel(label)
    marked: set[str] = set()
    for time, kind, _ in events(views):
        colour, style = MARKS[kind]
        for axes in plots:
            axes.axvline(time - begin, color=colour, linestyle=style, linewidth=1)
        if kind not in marked:
            load.plot([], [], color=colour, linestyle=style, label=f"replica {kind}")
            marked.add(kind)
    for axes in plots:
        axes.set_ylim(bottom=0)
    plots[-1].set_ylim(0, 1)
    load.legend(fontsize=8)
    if len(names) <= 16:
        plots[1].legend(fontsize=8)
    plots[-1].set_xlabel("seconds")
    with writing(picture, UserError) as stream:
        figure.savefig(stream, format=picture.suffix[1:], dpi=120)


def _values(views: Sequence[View], replica: str, name: str) -> list[Any]:
    """A replica's figures over time; nan where it was not there, or had none."""
    found = []
    for view in views:
        row = next((row for row in view.replicas if row.replica == replica), None)
        value = None if row is None else getattr(row, name)
        found.append(float("nan") if value is None else value)
    return found
