# SPDX-License-Identifier: Apache-2.0
"""Draws the curves of a training run: the loss of every step and the metric of every validation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

SMOOTHED = 50
"""The drawn loss is a running mean over at most this many steps, a twentieth of a short run."""


def plot_curves(metrics: Path, picture: Path, metric: str) -> None:
    """Draw metrics.jsonl into a PNG. metric: the name of the validated metric in it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s of import time, and no display
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = np.array([(line["step"], line["loss"]) for line in lines if "loss" in line]).reshape(-1, 2)
    found = np.array([(line["step"], line[metric]) for line in lines if metric in line]).reshape(-1, 2)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*losses.T, color="tab:blue", alpha=0.3, linewidth=0.5)
    axes.plot(*smoothed(losses).T, color="tab:blue")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per target", color="tab:blue")
    if len(found):
        right = axes.twinx()
        right.plot(found[:, 0], found[:, 1], color="tab:red", marker="o", markersize=3)
        right.set_ylabel(f"validation {metric}", color="tab:red")
        if metric.startswith("recall"):
            right.set_ylim(bottom=0)
    figure.savefig(picture, dpi=120)


def smoothed(losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The running mean of [n, 2] steps and losses. The steps' mean too: so each point lies amid those it is made of."""
    window = max(1, min(SMOOTHED, len(losses) // 20))
    if not len(losses):
        return losses
    windows = np.lib.stride_tricks.sliding_window_view(losses, window, axis=0)
    return np.asarray(windows.mean(axis=-1), np.float64)
