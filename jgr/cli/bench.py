# SPDX-License-Identifier: Apache-2.0
"""`jgr bench`: measurements that users make of their own system.

`jgr bench ops` times the ops on this device against its own roofline. `jgr bench serve` sends requests to a running
server at their times, without waiting for answers, and reports goodput and latencies (docs/load.md). The lines are for
people; the last line of stdout is one JSON document, on a terminal with --json alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from absl import flags

from jgr.cli import console
from jgr.config import UserError

HELP = "serve [folder]: load a server and measure its latencies; ops: time the ops on this device"


def define_flags() -> None:
    flags.DEFINE_string("url", None, "the server's URL; default: server.host and server.port of the config")
    flags.DEFINE_string(
        "api_key", None, "key to send as 'Authorization: Bearer ...'; default: server.api_key"
    )
    console.define_ca_file()
    flags.DEFINE_bool("allow_remote", False, "also load servers that are not on this machine")
    flags.DEFINE_string("trace", None, "file of JSON lines {at_ms, path, body} to send, at its times")
    flags.DEFINE_float(
        "rate", None, "mean requests per second; default: 10, or a file's own times", lower_bound=1e-3
    )
    flags.DEFINE_list("rates", [], "several rates, one after the other, as in 10,20,50")
    flags.DEFINE_float("duration", None, "seconds to send; default: 10, or a whole file", lower_bound=0.0)
    flags.DEFINE_integer("max_requests", 100_000, "refuse runs with more requests", lower_bound=1)
    flags.DEFINE_string(
        "arrivals",
        "poisson",
        "constant, poisson, gamma:CV, diurnal:PERIOD_S:SWING or flash:EVERY_S:LENGTH_S:FACTOR",
    )
    flags.DEFINE_string(
        "arrivals_file", None, "arrival times: KuaiRand's log, an Azure or Mooncake trace, a server.journal"
    )
    flags.DEFINE_string(
        "model",
        None,
        "the model that requests name; default: the folder's, where the server has several and that one too",
    )
    flags.DEFINE_string("mix", None, "JSON file with classes of requests, in place of --kind .. --timed")
    flags.DEFINE_enum(
        "kind",
        "recommend",
        ("recommend", "rank"),
        "which endpoint to ask; unset, rank where all models only rank",
    )
    flags.DEFINE_string(
        "history_length",
        "50",
        "items in a history, drawn from catalog.path: a number, uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA:MOST, "
        "power:EXPONENT:LEAST:MOST or oneof:N:N",
    )
    flags.DEFINE_string("candidates", "100", "candidates in a rank request: as --history_length")
    flags.DEFINE_string("top_k", "10", "items that a request asks for: as --history_length")
    flags.DEFINE_string("beam_width", None, "beams of a recommend request: as --history_length")
    flags.DEFINE_float("deadline_ms", None, "deadline that requests carry; default: none", lower_bound=1e-3)
    flags.DEFINE_enum("priority", None, ("interactive", "batch"), "priority that requests carry")
    flags.DEFINE_bool("timed", False, "give histories times; unset, where the model that ranks reads them")
    flags.DEFINE_integer("seed", 0, "seed of arrivals, histories and candidates", lower_bound=0)
    flags.DEFINE_float(
        "slo_ms", 100.0, "goodput counts answers within their deadline_ms, else this time", lower_bound=0.0
    )
    flags.DEFINE_integer(
        "processes", 1, "client processes that send the load together", lower_bound=1, upper_bound=256
    )
    flags.DEFINE_bool("find_capacity", False, "find the highest rate, from --rate on, that is served in time")
    flags.DEFINE_float(
        "share",
        0.99,
        "share of the requests that a capacity serves in time",
        lower_bound=0.01,
        upper_bound=0.9999,
    )
    flags.DEFINE_integer("max_probes", 16, "most rates that --find_capacity tries", lower_bound=1)
    flags.DEFINE_string("plot", None, "PNG or SVG file for latency and goodput over the rates")

    console.define_json()
    flags.DEFINE_string("op", "", "jgr bench ops: only ops and cases whose 'name case' contains this")


def main(argv: Sequence[str]) -> None:
    if not argv:
        print("\n".join(f"jgr bench {name:<8} {help_}" for name, (help_, _) in BENCHMARKS.items()))
        return
    name, *rest = argv
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark '{name}'; there are: {', '.join(BENCHMARKS)}")
    BENCHMARKS[name][1](flags.FLAGS, rest)


def _serve(values: flags.FlagValues, argv: Sequence[str]) -> None:
    from jgr.cli import bench_serve

    bench_serve.serve(values, argv)


def _ops(values: flags.FlagValues, argv: Sequence[str]) -> None:
    console.refuse_arguments(argv)
    from jgr.ops import roofline

    report = roofline.measure(values.op)
    print("\n".join(roofline.lines(report)))
    console.print_json(report)
    if not report["rows"]:
        raise UserError(f"no op has a case to time whose name contains --op={values.op}")


BENCHMARKS: Mapping[str, tuple[str, Callable[[flags.FlagValues, Sequence[str]], None]]] = {
    "serve": ("open-loop load on a running server: goodput and latencies", _serve),
    "ops": ("time of every op, and its share of this device's roofline", _ops),
}
