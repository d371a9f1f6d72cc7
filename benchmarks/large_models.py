# SPDX-License-Identifier: Apache-2.0
"""Qwen3-0.6B served on a CPU: 12,000 and 10 million items, with and without filters; memory, and starts.

The model has the published shape (jgr/models/shapes.py) and random weights, is stored in bfloat16 and served by
`jgr serve` in its default mode for a CPU, float32; `kernels` says what computes. Semantic ids have three levels of
8192 codes, drawn evenly without repeats; the 12,000 items are the first of the 10 million. The server is a process of
its own and is asked by jgr.Client over HTTP, one request in flight, a new history each time. Shapes are compiled for
batches of one request, so that several in flight wait for each other.

- time: milliseconds at the client. All variants of a point (a prompt and a beam) are asked for the same history in
  turns, and what is claimed is the median of the ratios in these turns, with a bootstrap interval of 95 %. Filters:
  `exclude` names 1,000 items, `segment` leaves a tenth of the catalog. Each answer is checked: legal items, all
  different, scores that descend. The scores of a search are compared with those of /v1/rank for the same items, which
  are then excluded, and must not come again.
- memory: of the process, by the kernel, when the model is loaded (before the warm-up), when it is ready, and at its
  peak; and by how much it grows with 1 to 8 requests in flight. Explained are the engine's parts (weights in float32,
  the catalog's tables, its tree and look-up of ids, and buffers), its files, which are mapped, and a server without a
  model; compiled programs and jax itself are not.
- seconds: from the start of the process to ready and to the first answer, with an empty folder of compiled programs
  (cold) and with that of the start before (warm). One start each; model files are in the system's memory.

Points are measured in their order while there is time for a whole one (`budget_s`); what was left out says so.
large_models_1_7b is the same with Qwen3-1.7B, over 10 million items alone.

    python -m benchmarks.large_models [--quick]          12 GiB of memory, 20 minutes; --quick: a tiny one, no claims
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import first_answer, harness, large_models_world
from benchmarks.h200_serving import TINY
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.large_models_world import Asked, Int32, Server, draw_codes, export, folder_bytes, save
from jgr.models import shapes
from jgr.models.decoder import DecoderConfig
from jgr.models.shapes import LEVELS

THREADS = 2
GIB = 1 << 30
FILTERS = ("none", "exclude", "segment")


class Point(NamedTuple):
    """tokens: of the prompt's shape. width: beams. small: whether the small catalog is asked too, without a filter."""

    tokens: int
    width: int
    filters: tuple[str, ...] = FILTERS
    small: bool = False


@dataclass(frozen=True)
class Setting:
    """What is measured. points: in the order of importance. items: of both catalogs. in_flight: requests at once, for
    memory. budget_s: of all of it. never: points that no run has, and why."""

    model: str
    cfg: DecoderConfig
    points: tuple[Point, ...]
    items: tuple[int, int] = (12_000, 10_000_000)
    level_size: int = shapes.LEVEL_SIZE
    first_token: int = shapes.QWEN3_FIRST
    top_k: int = 32
    excluded: int = 1000
    in_flight: tuple[int, ...] = (1, 2, 4, 8)
    rounds: int = 15
    budget_s: float = 1150.0
    never: tuple[Row, ...] = ()


def _shape(name: str) -> DecoderConfig:
    cfg = shapes.named(name)
    assert isinstance(cfg, DecoderConfig)
    return cfg


SETTINGS: Mapping[str, Setting] = {
    "large_models": Setting(
        "qwen3-0.6b",
        _shape("qwen3-0.6b"),
        (
            Point(512, 32, small=True),
            Point(1024, 128, ("none", "segment"), small=True),
            Point(512, 128, ("none", "exclude"), small=True),
        ),
    ),
    "large_models_1_7b": Setting(
        "qwen3-1.7b",
        _shape("qwen3-1.7b"),
        (Point(512, 32, ("none", "segment")), Point(512, 128, ("none",))),
        in_flight=(1, 8),
        never=(
            {
                "model": "qwen3-1.7b",
                "prompt_tokens": 1024,
                "left_out": "its shapes alone would take minutes of each start; the 0.6B is measured with them",
            },
        ),
    ),
}
QUICK = Setting(
    "tiny", TINY, (Point(24, 16, small=True), Point(48, 32, ("none",))),
    items=(300, 3000), level_size=64, first_token=300, top_k=16, excluded=20, in_flight=(1, 4), rounds=2,
    budget_s=300.0,
)  # fmt: skip


class World:
    """The catalogs on disk, the histories, and the time that is left."""

    def __init__(self, made: Path, setting: Setting) -> None:
        self.made, self.setting = made, setting
        self._begun = time.monotonic()
        small, large = setting.items
        self.digits = len(str(large - 1))
        codes = draw_codes(large, setting.level_size)
        for items in setting.items:
            save(self.catalog(items), codes[:items], self.digits, setting.level_size, setting.first_token)
        rng = np.random.default_rng(1)
        self.excluded = frozenset(rng.choice(small, setting.excluded, replace=False).tolist())
        self._rng = rng

    def catalog(self, items: int) -> Path:
        return self.made / f"{items}.catalog"

    def history(self, tokens: int) -> Int32:
        """Items that fill a prompt, all of them in both catalogs."""
        return self._rng.integers(0, self.setting.items[0], tokens // LEVELS, np.int32)

    def asked(self, point: Point, filter: str) -> Asked:
        excluded = self.excluded if filter == "exclude" else frozenset()
        return Asked(point.tokens, point.width, self.setting.top_k, filter, excluded)

    def left_s(self) -> float:
        return self.setting.budget_s - (time.monotonic() - self._begun)

    def serve(self, items: int, points: Sequence[Point], cache: Path) -> Server:
        def listed(sizes: set[int]) -> str:
            return ",".join(map(str, sorted(sizes)))

        tokens, widths = {point.tokens for point in points}, {point.width for point in points}
        settings = (
            f"catalog.path={self.catalog(items)}",
            f"model.compilation_cache={cache}",
            "prompt.template={history}",
            f"prompt.max_items={max(tokens) // LEVELS}",
            "profiles.batch=1",
            f"profiles.tokens={listed(tokens)}",
            f"profiles.widths={listed(widths)}",
            f"profiles.candidates={self.setting.top_k}",
            f"beam.width={min(widths)}",
        )
        folder = self.made / self.setting.model
        return Server([str(folder), *(f"--set={setting}" for setting in settings)], items, self.digits)


def measure(setting: Setting, quick: bool, quiet: Quiet) -> Measured:
    setting = QUICK if quick else setting
    with tempfile.TemporaryDirectory(prefix="jgr-large-models-") as made:
        harness.note("writing the catalogs and the model")
        world = World(Path(made), setting)
        export(world.made / setting.model, setting.cfg)
        with Server(["--null"], 0, world.digits) as null:
            bare = null.warm.pss
        rows = [*measure_model(world, bare, quiet), *setting.never]
    return Measured([] if quick else claims(rows), rows)


def measure_model(world: World, bare: int, quiet: Quiet) -> Iterator[Row]:
    """All rows. bare: bytes of a server without a model."""
    setting = world.setting
    small, large = setting.items
    cache = world.made / "cache"
    quiet.wait()
    with world.serve(large, setting.points, cache) as server:
        yield first_answer_row(world, server, "cold")
    quiet.wait()
    with world.serve(large, setting.points, cache) as server:
        yield (first := first_answer_row(world, server, "warm"))
        yield memory_row(world, server, bare)
        yield from in_flight_rows(world, server)
        point = setting.points[0]
        asked, history = world.asked(point, "none"), world.history(point.tokens)
        difference = server.difference_from_rank(asked, history)
        server.ask_without_best(asked, history)
        yield {"model": setting.model, "score_difference_from_rank": harness.rounded(difference, 2)}
        shared = [point for point in setting.points if point.small]
        if not shared:
            yield from point_rows(world, {large: server}, first, quiet)
            return
        with world.serve(small, shared, world.made / "small-cache") as other:
            yield from point_rows(world, {small: other, large: server}, first, quiet)


def first_answer_row(world: World, server: Server, temperature: str) -> Row:
    point = world.setting.points[0]
    ms = server.ask(world.asked(point, "none"), world.history(point.tokens))
    answered_s = server.ready_s + ms / 1e3
    return {
        "model": world.setting.model,
        "start": temperature,
        "kernels": server.kernels,
        "weights": "random",
        "shapes": [f"{one.tokens} tokens, {one.width} beams" for one in world.setting.points],
        "loaded_s": harness.rounded(server.loaded_s),
        "ready_s": harness.rounded(server.ready_s),
        "first_answer_s": harness.rounded(answered_s),
        "first_answer_ms": harness.rounded(ms),
    }


def memory_row(world: World, server: Server, bare: int) -> Row:
    """Bytes of a server that is ready, and what explains them. bare: of a server without a model."""
    parts, files = server.parts(), folder_bytes(world.catalog(server.items))
    needed = parts["weights"] + parts["catalog"]
    unexplained = server.warm.pss - sum(parts.values()) - files - bare
    return {
        "model": world.setting.model,
        "memory_of_items": server.items,
        "loaded": None if server.loaded is None else server.loaded._asdict(),
        "ready": server.warm._asdict(),
        "peak_rss": server.peak,
        "parts": parts,
        "catalog_files": files,
        "server_without_a_model": bare,
        "unexplained": unexplained,
        "unexplained_share_of_weights_and_catalog": harness.rounded(unexplained / needed, 3),
    }


def in_flight_rows(world: World, server: Server) -> Iterator[Row]:
    point = world.setting.points[0]
    asked, needed = world.asked(point, "none"), server.parts()
    for count in world.setting.in_flight:
        grown = server.growth(asked, [world.history(point.tokens) for _ in range(count)])
        share = grown / (needed["weights"] + needed["catalog"])
        yield {
            "model": world.setting.model,
            "in_flight": count,
            "prompt_tokens": point.tokens,
            "beam_width": point.width,
            "growth_bytes": grown,
            "growth_share_of_weights_and_catalog": harness.rounded(share, 3),
        }


def point_rows(world: World, servers: Mapping[int, Server], first: Row, quiet: Quiet) -> Iterator[Row]:
    """The rows of a model's points, as many as there is time for."""
    for point in world.setting.points:
        asked = {(max(servers), filter): world.asked(point, filter) for filter in point.filters}
        if point.small:
            asked[min(servers), "none"] = world.asked(point, "none")
        work, first_work = (one.tokens + (LEVELS - 1) * one.width for one in (point, world.setting.points[0]))
        wanted_s = (
            first["first_answer_ms"] / 1e3 * work / first_work * len(asked) * (world.setting.rounds + 1)
        )
        about = {"model": world.setting.model, "prompt_tokens": point.tokens, "beam_width": point.width}
        if wanted_s > world.left_s():
            left_s = max(0, round(world.left_s()))
            yield {**about, "left_out": f"about {wanted_s:.0f} s were needed, {left_s} s were left"}
            continue
        histories = [world.history(point.tokens) for _ in range(10 * world.setting.rounds + 1)]
        runs = {
            f"{items} {filter}": functools.partial(servers[items].ask, one)
            for (items, filter), one in asked.items()
        }
        times = harness.interleave(_in_turns(runs, histories), world.setting.rounds, quiet)
        for items, filter in asked:
            yield {
                **about,
                "items": items,
                "filter": filter,
                "time_ms": harness.spread(times[f"{items} {filter}"]),
                **_over(times, f"{items} {filter}", f"{min(servers)} {filter}", "over_small_catalog"),
                **_over(times, f"{items} {filter}", f"{items} none", "over_no_filter"),
            }


def _in_turns(
    runs: Mapping[str, Callable[[Int32], float]], histories: Sequence[Int32]
) -> dict[str, Callable[[], float]]:
    """Each variant asks for the histories in their order, so that all of a round ask for the same one."""

    def one(run: Callable[[Int32], float]) -> Callable[[], float]:
        left = iter(histories)
        return lambda: run(next(left))

    return {name: one(run) for name, run in runs.items()}


def _over(times: Mapping[str, Sequence[float]], name: str, base: str, field: str) -> Row:
    if name == base or base not in times:
        return {}
    ratios = np.array(times[name]) / np.array(times[base])
    low, high = harness.interval_of_median(ratios)
    return {field: {"median": harness.rounded(float(np.median(ratios))), "interval": [low, high]}}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """A claim for each ratio, memory and start of the rows; what was left out has none."""
    found = []
    for row in rows:
        name, point = row.get("model"), f"{row.get('prompt_tokens')}-tokens-{row.get('beam_width')}-beams"
        if "over_small_catalog" in row and row["filter"] == "none":
            found.append(_ratio(f"large-catalog-over-small-{name}-{point}", row["over_small_catalog"]))
        if "over_no_filter" in row and row["items"] > 1_000_000:
            found.append(_ratio(f"filter-{row['filter']}-over-none-{name}-{point}", row["over_no_filter"]))
        if "unexplained" in row:
            share = row["unexplained_share_of_weights_and_catalog"]
            found.append(Claim(f"unexplained-memory-share-{name}", share, "", "lower", 0.1))
            peak = harness.rounded(row["peak_rss"] / GIB)
            found.append(Claim(f"peak-memory-{name}", peak, "GiB", "lower", 16.0))
        if row.get("in_flight") == 8:
            share = row["growth_share_of_weights_and_catalog"]
            found.append(Claim(f"memory-growth-share-8-in-flight-{name}", share, "", "lower", 0.1))
        if "start" in row:
            target = 30.0 if row["start"] == "warm" else 120.0
            id = f"first-answer-large-model-{row['start']}-{name}"
            found.append(Claim(id, row["first_answer_s"], "s", "lower", target))
        if "score_difference_from_rank" in row:
            id = f"large-model-score-difference-from-rank-{name}"
            found.append(Claim(id, row["score_difference_from_rank"], "", "lower", 1e-3))
    left_out = sum("left_out" in row for row in rows)
    return [*found, Claim("large-model-points-left-out", left_out, "", "lower", 0)]


def _ratio(id: str, over: Row) -> Claim:
    low, high = over["interval"]
    return Claim(id, over["median"], "x", "lower", 1.1, interval=(low, high))


def main(name: str) -> None:
    # Servers inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name=name,
            measure=functools.partial(measure, SETTINGS[name]),
            packages=("jax", "jaxlib", "numpy", "safetensors", "uvicorn"),
            sources=(Path(__file__), Path(large_models_world.__file__), Path(first_answer.__file__)),
        )
    )


if __name__ == "__main__":
    main("large_models")
