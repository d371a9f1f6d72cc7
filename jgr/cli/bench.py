# SPDX-License-Identifier: Apache-2.0
"""`jgr bench`: measurements that users make of their own system.

`jgr bench ops` times the ops on this device against its own roofline. `jgr bench serve` sends requests to a running
server at a rate, or at the times of a trace file, without waiting for answers, and reports goodput and latencies. The
lines are for people; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jgr.cli import console
from jgr.config import Config, UserError

HELP = "serve: load a server and measure its latencies; ops: time the ops on this device"

DEFAULT_DURATION_S = 10.0
MAX_CONNECTIONS = 512
TIMEOUT_S = 30.0


def define_flags() -> None:
    flags.DEFINE_string("url", None, "the server's URL; default: server.host and server.port of the config")
    flags.DEFINE_string(
        "api_key", None, "key to send as 'Authorization: Bearer ...'; default: server.api_key"
    )
    flags.DEFINE_bool("allow_remote", False, "also load servers that are not on this machine")
    flags.DEFINE_string("trace", None, "file of JSON lines {at_ms, path, body} to send, instead of --rate")
    flags.DEFINE_float("rate", 10.0, "requests to send per second", lower_bound=1e-3)
    flags.DEFINE_float("duration", None, "seconds to send; default: 10, or the whole trace", lower_bound=0.0)
    flags.DEFINE_integer("max_requests", 100_000, "refuse runs with more requests", lower_bound=1)
    flags.DEFINE_enum("arrivals", "poisson", ("poisson", "constant"), "how requests at a rate are spaced")
    flags.DEFINE_enum("kind", "recommend", ("recommend", "rank"), "which endpoint to ask")
    flags.DEFINE_integer("history_length", 50, "items in a history, drawn from catalog.path", lower_bound=1)
    flags.DEFINE_integer("candidates", 100, "candidates in a rank request", lower_bound=1)
    flags.DEFINE_integer("top_k", 10, "items that a request asks for", lower_bound=1)
    flags.DEFINE_bool("timed", False, "give histories times, for models that read them")
    flags.DEFINE_integer("seed", 0, "seed of arrivals, histories and candidates", lower_bound=0)
    flags.DEFINE_float("slo_ms", 100.0, "answers within this time count as goodput", lower_bound=0.0)

    flags.DEFINE_string("op", "", "jgr bench ops: only ops and cases whose 'name case' contains this")


def main(argv: Sequence[str]) -> None:
    if not argv:
        print("\n".join(f"jgr bench {name:<8} {help_}" for name, (help_, _) in BENCHMARKS.items()))
        return
    name, *rest = argv
    console.refuse_arguments(rest)
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark '{name}'; there are: {', '.join(BENCHMARKS)}")
    BENCHMARKS[name][1](flags.FLAGS)


def _serve(values: flags.FlagValues) -> None:
    from jgr.traffic import open_loop as load

    config = console.load(values)
    server = config.server
    url = values.url or f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
    target = load.parse_url(url, server.api_key if values.api_key is None else values.api_key)
    if not target.is_loopback and not values.allow_remote:
        raise UserError(f"{target.host} is not this machine; to load it all the same, add --allow_remote")
    for name in ("rate", "duration", "slo_ms"):
        if not math.isfinite(values[name].value or 0.0):
            raise UserError(f"--{name} must be a finite number")
    arrivals = _arrivals(values, config)
    if not arrivals:
        raise UserError("there is nothing to send: raise --rate or --duration, or check --trace")
    with console.progress_bar("requests answered") as bar:
        results = load.run(
            arrivals, target, max_connections=MAX_CONNECTIONS, timeout_s=TIMEOUT_S, progress=bar
        )
    report = {"url": url, "load": _describe(values), **load.summarize(results, values.slo_ms)}
    print("\n".join(_lines(report)))
    print(json.dumps(report))
    if "200" not in report["answered"]:
        raise UserError(
            "no request was answered 200: try one by hand, the server's answer says why "
            "(a model that reads times needs --timed; one that reads more needs a --trace)"
        )


def _arrivals(values: flags.FlagValues, config: Config) -> Sequence[Any]:
    """The requests and their times, as the flags say."""
    from pathlib import Path

    import numpy as np

    from jgr.catalog.catalog import load_catalog
    from jgr.traffic import open_loop as load

    if values.trace:
        return load.read_trace(
            Path(values.trace), duration_s=values.duration, max_requests=values.max_requests
        )
    duration_s = DEFAULT_DURATION_S if values.duration is None else values.duration
    if values.rate * duration_s > values.max_requests:
        raise UserError(
            f"--rate times --duration is {values.rate * duration_s:.0f} requests; --max_requests is "
            f"{values.max_requests}"
        )
    if not (config.catalog.path or config.model.path):
        raise UserError("say where item ids come from: --set catalog.path=catalog.jsonl, or give a --trace")
    catalog = load_catalog(config.catalog.path or Path(config.model.path) / "catalog.jsonl")
    rng = np.random.default_rng(values.seed)
    requests = load.make_requests(
        values.kind,
        catalog.item_ids,
        history_length=values.history_length,
        candidates=values.candidates,
        top_k=values.top_k,
        rng=rng,
        timed=values.timed,
    )
    return load.schedule(load.arrival_times(values.arrivals, values.rate, duration_s, rng), requests, rng)


def _describe(values: flags.FlagValues) -> dict[str, Any]:
    """The flags that determine the load, for the report."""
    if values.trace:
        return {"trace": values.trace, "duration_s": values.duration}
    names = ("kind", "arrivals", "rate", "history_length", "candidates", "top_k", "timed", "seed")
    return {name: getattr(values, name) for name in names} | {
        "duration_s": DEFAULT_DURATION_S if values.duration is None else values.duration
    }


def _lines(report: Mapping[str, Any]) -> list[str]:
    """The report as lines for people."""
    ends = [f"{n} answered {status}" for status, n in report["answered"].items()]
    ends += [f"{n} {reason.replace('_', ' ')}" for reason, n in report["failed"].items()]
    share = report["in_time"] / report["sent"]
    lines = [
        f"sent      {report['sent']} requests in {report['elapsed_s']:.1f} s: {', '.join(ends)}",
        f"goodput   {report['goodput_per_s']:.1f}/s answered 200 within {report['slo_ms']:g} ms "
        f"({share:.1%} of the requests)",
    ]
    for name, meaning in (
        ("latency", "from the scheduled time, status 200"),
        ("lateness", "of sending: the client's own part"),
    ):
        if values := report[f"{name}_ms"]:
            shown = ", ".join(f"{p} {ms:.1f} ms" for p, ms in values.items())
            lines.append(f"{name:<9} {shown} ({meaning})")
    latency_ms, lateness_ms = report["latency_ms"], report["lateness_ms"]
    if latency_ms and lateness_ms and lateness_ms["p50"] > latency_ms["p50"] / 2:
        lines.append(
            "warning   the client fell behind its schedule: these latencies are its own, not the server's"
        )
    return lines


def _ops(values: flags.FlagValues) -> None:
    from jgr.ops import roofline

    report = roofline.measure(values.op)
    print("\n".join(roofline.lines(report)))
    print(json.dumps(report))
    if not report["rows"]:
        raise UserError(f"no op has a case to time whose name contains --op={values.op}")


BENCHMARKS: Mapping[str, tuple[str, Callable[[flags.FlagValues], None]]] = {
    "serve": ("open-loop load on a running server: goodput and latencies", _serve),
    "ops": ("time of every op, and its share of this device's roofline", _ops),
}
