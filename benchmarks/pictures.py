# SPDX-License-Identifier: Apache-2.0
"""The picture of a result file: the benchmark's own where it has one, else its claims, value against target.

The one idea: a picture is drawn from the result file alone, and carries a digest of what it was drawn from, so that
anybody can tell without drawing whether it is up to date. Equal results give equal pictures.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.titles import shown, unit

Result = Mapping[str, Any]
Plot = Callable[[Sequence[dict[str, Any]], Path], None]

FORM = "1"
"""The version of the drawing; another one makes every picture stale."""
MOST_BYTES = 80_000
COLOURS = 64
"""Colours of a picture: few, so that it is small."""
KEY = "jgr-result"
"""The name under which a picture's digest stands in its PNG."""
EDGE = 10.0
"""How many times better or worse than its target a claim is drawn at most."""
HOLDS, MISSED = "tab:green", "tab:orange"
TITLE_CHARS = 62


def digest(result: Result) -> str:
    """What a picture of the result depends on, as 16 hex digits."""
    titles = [shown(claim) for claim in result["claims"]]
    whole = json.dumps([FORM, titles, result], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def drawn_from(picture: Path) -> str | None:
    """The digest of the result that a PNG was drawn from; None where it has none."""
    from PIL import Image

    with Image.open(picture) as image:
        found = image.info.get(KEY)
    return None if found is None else str(found)


def own_plot(name: str) -> Plot | None:
    """The drawing that a benchmark brings, of its rows; None where its claims are drawn."""
    module = importlib.import_module(f"benchmarks.{name}")
    if not hasattr(module, "plot") and hasattr(
        module, "benchmark"
    ):  # a family of benchmarks, which shares one
        module = sys.modules[module.benchmark.__module__]
    plot: Plot | None = getattr(module, "plot", None)
    return plot


def draw(result: Result, picture: Path, plot: Plot | None) -> None:
    """Write the PNG of a result. plot: draws its rows; None: its claims are drawn."""
    import matplotlib

    # Not what somebody has configured: the same picture everywhere.
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        matplotlib.use("agg")
        if plot is None:
            content = _claims_png(result)
        else:
            partial = picture.with_name(f".{picture.name}")
            try:
                plot(result["rows"], partial)
                content = partial.read_bytes()
            finally:
                partial.unlink(missing_ok=True)
    picture.write_bytes(_small(content, digest(result)))


def _small(content: bytes, found: str) -> bytes:
    """The PNG with few colours, and with the digest."""
    from PIL import Image, PngImagePlugin

    about = PngImagePlugin.PngInfo()
    about.add_text(KEY, found)
    stream = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        # By coverage of the colours: one that counts pixels turns a short orange bar brown.
        few = image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(stream, format="PNG", optimize=True, pnginfo=about)
    return stream.getvalue()


def advantage(value: float, target: float, better: str) -> float:
    """How many times better than its target a value is, 1 at the target, 1 / EDGE to EDGE.

    Where no ratio tells (a target of 0, signs that differ), it is one of the ends.
    """
    holds = value >= target if better == "higher" else value <= target
    if value == target:
        return 1.0
    over, under = (value, target) if better == "higher" else (target, value)
    if over <= 0 or under <= 0:
        if over < 0 and under < 0:
            over, under = -under, -over
        else:
            return EDGE if holds else 1 / EDGE
    return min(max(over / under, 1 / EDGE), EDGE)


def label(claim: Mapping[str, Any]) -> str:
    """A claim's value and target in figures."""
    sign = "≥" if claim["better"] == "higher" else "≤"
    value = f"{claim['value']:,.4g} {unit(claim)}".rstrip()
    return f"{value} (wanted {sign} {claim['target']:,.4g})"


def _claims_png(result: Result) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    claims = result["claims"]
    figure = Figure(figsize=(9.6, 1.1 + 0.42 * max(1, len(claims))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, claim in enumerate(claims):
        _claim_bar(axes, place, claim)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(1 / EDGE / 1.2, EDGE * 1.2)
    ticks = {1 / EDGE: "≤ 0.1", 0.2: "0.2", 0.5: "0.5", 1: "1", 2: "2", 5: "5", EDGE: "≥ 10"}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(len(claims) - 0.4, -0.6)
    names = [textwrap.fill(shown(claim), TITLE_CHARS) for claim in claims]
    axes.set_yticks(range(len(claims)), names, fontsize=6.5)
    axes.set_xlabel("times better than what was wanted (line: exactly that); orange: missed", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{result['benchmark']}: each claim against its target", fontsize=9)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100)
    return stream.getvalue()


def _claim_bar(axes: Any, place: int, claim: Mapping[str, Any]) -> None:
    """A claim's bar from its target, with its interval where it has one, and its figures."""
    value, target, better = claim["value"], claim["target"], claim["better"]
    at = advantage(value, target, better)
    colour = HOLDS if claim["holds"] else MISSED
    axes.plot([1.0, at], [place, place], color=colour, linewidth=7, solid_capstyle="butt", alpha=0.8)
    axes.plot([at], [place], marker="o", color=colour, markersize=5)
    ends = [1.0]
    if claim.get("interval"):
        ends = [advantage(end, target, better) for end in claim["interval"]]
        axes.plot(ends, [place, place], color="black", linewidth=1.2, marker="|")
    right = at >= 1
    axes.annotate(
        label(claim),
        (min(1.0, *ends) if right else max(1.0, *ends), place),  # beside the interval too
        xytext=(-6 if right else 6, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontsize=6.5,
    )
