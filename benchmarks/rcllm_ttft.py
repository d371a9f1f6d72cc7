# SPDX-License-Identifier: Apache-2.0
"""Reuse beyond the prefix: the time until the candidates are scored, for every method of the family on one engine.

A prompt is a history of 6 items in words, 20 candidates and a question; users are new, so that a prefix cache has
nothing, and all items are in the cache, as after a long run (their pages hold zeros, for times do not depend on them).
full computes prompts whole; prefix too, but with the cache in place; naive, EPIC, CacheBlend and RcLLM are settings of
one path (docs/cache.md, Blocks). Weights are random. Systems take turns, each with its next requests, one request at a
time; shares of RcLLM are asked of one engine, which sees no request twice.

The floor is what a method can gain where time is work: the token-layers of its plan over those of the whole prompt. The
layers are wide and their heads narrow, so that besides attention a token costs about twelve times what its attention to
1,000 others costs; in Qwen3-0.6B it is seven times. The model of 28 layers is as deep as that one and far narrower,
so that this benchmark ends within half an hour on two cores. An answer with all tokens computed anew must be the whole
prompt's.

RcLLM is two programs: one that chooses, from the first layer's queries and keys, and reads no blocks, and one for the
rest. choose_ms is the first alone. "from the host" is RcLLM with a device cache for little more than one request, so
that most blocks travel from host memory, while tokens are chosen: copies_ms is what dispatching these copies took, and
its time over that with all blocks on the device what is left exposed of them (RCLLM-13).

Programs are kept in runs/xla_rcllm: sizes that a first call has no time for are measured by a second one.

Under load, requests come at random times, at half and at four fifths of what the prefix cache can serve.

    python -m benchmarks.rcllm_ttft [--quick]
"""

from __future__ import annotations

import asyncio
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness
from benchmarks.bat_world import WORDS, event_loop, write_model
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.catalog.catalog import Catalog
from jgr.config import Config, TrainConfig, override
from jgr.serving.api import Answer, RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies.jobs import Job

ITEMS = 120
HISTORY, CANDIDATES = 6, 20
SHARES = (0.1, 0.3, 0.5, 1.0)
AT, PREFIX, HOSTED = "rcllm .3", "prefix", "rcllm .3 from the host"
PER_TURN = 2
"""Requests that a system serves in its turn."""
OF_FLOOR = 0.8
"""What is wanted of the gain that the floor allows."""
LOADS = (0.5, 0.8)
UNDER_LOAD = 30
"""Requests of a system at a rate."""
WIDE = TrainConfig(hidden=384, heads=4, kv_heads=2, head_dim=32, mlp=1280)
NARROW = TrainConfig(hidden=192, heads=2, kv_heads=1, head_dim=32, mlp=640)


class Size(NamedTuple):
    """A model and its prompts. span: tokens of an item. rounds: turns of each system. hosted: whether blocks are read
    from the host too."""

    model: TrainConfig
    layers: int
    span: int
    rounds: int
    hosted: bool = False


SIZES = (
    Size(WIDE, 4, 78, 5, True),
    Size(WIDE, 4, 39, 5),
    Size(NARROW, 28, 78, 4),
    Size(WIDE, 8, 78, 5, True),
    Size(WIDE, 4, 157, 4),
    Size(WIDE, 8, 39, 5),
    Size(NARROW, 28, 39, 5),
    Size(NARROW, 28, 157, 3),
    Size(WIDE, 8, 157, 3),
)
"""In the order of what they tell; the first one is measured under load."""
LAST_BEGIN_S = 1200
"""Sizes that would begin later than so many seconds after the start are left out; a row says which."""


class Method(NamedTuple):
    """A server of the family. settings: of its engine. budgets: its systems, by name, each with the share of the
    candidates' tokens that its requests ask for; None: what the engine is set to. sizes: the tokens that it computes
    for a prompt of each. repaired: the most item tokens that are computed anew."""

    settings: tuple[str, ...]
    budgets: dict[str, float | None]
    sizes: tuple[int, ...]
    repaired: int
    hosted: bool = False


def methods(span: int, hosted: bool = False) -> dict[str, Method]:
    """By name. span: tokens of an item. hosted: with the one that reads blocks from the host."""
    blocks = ("cache.policy=blocks",)
    own, items = HISTORY * span + 2, CANDIDATES * span

    def chosen(share: float, ends: int) -> int:
        return min(items, CANDIDATES * ends + math.ceil(share * items))

    def name(share: float) -> str:
        return f"rcllm {share:g}".replace(" 0.", " .")

    epic = 2 * CANDIDATES
    anew = [chosen(share, 2) for share in SHARES]
    ends = "cache.repair_tokens=1", "cache.repair_last_tokens=1"
    attention = (*ends, "cache.repair_by=attention", "cache.repair_share=0.3")
    at = chosen(0.3, 2)
    last = {"hosted": Method((*blocks, *attention), {HOSTED: 0.3}, (own + at,), at, True)}
    return {
        "full": Method(("cache.policy=none",), {"full": None}, (own + items,), 0),
        "prefix": Method((*blocks, f"cache.repair_tokens={span}"), {PREFIX: None}, (own + items,), items),
        "naive": Method(blocks, {"naive": None}, (own,), 0),
        "epic": Method((*blocks, "cache.repair_tokens=2"), {"epic 2": None}, (own + epic,), epic),
        "cacheblend": Method(
            (*blocks, "cache.repair_share=0.3"),
            {"cacheblend .3": None},
            (own + chosen(0.3, 0),),
            chosen(0.3, 0),
        ),
        "rcllm": Method(
            (*blocks, *attention),
            {name(share): share for share in SHARES},
            tuple(own + tokens for tokens in anew),
            max(anew),
        ),
        **(last if hosted else {}),
    }


class World:
    """A model and items of `span` tokens each, as a folder."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.layers, self.span = folder, size.layers, size.span
        rng = np.random.default_rng(size.layers)
        titles = [" ".join(f"w{w}" for w in rng.integers(0, WORDS, size.span - 1)) for _ in range(ITEMS)]
        names = [[f"<i_{row}>"] for row in range(ITEMS)]
        catalog = Catalog.build([str(row) for row in range(ITEMS)], names, [{"title": t} for t in titles])
        cfg = write_model(folder, catalog, replace(size.model, layers=size.layers), 8192, 0)
        self.bytes_per_token = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * 4

    @property
    def tokens(self) -> int:
        """The tokens of a prompt."""
        return (HISTORY + CANDIDATES) * self.span + 2

    def config(self, method: Method, cache: str) -> Config:
        most = -(-self.tokens // 128) * 128
        # What is missed is computed twice, and a server takes only what it could serve with nothing cached.
        sizes = sorted({-(-tokens // 32) * 32 for tokens in (*method.sizes, self.tokens + method.repaired)})
        pages_mb = 2 * (ITEMS + 16) * self.span * self.bytes_per_token / 2**20
        device_mb = pages_mb * (2 * (CANDIDATES + HISTORY) / ITEMS if method.hosted else 1)
        return override(
            Config(),
            f"model.path={self.folder}",
            f"model.compilation_cache={cache}",
            "prompt.template=<bos>{history}",
            "prompt.item={title}{sid}",
            f"prompt.max_items={HISTORY}",
            "rank.method=item_token",
            "rank.item={title}{sid}",
            f"rank.item_span={self.span}",
            "rank.requests=1",
            f"rank.tokens={','.join(map(str, sizes))}",
            f"rank.context={most}",
            f"rank.candidates={CANDIDATES}",
            f"batching.max_tokens={sizes[-1]}",
            f"cache.device_mb={device_mb:.1f}",
            f"cache.host_mb={pages_mb if method.hosted else 0:.1f}",
            "cache.item_share=0.9",
            "cache.shadow=0",
            "beam.width=1",
            "profiles.batch=1",
            "profiles.widths=1",
            "profiles.candidates=1",
            f"profiles.tokens={-(-(HISTORY * self.span + 2) // 64) * 64}",
            *method.settings,
        )

    def requests(self, seed: int = 0) -> Iterator[list[str]]:
        """Items of a history and candidates, again and again, drawn anew each time."""
        rng = np.random.default_rng(seed)
        while True:
            yield rng.permutation(ITEMS)[: HISTORY + CANDIDATES].astype(str).tolist()


class Served(NamedTuple):
    """A request: milliseconds until its answer, and that."""

    ms: float
    answer: Answer


class Running:
    """A method's engine, with every item in its cache. It is asked nothing twice: a history would be in the cache."""

    def __init__(
        self,
        world: World,
        method: Method,
        loop: asyncio.AbstractEventLoop,
        cache: str,
    ) -> None:
        self._loop, self._requests = loop, world.requests()
        self.engine = load_engine(world.config(method, cache))
        loop.run_until_complete(self.engine.start())
        rows = [str(row) for row in range(ITEMS)]
        for at in range(0, ITEMS, CANDIDATES):
            self._plan(_request([*rows[:HISTORY], *rows[at : at + CANDIDATES]]))

    def _plan(self, request: RankRequest) -> None:
        """Have the cache as if the request had been served."""
        served = self.engine.served
        if served.caching is None:
            return
        task, grouping = served.translator.prepare(request), served.caching.groupings["rank"]
        job = Job(0, "rank", task.tokens, task.width, time.monotonic_ns(), None, task.prompt)
        group = grouping.group([job], True, time.monotonic_ns())
        assert group is not None
        grouping.finished(group.jobs, True)

    def serve(self, rows: Sequence[str], budget: float | None = None) -> Served:
        return self._loop.run_until_complete(self._serve(rows, budget, time.perf_counter()))

    async def _serve(self, rows: Sequence[str], budget: float | None, due_s: float) -> Served:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        answer = await self.engine.answer(_request(rows, budget))
        return Served((time.perf_counter() - due_s) * 1e3, answer)

    def _paged(self) -> PagedExecutor:
        executors: Any = self.engine.served.executors
        paged: PagedExecutor = executors.paged
        return paged

    def choose_ms(self, rows: Sequence[str], budget: float | None) -> float:
        """The time of the program that chooses tokens, alone."""
        served = self.engine.served
        paged, caching = self._paged(), served.caching
        assert caching is not None
        task, grouping = served.translator.prepare(_request(rows, budget)), caching.groupings["rank"]
        job = Job(0, "rank", task.tokens, task.width, time.monotonic_ns(), None, task.prompt)
        group = grouping.group([job], True, time.monotonic_ns())
        assert group is not None and isinstance(task.work, SegmentsWork)
        staged = paged._staged[group.profile].stage()
        paged._pack(staged.arrays, group.profile, [replace(task.work, plan=group.prompts[0])])
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            jax.block_until_ready(staged.run(paged._deciding[group.profile], paged._params))
            times.append(time.perf_counter() - begin)
        staged.give_back()
        grouping.finished(group.jobs, True)
        return float(np.median(times)) * 1e3

    def watch_copies(self) -> list[float]:
        """Takes the milliseconds that the copies of each batch from now on take to be dispatched."""
        paged, found = self._paged(), list[float]()
        catch_up = paged.catch_up

        def timed() -> None:
            begin = time.perf_counter()
            catch_up()
            found.append((time.perf_counter() - begin) * 1e3)

        setattr(paged, "catch_up", timed)  # noqa: B010
        return found

    def turn(self, budget: float | None) -> list[Served]:
        """The next requests."""
        return [self.serve(rows, budget) for rows in itertools.islice(self._requests, PER_TURN)]

    def at_rate(self, per_second: float, budget: float | None) -> list[Served]:
        """Requests at random times; each one's time counts from when it was due."""
        due = np.cumsum(np.random.default_rng(0).exponential(1 / per_second, UNDER_LOAD))

        async def all_of_them() -> list[Served]:
            start_s = time.perf_counter()
            several = zip(self._requests, due.tolist(), strict=False)
            return list(
                await asyncio.gather(*(self._serve(rows, budget, start_s + s) for rows, s in several))
            )

        return self._loop.run_until_complete(all_of_them())

    def stop(self) -> None:
        self._loop.run_until_complete(self.engine.drain(None))


def _request(rows: Sequence[str], budget: float | None = None) -> RankRequest:
    given: Any = {} if budget is None else {"reuse_budget": budget}
    return RankRequest(
        history=list(rows[:HISTORY]), candidates=list(rows[HISTORY:]), layout="causal", **given
    )


def floor(name: str, layers: int, answer: Answer) -> float:
    """How much faster the method would be if time were token-layers."""
    whole, computed = answer.usage.prompt_tokens, answer.usage.computed_tokens
    first = whole if name.startswith("cacheblend") else computed
    return layers * whole / (first + (layers - 1) * computed)


def scores(answer: Answer) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a score."""
    mine, its = scores(one), scores(other)
    return max(abs(mine[item] - its[item]) for item in its)


def measure(quick: bool, quiet: Quiet) -> Measured:
    sizes: Sequence[Size] = (Size(WIDE, 4, 16, 2),) if quick else SIZES
    rows: list[Row] = []
    loaded: list[Row] = []
    start_s, cache = time.perf_counter(), str(harness.ROOT / "runs" / "xla_rcllm")
    with tempfile.TemporaryDirectory(prefix="jgr-rcllm-") as folder, event_loop() as loop:
        for at, size in enumerate(sizes):
            if time.perf_counter() - start_s > LAST_BEGIN_S:
                rows.append(
                    {"left_out": [f"{x.layers} layers, {x.span * 26 + 2} tokens" for x in sizes[at:]]}
                )
                break
            world = World(Path(folder) / str(at), size)
            running = {
                name: Running(world, method, loop, cache)
                for name, method in methods(size.span, size.hosted).items()
            }
            copies = running["hosted"].watch_copies() if size.hosted else []
            systems = {
                system: (running[name], budget)
                for name, method in methods(size.span, size.hosted).items()
                for system, budget in method.budgets.items()
            }
            turns = {name: partial(each.turn, budget) for name, (each, budget) in systems.items()}
            found = harness.interleave(turns, size.rounds, quiet)
            unasked, another = itertools.islice(world.requests(seed=1), 2)
            whole = running["full"].serve(unasked).answer
            anew = running["rcllm"].serve(unasked, 1.0).answer
            rows += [
                row(name, size, [one for turn in served for one in turn], found["full"])
                for name, served in found.items()
            ]
            row_of(rows, AT, size)["choose_ms"] = rounded(running["rcllm"].choose_ms(another, 0.3))
            if copies:
                hosted, on_device = row_of(rows, HOSTED, size), row_of(rows, AT, size)
                hosted["copies_ms"] = rounded(float(np.median(copies)))
                hosted["exposed_ms"] = rounded(hosted["ms"]["median"] - on_device["ms"]["median"])
            rows[-1]["whole_when_all_is_computed"] = rounded(difference(anew, whole))
            if not loaded and not quick:
                loaded = under_load(systems, found[PREFIX], size.layers, quiet)
            for each in running.values():
                each.stop()
    return Measured(claims(rows, loaded), [*rows, *loaded])


def under_load(
    systems: Mapping[str, tuple[Running, float | None]],
    prefix: Sequence[Sequence[Served]],
    layers: int,
    quiet: Quiet,
) -> list[Row]:
    """The time of the answers at shares of what the prefix cache can serve, one request at a time."""
    capacity = 1e3 / float(np.median([one.ms for turn in prefix for one in turn]))
    rows: list[Row] = []
    for share in LOADS:
        at = {
            name: partial(systems[name][0].at_rate, share * capacity, systems[name][1])
            for name in (PREFIX, AT)
        }
        quiet.wait()
        for name, run in at.items():
            ms = [one.ms for one in run()]
            p50, p99 = (rounded(float(x)) for x in np.percentile(ms, (50, 99)))
            rows.append(
                {
                    "method": name,
                    "layers": layers,
                    "of_prefix_capacity": share,
                    "requests_per_s": rounded(share * capacity),
                    "p50_ms": p50,
                    "p99_ms": p99,
                    "requests": len(ms),
                }
            )
    return rows


def row(name: str, size: Size, served: Sequence[Served], full: Sequence[Sequence[Served]]) -> Row:
    whole = [one for turn in full for one in turn]
    answer, ms = served[-1].answer, [one.ms for one in served]
    ratios = [a.ms / b.ms for a, b in zip(whole, served, strict=True)]
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, 1), (2.5, 97.5))
    timing = answer.timing_ms
    return {
        "method": name,
        "layers": size.layers,
        "hidden": size.model.hidden,
        "prompt_tokens": answer.usage.prompt_tokens,
        "computed_tokens": answer.usage.computed_tokens,
        "ms": harness.spread(ms),
        "device_ms": rounded(timing.device),
        "queue_and_prepare_ms": rounded(timing.queue + timing.prepare),
        "faster_than_full": rounded(float(np.median(ratios))),
        "interval": [rounded(float(low)), rounded(float(high))],
        "floor_allows": rounded(floor(name, size.layers, answer)),
    }


def row_of(rows: Sequence[Row], method: str, size: Size) -> Row:
    """The last one."""
    return next(
        row for row in reversed(rows) if (row.get("method"), row.get("layers")) == (method, size.layers)
    )


def claims(rows: Sequence[Row], loaded: Sequence[Row]) -> list[Claim]:
    found = []
    for each in rows:
        if each.get("method") != AT:
            continue
        low, high = each["interval"]
        share = each["floor_allows"]
        found.append(
            Claim(
                f"rcllm-of-what-its-plan-allows-{each['layers']}-layers-{each['prompt_tokens']}-tokens",
                rounded(each["faster_than_full"] / share),
                "",
                "higher",
                OF_FLOOR,
                interval=(rounded(low / share), rounded(high / share)),
            )
        )
    for share in LOADS if loaded else ():
        prefix, chosen = (each["p99_ms"] for each in loaded if each["of_prefix_capacity"] == share)
        name = f"rcllm-p99-faster-at-{round(10 * share)}-of-prefix-capacity"
        found.append(Claim(name, rounded(prefix / chosen), "x", "higher", 2.0))
    whole = max(each["whole_when_all_is_computed"] for each in rows if "whole_when_all_is_computed" in each)
    found.append(Claim("rcllm-with-all-computed-anew-from-the-whole-prompt", whole, "", "lower", 1e-3))
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="rcllm_ttft",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
            device=jax.default_backend(),
        )
    )
