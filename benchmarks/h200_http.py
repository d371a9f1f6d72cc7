# SPDX-License-Identifier: Apache-2.0
"""`jgr serve` on one H200, over HTTP: what of h200_serving's times is left with a server around the program.

The model is that of h200_serving (Qwen3-1.7B in bfloat16, random weights, 5 M items, 256 beams, prompts of 333 items,
999 tokens, in a shape of 1,000), the server a process of its own in its default mode, and the client another one on
the same machine. Measured are

- the milliseconds of a request at the client, one in flight, and what share of the items the answers are legal;
- the answers a second at saturation, without deadlines;
- goodput: answers within their deadline a second, from the time at which the client should have sent the request, over
  the lower of what was offered and that capacity, at .9, 1.5 and 3 times the capacity, deadlines 200 and 100 ms
  (benchmarks/goodput.py has the same on two cores of a CPU, which client, server and model share there).

What another engine has published for one H100, without a server and without a constraint: 17.6 ms for one prompt of
1,000 tokens, and 93.2 ms for eight, which is 85.8 a second.

    python -m benchmarks.h200_http [--quick]     needs a GPU; --quick: a tiny model on whatever there is, no claims
    python -m benchmarks.h200_http --prepare     writes the model and the catalog to --folder, and compiles; no result
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import h200_serving, harness, large_models_world
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from benchmarks.large_models_world import Asked, Server, draw_codes, export, names, save
from jgr.models import shapes
from jgr.models.decoder import DecoderConfig
from jgr.models.shapes import LEVELS
from jgr.traffic import arrivals, processes
from jgr.traffic.http_client import target_of
from jgr.traffic.measures import after, summarize
from jgr.traffic.mixes import RequestClass, make_mix
from jgr.traffic.sources import ProcessSource

LOADS = (0.9, 1.5, 3.0)
DEADLINES_MS = (200, 100)
LOAD_S, SETTLE_S = 6.0, 1.0
NAMED = 20_000
"""Items that requests name."""
PUBLISHED_PER_S = 8 / 93.2e-3
LEAST_GOODPUT, LEAST_IN_TIME = 0.9, 0.99

flags.DEFINE_bool("prepare", False, "Write the model and the catalog, compile, and measure nothing.")
flags.DEFINE_string(
    "folder", "", "Where the model, the catalog and compiled programs are kept; empty: nowhere."
)


@dataclass(frozen=True)
class Setting:
    """What is measured. history: items of a request. tokens: of the shape. rate: a first guess of the capacity."""

    cfg: DecoderConfig
    items: int
    level_size: int
    first_token: int
    history: int
    tokens: int
    width: int
    top_k: int
    rate: float
    singles: int
    load_s: float = LOAD_S


def full() -> Setting:
    cfg = shapes.named("qwen3-1.7b")
    assert isinstance(cfg, DecoderConfig)
    return Setting(cfg, 5_000_000, shapes.LEVEL_SIZE, shapes.QWEN3_FIRST, 333, 1000, 256, 50, 200.0, 100)


QUICK = Setting(h200_serving.TINY, 3000, 64, 300, 8, 24, 16, 8, 60.0, 5, 1.0)


class World:
    """The model and the catalog on disk, and the server."""

    def __init__(self, made: Path, setting: Setting) -> None:
        self.made, self.setting, self.digits = made, setting, len(str(setting.items - 1))
        self._rng = np.random.default_rng(1)
        if not (made / "items.catalog").exists():
            harness.note("writing the catalog and the model")
            codes = draw_codes(setting.items, setting.level_size)
            save(made / "items.catalog", codes, self.digits, setting.level_size, setting.first_token)
            export(made / "model", setting.cfg, jax.default_backend())

    def serve(self) -> Server:
        setting = self.setting
        settings = (
            f"catalog.path={self.made / 'items.catalog'}",
            f"model.compilation_cache={self.made / 'cache'}",
            "prompt.template={history}",
            f"prompt.max_items={setting.history}",
            "profiles.batch=1,2,4,8",
            f"profiles.tokens={setting.tokens}",
            f"profiles.widths={setting.width}",
            f"profiles.candidates={setting.top_k}",
            f"beam.width={setting.width}",
            f"batching.max_tokens={8 * setting.tokens}",
        )
        return Server(
            [str(self.made / "model"), *(f"--set={each}" for each in settings)],
            setting.items,
            self.digits,
            platform=jax.default_backend(),
        )

    def asked(self) -> Asked:
        return Asked(self.setting.history * LEVELS, self.setting.width, self.setting.top_k)

    def history(self) -> list[int]:
        found: list[int] = self._rng.integers(0, self.setting.items, self.setting.history).tolist()
        return found


class Load:
    """Open loops of requests at a server. Each is of new histories, of the first NAMED items."""

    def __init__(self, world: World, server: Server) -> None:
        self._world, self._target, self._runs = world, target_of(server.url), 0
        self._items = names(range(min(NAMED, world.setting.items)), world.digits)

    def run(
        self, rate: float, seconds: float, deadline_ms: int | None, settle_s: float = 0.0
    ) -> dict[str, Any]:
        """The report of so many seconds of requests, which settle_s of them precede."""
        setting = self._world.setting
        asked = RequestClass(
            name="request",
            history_length=setting.history,
            top_k=setting.top_k,
            beam_width=setting.width,
            deadline_ms=deadline_ms,
        )
        self._runs += 1
        mix = make_mix([asked], self._items, np.random.default_rng(7))
        source = ProcessSource(arrivals.parse_process("poisson"), mix, 7, 10**6)
        schedule = source.schedule(rate, settle_s + seconds, self._runs)
        results = processes.run(
            schedule,
            self._target,
            processes=1,
            max_connections=1024,
            timeout_s=60.0,
            progress=lambda *_: None,
        )
        return summarize(*after(schedule, results, settle_s), 1e4)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    if flags.FLAGS.folder:
        yield Path(flags.FLAGS.folder)
        return
    with tempfile.TemporaryDirectory(prefix="jgr-h200-http-") as made:
        yield Path(made)


def measure(quick: bool, quiet: Quiet) -> Measured:
    if not quick and jax.default_backend() != "gpu":
        raise Missing(f"needs a GPU; jax found {jax.default_backend()} (--quick runs a tiny model on it)")
    setting = QUICK if quick else full()
    with _folder() as made:
        world = World(made, setting)
        harness.note("starting the server")
        with world.serve() as server:
            if flags.FLAGS.prepare:
                raise Missing(
                    f"nothing was measured; {made} is ready after {server.ready_s:.0f} s of its server"
                )
            rows = list(measure_server(world, server, quiet))
    return Measured([] if quick else claims(rows), rows)


def measure_server(world: World, server: Server, quiet: Quiet) -> Iterator[Row]:
    setting, asked = world.setting, world.asked()
    quiet.wait()
    difference = server.difference_from_rank(asked, world.history())
    server.ask_without_best(asked, world.history())
    times = [server.ask(asked, world.history()) for _ in range(setting.singles)]
    yield {
        "device": jax.devices()[0].device_kind,
        "ready_s": rounded(server.ready_s),
        "one_in_flight_ms": harness.spread(times),
        "interval": list(harness.interval_of_median(times)),
        "p99_ms": rounded(float(np.percentile(times, 99))),
        "score_difference_from_rank": rounded(difference, 2),
    }
    load = Load(world, server)
    report = load.run(setting.rate, setting.load_s, None, SETTLE_S)
    capacity = report["answered"]["200"] / report["elapsed_s"]
    harness.note(f"{capacity:.0f}/s at saturation")
    yield {"capacity_per_s": rounded(capacity), "offered_per_s": setting.rate, "answered": report["answered"]}
    for deadline_ms in DEADLINES_MS:
        for times_capacity in LOADS:
            report = load.run(times_capacity * capacity, setting.load_s, deadline_ms, SETTLE_S)
            yield goodput_row(times_capacity, capacity, deadline_ms, report)


def goodput_row(load: float, capacity: float, deadline_ms: int, report: dict[str, Any]) -> Row:
    return {
        "load": load,
        "deadline_ms": deadline_ms,
        "goodput_share": rounded(report["goodput_per_s"] / (min(load, 1.0) * capacity)),
        "accepted_in_time": rounded(report["in_time"] / max(1, report["answered"].get("200", 0))),
        "answered": report["answered"],
        "latency_ms": report["latency_ms"],
        "lateness_ms": report["lateness_ms"],
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    one, saturated, *loaded = rows
    low, high = one["interval"]
    return [
        Claim("h200-http-score-difference-from-rank", one["score_difference_from_rank"], "", "lower", 0.1),
        Claim(
            "h200-http-one-request-in-flight",
            one["one_in_flight_ms"]["median"],
            "ms",
            "lower",
            h200_serving.PUBLISHED_MS[1000, 1],
            interval=(low, high),
        ),
        Claim(
            "h200-http-answers-a-second",
            saturated["capacity_per_s"],
            "/s",
            "higher",
            rounded(PUBLISHED_PER_S),
        ),
        Claim(
            "h200-http-goodput-share",
            min(row["goodput_share"] for row in loaded),
            "",
            "higher",
            LEAST_GOODPUT,
        ),
        Claim(
            "h200-http-in-time", min(row["accepted_in_time"] for row in loaded), "", "higher", LEAST_IN_TIME
        ),
    ]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="h200_http",
            measure=measure,
            packages=("jax", "jaxlib", "numpy", "uvicorn"),
            sources=(Path(__file__), Path(large_models_world.__file__), Path(h200_serving.__file__)),
            device="h200",
        )
    )
