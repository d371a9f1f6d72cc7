# SPDX-License-Identifier: Apache-2.0
"""Quality against latency while one field of the configuration takes several values: how a user chooses a beam.

Beam widths are a field of the request: one engine, or server, answers them all, and their latencies are measured in
turn. Any other field needs an engine for each value, one after the other. Latency is that of a sample of requests one
by one, after some that warm up; quality and throughput come from all examples, with many in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jgr.config import Config, override
from jgr.data.interactions import Examples
from jgr.evaluation.served import EvaluationError, Query, Served
from jgr.traffic.measures import percentiles_ms

WIDTH = "beam.width"
_WARM_UP = 10  # examples
_IDLE = "profiles.candidates"  # shapes that only `rank` uses


@dataclass(frozen=True)
class Sweep:
    """A sweep of one field.

    For each engine that it needs: its configuration, and each value's beam width by its text.
    """

    field: str
    engines: Sequence[tuple[Config, Mapping[str, int]]]


@dataclass(frozen=True, eq=False)
class Measured:
    """The figures of one value. ranked: [n, top_k] rows. latency_ms: percentiles of single requests.

    requests_per_s: answers a second with many requests in flight.
    """

    beam_width: int
    ranked: npt.NDArray[np.int32]
    latency_ms: dict[str, float]
    requests_per_s: float


def parse_sweep(text: str, config: Config) -> Sweep:
    """Read `section.field=value,value`; semicolons separate values that hold commas themselves.

    beam.* and profiles.* can be swept. A beam width comes with a profile of its own. Raises ConfigError for other
    fields and for values that a field excludes.
    """
    field, _, values = text.partition("=")
    field = field.strip()
    texts = dict.fromkeys(value.strip() for value in values.split(";" if ";" in values else ","))
    base = override(config, f"{_IDLE}=1")  # nothing here ranks: the smallest shape is compiled soonest
    configs = {value: override(base, f"{field}={value}") for value in texts}
    if field.split(".")[0] not in ("beam", "profiles") or field == _IDLE:
        raise EvaluationError(f"--sweep: {field} cannot be swept; beam.* and the shapes of recommend can")
    widths = {value: chosen.beam.width for value, chosen in configs.items()}
    if field != WIDTH:
        return Sweep(field, [(chosen, {value: widths[value]}) for value, chosen in configs.items()])
    sizes = sorted(set(widths.values()))
    compiled = override(base, f"{WIDTH}={sizes[-1]}", f"profiles.widths={','.join(map(str, sizes))}")
    return Sweep(field, [(compiled, widths)])


def check_remote(sweep: Sweep, served: Served) -> None:
    """Raise EvaluationError unless a running server can be asked for every value of the sweep."""
    if sweep.field != WIDTH:
        raise EvaluationError(
            f"--sweep: a running server's {sweep.field} is fixed; with --url, sweep {WIDTH}"
        )
    widest = max(width for _, widths in sweep.engines for width in widths.values())
    if widest > served.info.max_beam_width:
        raise EvaluationError(
            f"--sweep: the server's largest beam width is {served.info.max_beam_width}, not {widest}; "
            f"start it with the widths in profiles.widths"
        )


def measure(
    served: Served,
    examples: Examples,
    queries: Mapping[str, Query],
    *,
    requests: int,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Measure every query, by its name: quality and throughput over all of n >= 1 examples, latency over some of them.

    requests: how many are drawn for the latency. Every query must have a beam_width.
    """
    sample = np.random.default_rng(0).integers(0, len(examples), _WARM_UP + requests)
    asked = list(queries.values())
    served.latencies_s(examples.select(sample[:_WARM_UP]), asked)
    seconds = served.latencies_s(examples.select(sample[_WARM_UP:]), asked)
    measured = {}
    for (name, query), taken in zip(queries.items(), seconds, strict=True):
        latency_ms = percentiles_ms(taken)
        assert latency_ms is not None and query.beam_width is not None
        start = time.perf_counter()
        ranked = served.recommend_all(examples, query, on_answer)
        rate = len(examples) / (time.perf_counter() - start)
        measured[name] = Measured(query.beam_width, ranked, latency_ms, rate)
    return measured
