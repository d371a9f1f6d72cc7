# SPDX-License-Identifier: Apache-2.0
"""Kept keys and values in 8 bits (cache.quantize) beside float32: answers, memory, time, and reuse on a real trace.

Quality: the generator of configs/industrial.py, trained, over all test targets by the engine that serves, with a cache
(cache.policy=user). Each history is asked for twice in a row, so that the second answer reads all of the prompt but its
last token from the pool, which is checked; the first reads nothing kept. runs/industrial is used as it is, or trained
where it is not.

Time: `recommend` over HTTP as in benchmarks.cached_recommend, of three models in one server that differ in
cache.quantize alone, all of a request's tokens but one cached, in turns.

Reuse at equal memory: the users of KuaiRand-Pure in the order and at the times of their events, each of which is a
request with a history of HISTORY videos at most, planned by the policy that serves (`user`) over pools of the same
bytes; a twentieth of what all users' histories take in float32. Keys and values of Qwen3-0.6B; nothing is computed, for
the plan says what is read and what is computed.

    JGR_DATA=FOLDER python -m benchmarks.quantized_kv [--quick]

FOLDER holds amazon-industrial-minionerec and kuairand-pure.
"""

from __future__ import annotations

import asyncio
import csv
import functools
import gzip
import http.client
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from benchmarks import cached_recommend, harness, quantized_weights
from benchmarks.cached_recommend import ask
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from benchmarks.quality_industrial import INDUSTRIAL
from benchmarks.quantized_weights import overlap
from jgr.cache.entries import Content
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages
from jgr.config import CacheConfig, Config, override
from jgr.data.datasets import load_dataset
from jgr.data.interactions import Examples
from jgr.evaluation.bootstrap import interval, resampled_means
from jgr.evaluation.metrics import Hits, per_query
from jgr.evaluation.served import Query, rows_of
from jgr.models import shapes
from jgr.models.decoder import DecoderConfig
from jgr.models.quantize import Quantization
from jgr.models.words import WORD
from jgr.prompt.segments import make_prompt
from jgr.serving.api import RecommendRequest
from jgr.serving.decoders.caching import kv_cells, kv_room
from jgr.serving.decoders.loading import load_engine
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import UnplannedPrompt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]

KINDS: Mapping[str, Quantization] = {"float32": "", "int8": "int8", "fp8": "fp8"}
TOP_K, IN_FLIGHT, RESAMPLES = 10, 32, 5000
METRIC = "ndcg@10"
SERVED = (
    "cache.policy=user",
    "cache.shadow=0",
    "cache.device_mb=64",
    "server.explain=false",
    "profiles.batch=16",
    "rank.tokens=512",
    "rank.context=512",
)
"""A batch has 16 prompts of at most 31 tokens, all of which may be new, or cached."""
CACHED = (513,)
"""Cached tokens of the requests that are timed."""
USERS, HISTORY, STRIDE = 2_000, 100, 50
"""Of the trace: users, drawn from all; the most videos of a history, which is cut at multiples of STRIDE."""
VIDEO_TOKENS, PAGE_BYTES = 3, 2 << 20
POOL_SHARE = 0.05
# What is asked of each kind: the least share of common items, of NDCG, and the most of float32's bytes and times.
OVERLAP = {"int8": 0.95, "fp8": 0.85}
FIRST, NDCG, BYTES, TIME, REUSED = 0.999, 0.99, 0.3, 1.05, 1.0


# ---- quality -----------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """What was answered for every history when it came first, and when it came again: [2, n, 10]; how many tokens were
    cached, of how many: [2, n] each; the bytes that a token takes in the pool."""

    ranked: Int32
    cached: Int32
    prompt: Int32
    token_bytes: float


def answers(config: Config, kind: Quantization, few: int | None) -> tuple[Answers, Int32]:
    """The answers, and the targets [n]."""
    dataset = load_dataset(config.data)
    examples = dataset.interactions.test if few is None else dataset.interactions.test.select(slice(few))
    engine = load_engine(override(config, *SERVED, f"cache.quantize={kind}"), kinds=("recommend",))
    found = asyncio.run(_asked(engine, examples, config.server.drain_timeout_s))
    engine.join(config.server.drain_timeout_s)
    return found, examples.targets


async def _asked(engine: Any, examples: Examples, drain_s: float) -> Answers:
    count, query = len(examples), Query(TOP_K, exclude_history=INDUSTRIAL.exclude_history)
    ranked = np.full((2, count, TOP_K), -1, np.int32)
    cached, prompt = np.zeros((2, 2, count), np.int32)
    todo = iter(range(count))

    async def worker() -> None:
        for i in todo:
            for time in range(2):
                fields = query.of(engine.catalog, engine.info, examples, i)
                answer = await engine.answer(RecommendRequest(**fields, user_id=f"u{i}"))
                rows = rows_of(engine.catalog, [item.item_id for item in answer.items])
                ranked[time, i, : len(rows)] = rows
                cached[time, i] = answer.usage.cached_tokens
                prompt[time, i] = answer.usage.prompt_tokens

    await engine.start(lambda done, total, label: None)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(worker())
        kv = engine.served.caching.kv
    finally:
        await engine.drain(drain_s)
    return Answers(ranked, cached, prompt, kv.cells.words * kv.parts * WORD / kv.tokens)


def quality_rows(few: int | None) -> list[Row]:
    config, rows = quantized_weights.trained(), list[Row]()
    plain: Answers | None = None
    of_plain = np.zeros(0)
    for name, kind in KINDS.items():
        found, targets = answers(config, kind, few)
        if found.cached[0].any() or (found.cached[1] != found.prompt[1] - 1).any():
            raise AssertionError("a first answer read the cache, or a second one did not")
        ndcg = [per_query(Hits.of_targets(ranked, targets), [METRIC])[METRIC] for ranked in found.ranked]
        if plain is None:
            plain, of_plain = found, ndcg[1]
        rows.append(
            {
                "quality": name,
                "examples": len(targets),
                "cached_tokens": int(found.cached.sum()),
                "first_overlap@10": rounded(overlap(plain.ranked[0], found.ranked[0])),
                "overlap@10": rounded(overlap(plain.ranked[1], found.ranked[1])),
                "same_first_item": rounded(float((plain.ranked[1, :, 0] == found.ranked[1, :, 0]).mean())),
                METRIC: rounded(float(ndcg[1].mean())),
                "ndcg_ratio": ratio(ndcg[1], of_plain),
                "token_bytes": found.token_bytes,
            }
        )
    return rows


def ratio(one: Float64, other: Float64) -> list[float]:
    """The mean of one over that of the other, and the ends of its 95 % interval, paired by query."""
    means = resampled_means(np.stack([one, other], 1), RESAMPLES, seed=0)
    low, high = interval((means[:, 0] / means[:, 1])[:, None])
    return [rounded(float(x)) for x in (one.mean() / other.mean(), low[0], high[0])]


# ---- time --------------------------------------------------------------------------------------------------------


def time_rows(rounds: int, quiet: Quiet) -> list[Row]:
    rows: list[Row] = []
    settings = "cache.policy=user", "profiles.tokens=1024"
    models = {name: (*settings, f"cache.quantize={kind}") for name, kind in KINDS.items()}
    with tempfile.TemporaryDirectory() as folder:
        cached_recommend.write_model(Path(folder) / "model")
        with cached_recommend.serving(Path(folder) / "model", models) as (address, _):
            connection = http.client.HTTPConnection(address, timeout=cached_recommend.PATIENCE_S)
            for tokens in CACHED:
                for name in models:
                    usage = [ask(connection, name, tokens) for _ in range(2)][-1]["usage"]
                    assert (usage["cached_tokens"], usage["computed_tokens"]) == (tokens, 1), usage
                variants: dict[str, Callable[[], float]] = {
                    name: functools.partial(cached_recommend.milliseconds, connection, name, tokens)
                    for name in models
                }
                found = harness.interleave(variants, rounds, quiet)
                rows += [
                    {
                        "model": name,
                        "cached_tokens": tokens,
                        "ms": harness.spread(found[name]),
                        "all_ms": found[name],
                    }
                    for name in models
                ]
            connection.close()
    return rows


# ---- reuse at equal memory ---------------------------------------------------------------------------------------


def visits() -> tuple[Int32, Int32, Float64]:
    """Users, videos and times in s of KuaiRand-Pure's events in order, of USERS users drawn at random."""
    root = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data")
    path = root / "kuairand-pure" / "events_20220425_20220508.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            lines = [(int(x["user_id"]), int(x["video_id"]), int(x["time_ms"])) for x in csv.DictReader(file)]
    except OSError as error:
        raise Missing(f"{path}: {error.strerror or error}") from None
    table = np.unique(np.array(lines, np.int64), axis=0)
    every = np.unique(table[:, 0])
    chosen = np.random.default_rng(0).choice(every, min(USERS, len(every)), replace=False)
    table = table[np.isin(table[:, 0], chosen)]
    table = table[np.argsort(table[:, 2], kind="stable")]
    return table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), table[:, 2] / 1e3


def reuse_rows(few: int | None) -> list[Row]:
    users, videos, times = visits()
    users, videos, times = users[:few], videos[:few], times[:few]
    cfg = shapes.named("qwen3-0.6b")
    assert isinstance(cfg, DecoderConfig)
    held = np.minimum(np.unique(users, return_counts=True)[1], HISTORY).sum() * VIDEO_TOKENS
    token_bytes = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * 4
    pages = max(1, int(POOL_SHARE * held * token_bytes / PAGE_BYTES))
    rows: list[Row] = []
    for name in ("float32", "int8"):
        kv = kv_cells(CacheConfig(quantize=KINDS[name]), cfg, "float32", 4, PAGE_BYTES)
        meta = CacheMeta(Pages(pages, PAGE_BYTES), {"user": kv_room(kv), "item": kv_room(kv)})
        meta.set_limit("item", 0)
        reused, computed = replay(meta, users, videos, times)
        share = rounded(reused / (reused + computed))
        tokens = pages * kv.slots // kv.parts
        rows.append({"trace": name, "requests": len(users), "pool_tokens": tokens, "reused": share})
    return rows


def replay(meta: CacheMeta, users: Int32, videos: Int32, times: Float64) -> tuple[int, int]:
    """Tokens that were read from the cache, and that were computed, of requests that come one after the other."""
    most = HISTORY * VIDEO_TOKENS + 1
    profile = Profile("recommend", 1, most, 1, packed=True, context=most)
    scheduler = PromptScheduler([profile], meta, max_tokens=most, policy="user")
    seen: dict[int, list[int]] = {}
    end, reused, computed = np.zeros(1, np.int32), 0, 0
    for number, (user, video, at) in enumerate(zip(users.tolist(), videos.tolist(), times, strict=True)):
        history = seen.setdefault(user, [])
        history += [3 * video + level for level in range(VIDEO_TOKENS)]
        beyond = max(0, len(history) // VIDEO_TOKENS - HISTORY)
        tokens = np.array(history[-(-beyond // STRIDE) * STRIDE * VIDEO_TOKENS :], np.int32)
        prompt = make_prompt(Content.of(tokens), end, [], None, key=str(user), room=0)
        unplanned = UnplannedPrompt(prompt, "user_prefix")
        job = Job(number, "recommend", len(tokens) + 1, 1, round(at * 1e9), None, unplanned)
        group = scheduler.group([job], True, round(at * 1e9))
        assert group is not None
        scheduler.finished(group.jobs, True)
        reused += group.prompts[0].cached_tokens
        computed += group.prompts[0].computed_tokens
    return reused, computed


# ---- all of it ---------------------------------------------------------------------------------------------------


def measure(quick: bool, quiet: Quiet) -> Measured:
    rows = quality_rows(100 if quick else None)
    rows += reuse_rows(2_000 if quick else None)
    rows += time_rows(2 if quick else 9, quiet)
    found = claims(rows)
    for row in rows:
        row.pop("all_ms", None)
    return Measured(found, rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = []
    quality = {row["quality"]: row for row in rows if "quality" in row}
    for kind in ("int8", "fp8"):
        row, end = quality[kind], f"of-kept-{kind}"
        value, *ends = row["ndcg_ratio"]
        share = rounded(row["token_bytes"] / quality["float32"]["token_bytes"], 3)
        found += [
            Claim(f"first-overlap@10-{end}-with-float32", row["first_overlap@10"], "", "higher", FIRST),
            Claim(f"overlap@10-{end}-with-float32", row["overlap@10"], "", "higher", OVERLAP[kind]),
            Claim(f"ndcg@10-{end}-over-float32", value, "x", "higher", NDCG, interval=(ends[0], ends[1])),
            Claim(f"bytes-{end}-over-float32", share, "x", "lower", BYTES),
        ]
    timed = {(row["model"], row["cached_tokens"]): row["all_ms"] for row in rows if "model" in row}
    for kind, tokens in timed:
        if kind != "float32":
            pairs = zip(timed[kind, tokens], timed["float32", tokens], strict=True)
            ratios = [one / other for one, other in pairs]
            value, ends = rounded(float(np.median(ratios)), 3), harness.interval_of_median(ratios)
            name = f"hit-time-of-kept-{kind}-over-float32-{tokens}-tokens"
            found.append(Claim(name, value, "x", "lower", TIME, interval=ends))
    traces = {row["trace"]: row["reused"] for row in rows if "trace" in row}
    more = rounded(traces["int8"] / traces["float32"], 3)
    found.append(Claim("reused-tokens-of-kept-int8-over-float32-kuairand", more, "x", "higher", REUSED))
    return found


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: quantized_weights.THREADS])
    jax.config.update("jax_platforms", "cpu")
    folder = harness.ROOT / "benchmarks"
    harness.main(
        Benchmark(
            name="quantized_kv",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=tuple(
                folder / f"{name}.py" for name in ("quantized_kv", "quantized_weights", "cached_recommend")
            ),
        )
    )
