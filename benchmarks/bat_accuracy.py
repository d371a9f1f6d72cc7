# SPDX-License-Identifier: Apache-2.0
"""What the order of a prompt costs in accuracy: candidates behind the user, or in front (BAT-16, LlamaRec's protocol).

A retriever (LRURec) names 100 candidates for every test user; those whose target is among them are ranked by the
engine that serves, with its cache, once in each layout. Beside a model trained on both layouts stand one trained on
each alone, asked in its own, and the retriever's order; and with the candidates in front, some of their tokens repaired
(BAT-15: docs/cache.md). Users, candidates and items are the same in every row.

    jgr prepare, jgr ids, jgr train, jgr retrieve     where runs/ does not hold what they make
    JGR_DATA=FOLDER python -m benchmarks.bat_accuracy      FOLDER holds ml-1m and amazon-beauty
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import run
from jgr.config import Config, load_config, override
from jgr.data.datasets import Dataset, load_dataset
from jgr.data.interactions import Examples
from jgr.evaluation.bootstrap import interval, resampled_means
from jgr.evaluation.candidates import Candidates, load_candidates
from jgr.evaluation.metrics import Hits, per_query
from jgr.serving.api import RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import Engine
from jgr.serving.policies.prefix_choice import CacheLayout

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

METRICS = ("recall@5", "mrr@5", "ndcg@5", "recall@10", "mrr@10", "ndcg@10")
CONCURRENCY = 32
RESAMPLES = 2000
LAYOUTS: tuple[CacheLayout, CacheLayout] = ("user_prefix", "item_prefix")
REPAIRS = {
    "item_prefix + PIC, first token of each": "cache.repair_tokens=1",
    "item_prefix + PIC, 15 % of the tokens": "cache.repair_share=0.15",
    "item_prefix + PIC, all tokens": "cache.repair_share=1.0",
}
"""Repairs asked of the model trained on both layouts; the last is the causal order, which others approximate."""
MARGIN = 0.01
"""How much recall@10 the item prefix may lose."""


@dataclass(frozen=True)
class Task:
    """A dataset. name: as in configs/{lrurec,items,ranker}_{name}.py. raw: its folder in JGR_DATA. source: its kind."""

    name: str
    raw: str
    source: str


TASKS = (Task("ml1m", "ml-1m", "movielens-1m-sasrec"), Task("beauty", "amazon-beauty", "amazon-beauty"))


def made(task: Task) -> tuple[Config, Mapping[str, str], Path]:
    """The ranker's config, the folders of the models by what they were trained on, and the candidates' file."""
    config = load_config(harness.ROOT / "configs" / f"ranker_{task.name}.py")
    data = config.data.path
    if not (harness.ROOT / data / "catalog.jsonl").exists():
        raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / task.raw
        if not raw.is_dir():
            raise Missing(f"needs the dataset: no {task.raw} in the folder that JGR_DATA names")
        run("prepare", f"--source={task.source}", f"--raw={raw}", f"--out={data}", "--bpe_vocab=2000")
        run("ids", f"--data={data}", "--method=item")
    retriever = (f"--config=configs/lrurec_{task.name}.py", f"--set=data.path={data}")
    if not (harness.ROOT / config.train.retriever).is_dir():
        run("train", *retriever)
    if not (harness.ROOT / config.train.start).is_dir():
        run("train", f"--config=configs/items_{task.name}.py")
    candidates = f"runs/candidates_{task.name}.npz"
    run("retrieve", *retriever, "--split=test", "--exclude_history", f"--out={candidates}")
    out = config.train.out
    models: dict[str, str] = {"both": out}
    models.update((layout, f"{out}_{layout}") for layout in LAYOUTS)
    for layouts, folder in models.items():
        if not (harness.ROOT / folder).is_dir():
            # A model of one layout learns from as many prompts in it as the model of both.
            steps = config.train.steps if layouts == "both" else config.train.steps // 2
            fields = (
                f"--set=train.layouts={layouts}",
                f"--set=train.out={folder}",
                f"--set=train.steps={steps}",
            )
            run("train", f"--config=configs/ranker_{task.name}.py", *fields)
    return override(config, f"data.path={harness.ROOT / data}"), models, harness.ROOT / candidates


class Ranked(NamedTuple):
    """best: [e, k], candidates, best first. cached, computed: their tokens as shares of all prompts' tokens."""

    best: Int32
    cached: float = 0.0
    computed: float = 0.0


async def rank_all(
    engine: Engine[ServedDecoder],
    examples: Examples,
    users: npt.NDArray[np.str_],
    rows: Int32,
    layout: CacheLayout,
) -> Ranked:
    """The candidates [e, k] of every example, best first, and cached and computed tokens as shares of the prompts'."""
    ids, ranked = engine.served.translator.catalog.item_ids, np.full_like(rows, -1)
    longest = engine.info.max_history
    todo = iter(range(len(examples)))
    tokens = np.zeros(3, np.int64)

    async def worker() -> None:
        for i in todo:
            request = RankRequest(
                history=[ids[row] for row in examples.histories[i][-longest:]],
                candidates=[ids[row] for row in rows[i]],
                user_id=str(users[i]),
                layout=layout,
            )
            answer = await engine.answer(request)
            places = {ids[row]: row for row in rows[i]}
            # The engine's order is that of scores; equal ones keep the retriever's.
            ranked[i] = [places[item.item_id] for item in answer.items]
            usage = answer.usage
            tokens[:] += usage.cached_tokens, usage.computed_tokens, usage.prompt_tokens

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(worker())
    return Ranked(ranked, *(tokens[:2] / tokens[2]).tolist())


def served(
    config: Config,
    examples: Examples,
    users: npt.NDArray[np.str_],
    rows: Int32,
    layouts: Sequence[CacheLayout],
) -> dict[CacheLayout, Ranked]:
    """`rank_all` in each layout, by an engine that starts with an empty cache."""

    async def ask() -> dict[CacheLayout, Ranked]:
        engine = load_engine(config, kinds=["rank"])
        await engine.start()
        try:
            return {layout: await rank_all(engine, examples, users, rows, layout) for layout in layouts}
        finally:
            await engine.drain(config.server.drain_timeout_s)

    return asyncio.run(ask())


def measure_one(task: Task, quick: bool) -> tuple[Claim, list[Row]]:
    config, models, path = made(task)
    dataset = load_dataset(config.data)
    found = load_candidates(path, dataset)
    chosen = np.flatnonzero(found.eligible)[: 64 if quick else None]
    examples, rows, users = dataset.interactions.test.select(chosen), found.rows[chosen], found.users[chosen]
    ranked = {"retriever": Ranked(rows)}
    for trained, folder in models.items():
        own = override(config, f"model.path={harness.ROOT / folder}", "cache.shadow=0")
        layouts = LAYOUTS if trained == "both" else [layout for layout in LAYOUTS if layout == trained]
        for layout, answered in served(own, examples, users, rows, layouts).items():
            ranked[f"{trained}, {layout}"] = answered
        for name, setting in REPAIRS.items() if trained == "both" else ():
            repaired = served(override(own, setting), examples, users, rows, ["item_prefix"])
            ranked[f"{trained}, {name}"] = repaired["item_prefix"]
    values = {
        name: per_query(Hits.of_targets(of.best, examples.targets), METRICS) for name, of in ranked.items()
    }
    table = compare(values)
    for row in table:
        row["of"] = task.name
        of = ranked.get(row.get("method", ""))
        if of is not None and of.computed:
            row["cached_tokens_share"] = harness.rounded(of.cached, 3)
            row["computed_tokens_share"] = harness.rounded(of.computed, 3)
    difference = table[-1]["recall@10"]
    claim = Claim(
        f"{task.name}-recall@10-of-the-item-prefix-less-that-of-the-user-prefix",
        difference,
        "",
        "higher",
        -MARGIN,
    )
    return claim, [described(task, config, dataset, found, len(chosen)), *table]


def compare(values: Mapping[str, Mapping[str, Float64]]) -> list[Row]:
    """Metrics with intervals, then paired differences of the model trained on both layouts: each repair minus no
    repair, and last the item prefix minus the user prefix.

    values: by method and metric, one number a query.
    """
    up, ip = (f"both, {layout}" for layout in LAYOUTS)
    pairs = {f"{name}, less without": (f"both, {name}", ip) for name in REPAIRS} | {"difference": (ip, up)}
    differences = {
        name: {metric: values[one][metric] - values[other][metric] for metric in METRICS}
        for name, (one, other) in pairs.items()
    }
    series = {**values, **differences}
    flat = np.stack([series[name][metric] for name in series for metric in METRICS], axis=1)
    low, high = (x.reshape(len(series), -1) for x in interval(resampled_means(flat, RESAMPLES, 0)))
    return [
        {
            "method": name,
            **{metric: harness.rounded(float(of[metric].mean())) for metric in METRICS},
            "interval_95": {
                metric: [harness.rounded(float(low[i, j])), harness.rounded(float(high[i, j]))]
                for j, metric in enumerate(METRICS)
            },
        }
        for i, (name, of) in enumerate(series.items())
    ]


def described(task: Task, config: Config, dataset: Dataset, found: Candidates, measured: int) -> Row:
    train = config.train
    return {
        "of": task.name,
        "users": len(found.users),
        "eligible": int(found.eligible.sum()),
        "measured": measured,
        "retriever_recall@100": harness.rounded(found.recall(found.rows.shape[1])),
        "candidates": found.rows.shape[1],
        "items": dataset.catalog.n_items,
        "model": f"{train.layers} layers, hidden {train.hidden}",
        "training": {"steps": train.steps, "batch": train.batch, "negatives": train.negatives},
        "item_span": config.rank.item_span,
        "cache_policy": config.cache.policy,
    }


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Measure all tasks; nothing is timed."""
    claims, rows = zip(*(measure_one(task, quick) for task in TASKS), strict=True)
    return Measured(claims, [row for part in rows for row in part])


if __name__ == "__main__":
    configs = [
        harness.ROOT / "configs" / f"{kind}_{task.name}.py"
        for task in TASKS
        for kind in ("lrurec", "items", "ranker")
    ]
    harness.main(
        Benchmark(
            name="bat_accuracy",
            measure=measure,
            packages=("numpy", "jax", "jaxlib", "optax", "grain"),
            sources=(Path(__file__), Path(__file__).with_name("quality.py"), *configs),
        )
    )
