# SPDX-License-Identifier: Apache-2.0
"""What boards and alert rules are made of: panels, and expressions over Prometheus series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = "$__rate_interval"
TOTAL = 'stage="total"'
TOKENS, CACHED = "jgr_prompt_tokens_total", 'source="cached"'


@dataclass(frozen=True)
class Panel:
    """A graph. queries: pairs of an expression and the legend of its lines. unit: Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Board:
    """A dashboard. name: of its file."""

    name: str
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Alert:
    """An alert rule. wait: how long the expression must hold."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str


def rate(counter: str, by: str = "", where: str = "", model: bool = True) -> str:
    """What a counter grows by a second, summed by labels."""
    chosen = ", ".join(part for part in (where, 'model=~"$model|"' if model else "") if part)
    labels = ", ".join(part for part in (("model" if model else ""), by) if part)
    summed = f"sum by ({labels})" if labels else "sum"
    return f"{summed} (rate({counter}{{{chosen}}}[{WINDOW}]))"


def growth(counter: str, by: str) -> str:
    """What a counter grows by in a window."""
    return f'sum by (model, {by}) (increase({counter}{{model=~"$model|"}}[{WINDOW}]))'


def gauge(name: str, by: str = "") -> str:
    labels = ", ".join(part for part in ("model", by) if part)
    return f'sum by ({labels}) ({name}{{model=~"$model|"}})'


def most(name: str) -> str:
    """The largest of a gauge's values for a model, such as those of a fleet's replicas."""
    return f'max by (model) ({name}{{model=~"$model|"}})'


def quantiles(
    histogram: str, by: str = "", where: str = "", at: Sequence[float] = (0.5, 0.99)
) -> tuple[tuple[str, str], ...]:
    legend = f"{{{{{by}}}}} " if by else ""
    inner = rate(f"{histogram}_bucket", ", ".join(part for part in ("le", by) if part), where)
    return tuple((f"histogram_quantile({q:g}, {inner})", f"{legend}P{100 * q:g}") for q in at)


def mean(histogram: str, by: str = "") -> str:
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def share(counter: str, where: str) -> str:
    """The part of a counter that has these labels."""
    return f"{rate(counter, where=where)} / {rate(counter)}"
