# SPDX-License-Identifier: Apache-2.0
"""The curve of a sweep as a picture: quality over latency, each point named by its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jgr.evaluation.served import EvaluationError
from jgr.files import writing


def plot_sweep(field: str, points: Sequence[Mapping[str, Any]], k: int, picture: Path) -> None:
    """Draw a PNG. points: the "points" of the sweep's JSON. Raises EvaluationError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s of import time, and no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    p50 = [point["latency_ms"]["p50"] for point in points]
    p99 = [point["latency_ms"]["p99"] for point in points]
    for metric, colour in ((f"hr@{k}", "tab:blue"), (f"ndcg@{k}", "tab:red")):
        means = [point["metrics"][metric] for point in points]
        axes.plot(p50, means, color=colour, marker="o", label=f"{metric}, at p50")
        axes.plot(p99, means, color=colour, marker="|", linestyle=":", alpha=0.5, label=f"{metric}, at p99")
        if all(metric in point["intervals"] for point in points):
            low, high = zip(*(point["intervals"][metric] for point in points), strict=True)
            axes.vlines(p50, low, high, color=colour, alpha=0.3)
        for point, x, y in zip(points, p50, means, strict=True):
            axes.annotate(point["value"], (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axes.set_xlabel("latency of a single request, ms")
    axes.set_ylabel("mean, with its 95 % interval")
    axes.set_ylim(bottom=0)
    axes.set_title(field)
    axes.legend(fontsize=8)
    with writing(picture, EvaluationError) as stream:
        figure.savefig(stream, format="png", dpi=120)
