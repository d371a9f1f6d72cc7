# SPDX-License-Identifier: Apache-2.0
"""The reports of loads as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgr.traffic.measures import QUANTILES, needed

LATE_SHARE = 0.2
"""The client is the limit where its own lateness at P99 is above this share of the limit on latency."""


def run_lines(report: Mapping[str, Any]) -> list[str]:
    """A run: rates, refusals, goodput, latencies of all and of each class, the client's lateness."""
    rates = f"answered {report['achieved_per_s']:.1f}/s"
    if report["offered_per_s"] is not None:
        rates = f"offered {report['offered_per_s']:.1f}/s, {rates}"
    lines = [f"sent      {report['sent']} requests in {report['elapsed_s']:.1f} s: {_ends(report)}; {rates}"]
    for status, reasons in report["errors"].items():
        shown = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        lines.append(f"refused   {status}: {shown}")
    own = report["deadline_ms"]
    limit = f"deadline_ms, else {report['slo_ms']:g} ms" if own is None else f"their deadline of {own:g} ms"
    lines.append(
        f"goodput   {report['goodput_per_s']:.1f}/s answered 200 within {limit} "
        f"({report['in_time'] / report['sent']:.1%} of the requests)"
    )
    if report["latency_ms"]:
        lines.append(f"latency   {_latency(report)} (from the scheduled time, status 200; [95 % interval])")
    kinds, classes = report["kinds"], report["classes"]
    if len(kinds) > 1 and kinds.keys() != classes.keys():
        lines += [_part_line(f"kind {name}", part) for name, part in kinds.items()]
    if len(classes) > 1:
        lines += [_part_line(f"class {name}", part) for name, part in classes.items()]
    if lateness := report["lateness_ms"]:
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in lateness.items())
        lines.append(f"lateness  {shown} (of the client, in turning to a request)")
    if waited := report["waited_for_connection"]:
        most_ms = report["connection_wait_max_ms"]
        several = "" if waited == 1 else "s"
        lines.append(
            f"waited    {waited} request{several} over 1 ms for a connection, the longest {most_ms:.1f} ms"
        )
    if is_late(report):
        lines.append(
            "warning   the client fell behind its schedule: that lateness is in the latencies, and not the server's; "
            "leave it a core, or add --processes"
        )
    return lines


def point_line(report: Mapping[str, Any]) -> str:
    """A run of a sweep or a search in one line."""
    offered = report["offered_per_s"]
    latency = _latency(report, brief=True) if report["latency_ms"] else "no answer"
    late = "; the client fell behind" if is_late(report) else ""
    return (
        f"{'at once' if offered is None else f'{offered:.1f}/s':<10} goodput {report['goodput_per_s']:.1f}/s, "
        f"{report['in_time'] / report['sent']:.2%} of {report['sent']} in time; {latency}; {_ends(report)}{late}"
    )


def capacity_lines(report: Mapping[str, Any]) -> list[str]:
    """The outcome of a search."""
    held, failed = report["capacity_per_s"], report["fails_at_per_s"]
    what = f"{report['share']:.2%} of the requests within their deadline_ms, else {report['slo_ms']:g} ms"
    if held is None:
        lines = [f"capacity  none of the rates holds, down to {failed:.4g}/s: {what}"]
    elif failed is None:
        lines = [f"capacity  at least {held:.4g}/s, the highest rate that was tried: {what}"]
    else:
        lines = [f"capacity  {held:.4g}/s, and {failed:.4g}/s does not hold: {what}"]
    lines.append(f"probes    {', '.join(_probe(probe) for probe in report['probes'])}")
    if report["client_limited"]:
        lines.append(
            "warning   the client fell behind where it did not hold: add --processes, or another machine"
        )
    return lines


def is_late(report: Mapping[str, Any]) -> bool:
    """Whether the client's own lateness makes up a good part of the latencies."""
    lateness, latency = report["lateness_ms"], report["latency_ms"]
    if not lateness or not latency:
        return False
    middle = latency["p50"] is not None and lateness["p50"] > latency["p50"] / 2
    return bool(middle or lateness["p99"] > LATE_SHARE * report["slo_ms"])


def _probe(probe: Mapping[str, Any]) -> str:
    tries = len(probe["rounds"])
    again = "" if tries == 1 else f" (in {tries} rounds)"
    return f"{probe['rate']:.4g}/s {'holds' if probe['holds'] else 'does not hold'}{again}"


def _ends(report: Mapping[str, Any]) -> str:
    ends = [f"{count} answered {status}" for status, count in report["answered"].items()]
    ends += [f"{count} {reason.replace('_', ' ')}" for reason, count in report["failed"].items()]
    return ", ".join(ends)


def _part_line(name: str, part: Mapping[str, Any]) -> str:
    latency = _latency(part, brief=True) if part["latency_ms"] else "no answer"
    return (
        f"  {name}: {part['in_time'] / part['sent']:.1%} of {part['sent']} in time; {latency}; {_ends(part)}"
    )


def _latency(report: Mapping[str, Any], brief: bool = False) -> str:
    """The latencies, each with its interval; a percentile that the sample cannot carry says what it takes."""
    shown, missing = [], []
    for name, share in QUANTILES.items():
        value, bounds = report["latency_ms"][name], report["latency_95_ms"][name]
        if value is None:
            missing.append(f"{name.upper()} ({needed(share):,})")
        else:
            interval = f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds and not brief else ""
            shown.append(f"{name} {value:.1f} ms{interval}")
    shown.append(f"max {report['latency_ms']['max']:.1f} ms")
    if missing and not brief:
        shown.append(f"not enough requests for {', '.join(missing)}")
    return ", ".join(shown)
