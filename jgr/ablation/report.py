# SPDX-License-Identifier: Apache-2.0
"""An ablation, and the table of mechanisms, as text, as JSON and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jgr.ablation.counts import COUNTS
from jgr.ablation.measure import TOLERANCE, Difference, Found, Times
from jgr.ablation.mechanisms import SYSTEMS
from jgr.ablation.system import ALL, NONE, Mechanism, System, variants
from jgr.evaluation.tables import Rows, aligned, parts

WIDTH = 110


def lines(found: Found, width: int | None = None) -> list[str]:
    """The tables for people: counts, answers and times of every variant. width: of a terminal; see tables.parts."""
    system = found.system
    told = f"{found.requests} requests to each of {len(found.runs)} variants, in turns"
    rows = [["variant", *system.counts]]
    rows += [[run.variant.name, *(f"{run.counts[name]:,}" for name in system.counts)] for run in found.runs]
    shown = [system.title, f"{told}. What each did:", "", *_tables(rows, width)]
    shown += [f"{name}: {COUNTS[name].what}" for name in system.counts]
    rows = [
        ["variant", "answers, beside those with all off", "time of a request (95 %)", "over all on (95 %)"]
    ]
    for run in found.runs:
        name = run.variant.name
        times = None if found.times is None else found.times[name]
        rows.append([name, verdict(found.differences[name], system), *_times(times)])
    shown += ["", *_tables(rows, width, right=False)]
    shown += [
        f"{run.variant.name} may differ: {run.variant.differs}" for run in found.runs if run.variant.differs
    ]
    shown.append(
        found.untimed
        or f"Times are of {found.timed} requests, asked while nobody else used the machine; the first round is none."
    )
    return shown


def verdict(difference: Difference, system: System) -> str:
    """What is known of a variant's answers, in a few words."""
    size = f"{difference.largest:.1g}"
    if not difference.is_right:
        return f"WRONG: differ by {size}, only {TOLERANCE:g} is rounding"
    same = "the same" if difference.largest <= TOLERANCE else "differ as they may"
    parts = [f"{same} (to {size})"]
    if difference.allowed and difference.items:
        parts.append(f"{difference.items:,} in another order or of other items")
    if system.orders and difference.reordered:
        parts.append(f"{difference.reordered:,} with the other prefix")
    return ", ".join(parts)


def _times(times: Times | None) -> tuple[str, str]:
    if times is None:
        return "not timed", "not timed"
    low, high = times.interval_ms
    ratio_low, ratio_high = times.interval_over_all
    return (
        f"{_short(times.mean_ms)} ms ({_short(low)} to {_short(high)})",
        f"{times.over_all:.2f} ({ratio_low:.2f} to {ratio_high:.2f})",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _tables(rows: Rows, width: int | None, right: bool = True) -> Iterator[str]:
    """Rows of cells as lines, with an empty one behind each part; numbers stand right."""
    for part in parts(rows, width):
        yield from aligned(part, right)
        yield ""


def to_json(found: Found, about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole ablation. about: what else is to be told of it, such as the machine."""
    shown = []
    for run in found.runs:
        variant, name = run.variant, run.variant.name
        difference = found.differences[name]
        times = None if found.times is None else found.times[name]
        shown.append(
            {
                "name": name,
                "mechanism": variant.mechanism.name if variant.mechanism else None,
                "numbers": list(variant.mechanism.numbers) if variant.mechanism else [],
                "settings": list(variant.settings),
                "counts": dict(run.counts),
                "answers": {
                    "right": difference.is_right,
                    "largest_difference": difference.largest,
                    "other_items": difference.items,
                    "other_prefix": difference.reordered,
                    "may_differ": difference.allowed or None,
                },
                "times": None
                if times is None
                else {
                    "mean_ms": times.mean_ms,
                    "interval_95_ms": list(times.interval_ms),
                    "over_all_on": times.over_all,
                    "interval_95_over_all_on": list(times.interval_over_all),
                },
            }
        )
    return {
        "system": found.system.name,
        "requests": found.requests,
        "timed_requests": found.timed,
        "untimed": found.untimed or None,
        **about,
        "variants": shown,
    }


def switch(mechanism: Mechanism) -> str:
    """The assignments of a mechanism as --set takes them."""
    return " ".join(mechanism.settings)


def answers(mechanism: Mechanism) -> str:
    return f"may differ: {mechanism.differs}" if mechanism.differs else "the same"


def listing(systems: Iterable[System] = tuple(SYSTEMS.values()), width: int = WIDTH) -> list[str]:
    """The table of mechanisms for a terminal whose lines have so many characters."""
    shown: list[str] = []
    for system in systems:
        shown += [*textwrap.wrap(f"{system.name}: {system.title}", width), ""]
        for name, settings in ((ALL, system.on), (NONE, system.off)):
            shown += textwrap.wrap(
                f"{name}: {' '.join(settings)}", width, initial_indent="  ", subsequent_indent="    "
            )
        shown.append("")
        for one in system.mechanisms:
            verb = "with" if one.added else "without"
            shown += textwrap.wrap(
                f"{', '.join(one.numbers)}: {verb} {one.name}: {switch(one)}",
                width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            shown += textwrap.wrap(f"{one.what}. Answers: {answers(one)}.", width, **_INDENT)
        for fixed in system.fixed:
            shown.append(f"  {', '.join(fixed.numbers)}: no switch")
            shown += textwrap.wrap(f"{fixed.what}: {fixed.instead}.", width, **_INDENT)
        shown.append("")
    return shown[:-1]


_INDENT: dict[str, Any] = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}


def markdown(systems: Iterable[System] = tuple(SYSTEMS.values())) -> str:
    """The table of mechanisms for docs/ablations.md."""
    parts = []
    for system in systems:
        told = f"`jgr ablate {system.name}` runs {len(variants(system))} variants. The shop's model is served with"
        parts += [f"## {system.title}", f"{told} {' '.join(f'`{setting}`' for setting in system.base)}."]
        rows = [("variant", "mechanism", "what it does", "switch", "answers")]
        rows.append(("all on", "", "the whole system", _code(system.on), "the same"))
        rows += [
            (
                f"{'with' if one.added else 'without'} {one.name}",
                ", ".join(one.numbers),
                one.what,
                _code(one.settings),
                answers(one),
            )
            for one in system.mechanisms
        ]
        rows.append(("all off", "", "what is compared with", _code(system.off), "the same"))
        parts.append(_table(rows))
        fixed = [(", ".join(of.numbers), of.what, of.instead) for of in system.fixed]
        parts.append(_table([("without a switch", "what it does", "instead"), *fixed]))
        counted = [(name, COUNTS[name].what) for name in system.counts]
        parts.append(_table([("counted", "what it is"), *counted]))
    return "\n\n".join(["", *parts, ""])


def _code(settings: Iterable[str]) -> str:
    return "<br>".join(f"`{setting}`" for setting in settings)


def _table(rows: Rows) -> str:
    shown = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([shown[0], "|---" * len(rows[0]) + "|", *shown[1:]])
