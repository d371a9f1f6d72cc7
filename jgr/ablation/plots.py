# SPDX-License-Identifier: Apache-2.0
"""An ablation as a picture: a panel for each count that differs between variants, and one for the times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jgr.ablation.counts import COUNTS
from jgr.ablation.measure import Found, Times
from jgr.ablation.system import ALL, NONE
from jgr.config import UserError
from jgr.files import writing

FORMATS = (".png", ".svg")
COLOURS = {ALL: "tab:green", NONE: "tab:gray"}
OTHERS = "tab:blue"
PANELS_A_ROW = 3


def check(picture: Path) -> None:
    """Raise UserError for a file whose name says another format, or that has no folder: before anything is measured."""
    if picture.suffix not in FORMATS:
        raise UserError(f"--plot must name a file that ends in {' or '.join(FORMATS)}, not {picture}")
    if not picture.parent.is_dir():
        raise UserError(f"--plot: there is no folder {picture.parent}")


def plot(found: Found, picture: Path) -> None:
    """Draw a PNG or SVG. Raises UserError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s of import time, and no display
    from matplotlib.figure import Figure

    names = [name for name in found.system.counts if len({run.counts[name] for run in found.runs}) > 1]
    panels = len(names) + (found.times is not None)
    rows = max(1, -(-panels // PANELS_A_ROW))
    height = 0.7 + 0.15 * len(found.runs)
    figure = Figure(figsize=(11, rows * height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(rows, PANELS_A_ROW, squeeze=False, sharey=True).flatten()
    for axes, name in zip(every, names, strict=False):
        _bars(axes, found, [float(run.counts[name]) for run in found.runs])
        axes.set_title(COUNTS[name].what, fontsize=7)
    if found.times is not None:
        _bars_of_times(every[len(names)], found, found.times)
    for axes in every[panels:]:
        axes.set_visible(False)
    told = f"{found.system.title}; {found.requests} requests"
    figure.suptitle(f"{told}; {found.untimed}" if found.untimed else told, fontsize=9)
    with writing(picture, UserError) as stream:
        figure.savefig(stream, format=picture.suffix[1:], dpi=110)


def _bars(axes: Any, found: Found, values: list[float]) -> None:
    labels = [run.variant.name for run in found.runs]
    places = range(len(labels))
    axes.barh(places, values, color=[COLOURS.get(label, OTHERS) for label in labels])
    axes.set_yticks(places, labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)


def _bars_of_times(axes: Any, found: Found, times: Mapping[str, Times]) -> None:
    of_each = [times[run.variant.name] for run in found.runs]
    _bars(axes, found, [of.mean_ms for of in of_each])
    for place, of in enumerate(of_each):
        axes.plot(of.interval_ms, [place, place], color="black", linewidth=1.2, marker="|")
    axes.set_title("ms of a request, with its 95 % interval", fontsize=7)
