# SPDX-License-Identifier: Apache-2.0
"""The picture of a sweep of rates: latencies above, goodput below, both over the offered rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jgr.files import writing
from jgr.traffic.schedule import LoadError

FORMATS = (".png", ".svg")


def check_picture(picture: Path) -> None:
    """Raise LoadError for a file whose name says another format, or that has no folder: before a load is sent."""
    if picture.suffix not in FORMATS:
        raise LoadError(f"--plot must name a file that ends in {' or '.join(FORMATS)}, not {picture}")
    if not picture.parent.is_dir():
        raise LoadError(f"--plot: there is no folder {picture.parent}")


def plot_rates(points: Sequence[Mapping[str, Any]], picture: Path, capacity: float | None = None) -> None:
    """Draw a PNG or SVG. points: reports of runs, in any order; capacity: a rate to mark.

    Raises LoadError where the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s of import time, and no display
    from matplotlib.figure import Figure

    ranked = sorted(
        (point for point in points if point["offered_per_s"]), key=lambda point: float(point["offered_per_s"])
    )
    rates = [point["offered_per_s"] for point in ranked]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for name, colour in (("p50", "tab:green"), ("p90", "tab:orange"), ("p99", "tab:red")):
        told = [point for point in ranked if point["latency_ms"] and point["latency_ms"][name] is not None]
        if not told:
            continue
        at = [point["offered_per_s"] for point in told]
        above.plot(at, [point["latency_ms"][name] for point in told], color=colour, marker="o", label=name)
        for rate, point in zip(at, told, strict=True):
            if bounds := point["latency_95_ms"][name]:
                above.vlines(rate, *bounds, color=colour, alpha=0.4)
    limits = {point["slo_ms"] for point in ranked}
    for limit in limits:
        above.axhline(limit, color="black", linestyle=":", linewidth=1, label=f"limit, {limit:g} ms")
    above.set_yscale("log")
    above.set_ylabel("latency from the scheduled time, ms")
    below.plot(rates, rates, color="gray", linestyle=":", label="offered")
    below.plot(
        rates, [point["achieved_per_s"] for point in ranked], color="tab:blue", alpha=0.5, label="answered"
    )
    below.plot(
        rates, [point["goodput_per_s"] for point in ranked], color="tab:blue", marker="o", label="in time"
    )
    below.set_ylabel("answers per second")
    below.set_xlabel("offered requests per second")
    below.set_ylim(bottom=0)
    if capacity is not None:
        for axes in (above, below):
            axes.axvline(capacity, color="tab:purple", linestyle="--", linewidth=1, label="capacity")
    for axes in (above, below):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    with writing(picture, LoadError) as stream:
        figure.savefig(stream, format=picture.suffix[1:], dpi=120)
