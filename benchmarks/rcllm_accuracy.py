# SPDX-License-Identifier: Apache-2.0
"""What reuse beyond the prefix costs in accuracy: full recompute, prefix cache, naive reuse, EPIC, CacheBlend, RcLLM.

A retriever (LRURec) names 20 candidates for every test example, and on Industrial, which has few, for every validation
example. Neither model was trained on them, but the steps of both were chosen by the validation examples: the result has
both splits apart, with intervals.
Those whose target is among them (at most 1,200 of a split, drawn by a seed) are ranked by the engine that serves, in
prompts of plain order: the history's items, in titles on Industrial and by ids on MovieLens, whose histories are long;
the candidates in titles; a question. The decoder was trained on such prompts, to answer by the letter of a place
(configs/rcllm_*.py says how, and for how long). All methods rank the same candidates in the retriever's order, and
every difference is of the same requests, with an interval of a paired bootstrap over the users, of whom some ask more
than once.

- rcllm: r of the candidates' tokens is computed anew, and both ends of each candidate; with a second r the titles of
  the history, where it is in words, come from a library of prototypes of titles, but for that share. At r = .3 smaller
  libraries are measured too, and what the ends are worth: one without the other, and both alone (r = 0).
- epic and cacheblend compute as many token-layers as rcllm does at r = .3. EPIC computes whole tokens, as many of each
  candidate: the next whole number is taken, and one less too. token_layers: computed ones, as a share of the prompts'.
- counts: a dataset tells something only where full recompute beats the retriever's order beyond the interval, and naive
  reuse loses at least 5 % of NDCG@10: a model that ignores its context keeps everything. Elsewhere no claim is made.

The model and the retriever must be trained: the commands are at the head of the configs. What an engine answered is
kept (benchmarks/rcllm_kept.py): a run that was ended goes on with the next engine when it is started again, and the
result names the engines whose answers an earlier call gave.

    JGR_DATA=FOLDER python -m benchmarks.rcllm_accuracy [--quick]
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness, rcllm_kept
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from benchmarks.rcllm_kept import Ranked
from jgr.config import Config, load_config, override
from jgr.data.datasets import Dataset, load_dataset
from jgr.data.interactions import Examples
from jgr.evaluation.bootstrap import interval, resampled_means
from jgr.evaluation.candidates import retrieve
from jgr.evaluation.metrics import Hits, per_query
from jgr.library.build import build
from jgr.library.corpus import read_corpus
from jgr.models import retrievers
from jgr.serving.api import RankRequest
from jgr.serving.decoders.library import library_model
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import Engine
from jgr.serving.policies.fidelity import agreement

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

METRICS = ("hr@1", "hr@3", "hr@5", "hr@10", "mrr@20", "ndcg@5", "ndcg@10", "ndcg@20")
CANDIDATES = 20
SHARES = (0.1, 0.3, 0.5)
AT = 0.3
CONCURRENCY = 4
RESAMPLES = 2000
KEEPS, LOSES = 0.96, 0.05
"""RcLLM is to keep so much of full recompute's NDCG@10; naive reuse must lose so much of it for a dataset to count."""
POOLS = (200, 1_000)
"""Prototypes of smaller libraries."""
TASKS = {"industrial": "rcllm_industrial_letters", "ml1m": "rcllm_ml1m"}
SPLITS = {"industrial": ("test", "valid"), "ml1m": ("test",)}
MOST = 1_200
"""Requests of a split."""


class Server(NamedTuple):
    """An engine, and what is asked of it: by the name of each method its reuse_budget, None for the engine's own.

    texts: whether requests carry the titles of their history, which the library has.
    """

    settings: tuple[str, ...]
    budgets: dict[str, float | None]
    texts: bool = False


def servers(span: int, layers: int, libraries: Mapping[int, str]) -> dict[str, Server]:
    """By name. EPIC and CacheBlend compute as many token-layers of the candidates as RcLLM at r = .3, which computes
    both ends of each beside; CacheBlend computes the first layer whole. libraries: folders, by
    the most prototypes that they have; 0: all."""
    blocks = ("cache.policy=blocks", "cache.repair_tokens=0", "cache.repair_share=0")
    anew = AT + 2 / span
    as_many = math.ceil(anew * span)
    blend = max(0.0, (layers * anew - 1) / (layers - 1))
    by_attention = "cache.policy=blocks", f"cache.repair_share={AT}", "cache.repair_by=attention"
    first, last = "cache.repair_tokens=1", "cache.repair_last_tokens=1"
    attention = *by_attention, first, last
    found = {
        "full": Server(("cache.policy=none", *blocks[1:]), {"full": None}),
        "prefix": Server((blocks[0], f"cache.repair_tokens={span}", blocks[2]), {"prefix": None}),
        **{
            f"epic {k}": Server((blocks[0], f"cache.repair_tokens={k}", blocks[2]), {f"epic {k}": None})
            for k in (as_many - 1, as_many)
        },
        "deviation": Server(
            (*blocks[:2], f"cache.repair_share={blend:.3f}", "cache.repair_by=deviation"),
            {"naive": 0.0, f"cacheblend {blend:.2f}": None},
        ),
        "rcllm": Server(attention, {f"rcllm {share:g}": share for share in (0.0, *SHARES)}),
        "first": Server(
            (*by_attention, first, "cache.repair_last_tokens=0"), {f"rcllm {AT:g}, first token": None}
        ),
        "last": Server((*by_attention, "cache.repair_tokens=0", last), {f"rcllm {AT:g}, last token": None}),
    }
    for most, folder in libraries.items():
        of_texts = (*attention, f"cache.library={folder}", "prompt.item={review}{sid}")
        shares, pool = ((AT,), f", {most} prototypes") if most else (SHARES, "")
        asked: dict[str, float | None] = {f"rcllm {share:g}/{share:g}{pool}": share for share in shares}
        found[f"library {most}"] = Server(of_texts, asked, True)
    return found


class Asked(NamedTuple):
    """A split's examples whose target is among their candidates, and how many it has in all. rows: [e, c]."""

    split: str
    examples: Examples
    rows: Int32
    whole: int

    def some(self, most: int) -> Asked:
        """At most so many, drawn by a seed, in their order."""
        chosen = np.sort(np.random.default_rng(0).permutation(len(self.examples))[:most])
        return self._replace(examples=self.examples.select(chosen), rows=self.rows[chosen])


class Task(NamedTuple):
    """A dataset, and what is asked of it."""

    name: str
    config: Config
    dataset: Dataset
    asked: tuple[Asked, ...]

    @property
    def requests(self) -> list[tuple[Int32, int, Int32]]:
        """The history, the user and the candidates of each request."""
        return [
            (history, int(user), rows)
            for each in self.asked
            for history, user, rows in zip(
                each.examples.histories, each.examples.users, each.rows, strict=True
            )
        ]

    @property
    def rows(self) -> Int32:
        """The candidates of all requests, [e, c]."""
        return np.concatenate([each.rows for each in self.asked])

    @property
    def targets(self) -> Int32:
        return np.concatenate([each.examples.targets for each in self.asked])

    @property
    def users(self) -> Int32:
        return np.concatenate([each.examples.users for each in self.asked])


def prepared(name: str, quick: bool) -> Task:
    config = load_config(harness.ROOT / "configs" / f"{TASKS[name]}.py")
    at = {of: harness.ROOT / of for of in (config.data.path, config.train.retriever, config.train.out)}
    for of, folder in at.items():
        if not folder.is_dir():
            raise Missing(
                f"needs {of}: the commands that make it are at the head of configs/{TASKS[name]}.py"
            )
    config = override(config, f"data.path={at[config.data.path]}", f"model.path={at[config.train.out]}")
    return task_of(name, config, at[config.train.retriever], 48 if quick else MOST)


def task_of(name: str, config: Config, retriever: Path, most: int) -> Task:
    """most: so many requests of a split at most."""
    dataset = load_dataset(config.data)
    cfg, params = retrievers.load_for(retriever, dataset.catalog.item_ids)
    asked = []
    for split in SPLITS[name]:
        examples: Examples = getattr(dataset.interactions, split)
        found = retrieve(params, cfg, dataset, examples, CANDIDATES, exclude_seen=True)
        eligible = np.flatnonzero(found.eligible)
        asked.append(Asked(split, examples.select(eligible), found.rows[eligible], len(examples)).some(most))
    return Task(name, config, dataset, tuple(asked))


def titles_library(config: Config, dataset: Dataset, folder: Path, most: int) -> str:
    """The folder of a library of the titles of all items, each as a text of its own. most: of prototypes; 0: all."""
    texts = folder / "titles.jsonl"
    lines = [json.dumps({"text": title}) for title in titles(dataset)]
    texts.write_text("\n".join(lines) + "\n")
    model = library_model(override(config, "prompt.item={review}{sid}"))
    corpus = read_corpus(texts, model.tokenizer, config.prompt.review_tokens, 0.0)
    out = folder / f"library{most}"
    given = model.params, model.cfg, model.revision, model.prefix, corpus
    build(out, *given, lambda *_: None, most=most or 1 << 30, model="titles")
    return str(out)


def titles(dataset: Dataset) -> list[str]:
    return [str((meta or {}).get("title") or "") for meta in dataset.catalog.metadata]


def rank_all(task: Task, server: Server) -> dict[str, Ranked]:
    """What each method of a server makes of all users; it starts with an empty cache."""
    config = override(task.config, *server.settings, "cache.shadow=0")

    async def ask() -> dict[str, Ranked]:
        engine = load_engine(config, kinds=["rank"])
        await engine.start()
        try:
            return {
                name: await ranked(engine, task, budget, server.texts)
                for name, budget in server.budgets.items()
            }
        finally:
            await engine.drain(config.server.drain_timeout_s)

    return asyncio.run(ask())


async def ranked(engine: Engine[ServedDecoder], task: Task, budget: float | None, texts: bool) -> Ranked:
    dataset, rows, requests = task.dataset, task.rows, task.requests
    ids, words = dataset.catalog.item_ids, titles(dataset)
    longest = task.config.prompt.max_items
    scores = np.zeros(rows.shape)
    tokens = np.zeros(2, np.int64)
    todo = enumerate(requests)
    given: Any = {} if budget is None else {"reuse_budget": budget}

    async def worker() -> None:
        for i, (history, user, candidates) in todo:
            history = history[-longest:]
            own: Any = {"history_texts": [words[row] for row in history]} if texts else {}
            request = RankRequest(
                history=[ids[row] for row in history],
                candidates=[ids[row] for row in candidates],
                user_id=dataset.interactions.user_ids[user],
                layout="causal",
                **given,
                **own,
            )
            answer = await engine.answer(request)
            by_id = {item.item_id: item.score for item in answer.items}
            scores[i] = [by_id[ids[row]] for row in candidates]
            usage = answer.usage
            near = usage.approximate_tokens if isinstance(usage.approximate_tokens, int) else 0
            tokens[:] += near, usage.prompt_tokens

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(worker())
    order = np.argsort(-scores, axis=1, kind="stable")
    return Ranked(np.take_along_axis(rows, order, axis=1), scores, float(tokens[0] / tokens[1]))


def kept_answers(
    task: Task, name: str, server: Server, code: str, folder: Path
) -> tuple[dict[str, Ranked], bool]:
    """What each method of a server makes of all users, and whether an earlier call asked it."""
    # Where a library is says nothing of what is in it, which follows from the model and the name.
    settings = [each for each in server.settings if not each.startswith("cache.library=")]
    described = [task.name, name, settings, server.budgets, server.texts, library_model(task.config).revision]
    described += [task.config.prompt, task.config.rank, task.config.cache]
    asked = [task.rows, task.targets, task.users, *(history for history, _, _ in task.requests)]

    name = rcllm_kept.key(described, asked, code)
    return rcllm_kept.answered(name, server.budgets, lambda: rank_all(task, server), folder)


def measure_one(
    task: Task, folder: Path, pools: Sequence[int] = POOLS, kept: Path = rcllm_kept.FOLDER
) -> tuple[list[Claim], list[Row]]:
    """folder: for the libraries. kept: for what the engines answer."""
    config, rows, targets = task.config, task.rows, task.targets
    if not len(targets):
        raise Missing(f"{task.name}: the retriever finds no target")
    layers = library_model(override(config, "prompt.item={review}{sid}")).cfg.layers
    wanted = (0, *pools) if "{title}" in config.prompt.item else ()
    libraries = {most: titles_library(config, task.dataset, folder, most) for most in wanted}
    found = {"retriever": Ranked(rows, np.zeros(rows.shape))}
    code, earlier = rcllm_kept.code(), []
    for name, server in servers(config.rank.item_span, layers, libraries).items():
        ranked_by, before = kept_answers(task, name, server, code, kept)
        found |= ranked_by
        earlier += [name] if before else []
        harness.note(f"{task.name}: {', '.join(server.budgets)}{' (asked before)' if before else ''}")
    values = {name: per_query(Hits.of_targets(of.best, targets), METRICS) for name, of in found.items()}
    table = compare(task.name, values, found, task.users, layers)
    told = about(task, values["full"], values["retriever"]) | {"asked_before": earlier}
    return claims(task.name, table), [told, *table]


def about(task: Task, full: Mapping[str, Float64], retriever: Mapping[str, Float64]) -> Row:
    """What was asked, and of what. full, retriever: metrics of all requests."""
    model = library_model(override(task.config, "prompt.item={review}{sid}"))
    train = task.config.train
    end = np.cumsum([len(each.examples) for each in task.asked])
    apart = (full["ndcg@10"] - retriever["ndcg@10"])[:, None]

    def less(part: slice) -> list[float]:
        low, high = interval(means_over_users(apart[part], task.users[part]))
        return [rounded(float(low[0])), rounded(float(high[0]))]

    splits = {
        each.split: {
            "examples": each.whole,
            "measured": len(each.examples),
            "full_ndcg@10": rounded(float(full["ndcg@10"][at - len(each.examples) : at].mean())),
            "retriever_ndcg@10": rounded(float(retriever["ndcg@10"][at - len(each.examples) : at].mean())),
            "full_less_retriever_ndcg@10": less(slice(at - len(each.examples), at)),
        }
        for each, at in zip(task.asked, end, strict=True)
        if len(each.examples)
    }
    return {
        "about": task.name,
        "splits": splits,
        "measured": int(end[-1]),
        "users": len(np.unique(task.users)),
        "candidates": CANDIDATES,
        "items": task.dataset.catalog.n_items,
        "model": f"{model.cfg.layers} layers, hidden {model.cfg.hidden}",
        "revision": model.revision,
        "training": {"steps": train.steps, "batch": train.batch, "negatives": train.negatives},
        "answers_by": task.config.rank.method,
        "item_span": task.config.rank.item_span,
    }


def means_over_users(values: Float64, users: Int32) -> Float64:
    """[e, s] values of requests, their users [e] -> [RESAMPLES, s], means over the requests of users drawn anew."""
    who = np.unique(users, return_inverse=True)[1].reshape(-1)
    sums = np.zeros((who.max() + 1, values.shape[1] + 1))
    np.add.at(sums, who, np.column_stack([values, np.ones(len(values))]))
    drawn = resampled_means(sums, RESAMPLES, 0)
    return drawn[:, :-1] / drawn[:, -1:]


def token_layers(method: str, approximate: float, layers: int) -> float:
    """The share of the prompts' token-layers that is computed. CacheBlend computes the first layer whole."""
    computed = 1 - approximate
    return (1 + (layers - 1) * computed) / layers if method.startswith("cacheblend") else computed


def compare(
    name: str,
    values: Mapping[str, Mapping[str, Float64]],
    found: Mapping[str, Ranked],
    users: Int32,
    layers: int,
) -> list[Row]:
    """A row for each method: metrics, their differences from full recompute, and the ratio of NDCG@10, with intervals;
    and how the scores agree with full recompute's. users: [e], of the requests."""
    table: list[Row] = []
    full = values["full"]
    for method, of in values.items():
        flat = np.stack([*of.values(), *(of[metric] - full[metric] for metric in METRICS)], axis=1)
        drawn = means_over_users(flat, users)
        low, high = interval(drawn)
        pair = means_over_users(np.stack([of["ndcg@10"], full["ndcg@10"]], axis=1), users)
        kept = np.percentile(pair[:, 0] / np.maximum(pair[:, 1], 1e-9), (2.5, 97.5))
        row: Row = {
            "of": name,
            "method": method,
            **{metric: rounded(float(of[metric].mean())) for metric in METRICS},
            "interval_95": {
                metric: [rounded(float(low[i])), rounded(float(high[i]))] for i, metric in enumerate(METRICS)
            },
            "less_than_full_interval_95": {
                metric: [rounded(float(low[i])), rounded(float(high[i]))]
                for i, metric in enumerate(METRICS, start=len(METRICS))
            },
            "of_full_ndcg@10": rounded(float(of["ndcg@10"].mean() / max(full["ndcg@10"].mean(), 1e-9))),
            "of_full_interval": [rounded(float(x)) for x in kept],
            "approximate_share": rounded(found[method].approximate),
        }  # fmt: skip
        if method != "retriever":
            row["token_layers"] = rounded(token_layers(method, found[method].approximate, layers))
            pairs = zip(found["full"].scores, found[method].scores, strict=True)
            agreed = [one for both in pairs if (one := agreement(*both)) is not None]
            row |= {
                "kendall_tau": rounded(float(np.mean([one.tau for one in agreed]))),
                "top10_overlap": rounded(float(np.mean([one.overlap for one in agreed]))),
                "kl": rounded(float(np.mean([one.kl for one in agreed]))),
            }
        table.append(row)
    better = difference(values, "retriever", "full", users)
    table.append({
        "of": name,
        "counts": bool(better[0] > 0 and row_of(table, "naive")["of_full_ndcg@10"] <= 1 - LOSES),
        "full_less_retriever_ndcg@10": [rounded(x) for x in better],
        "naive_keeps": row_of(table, "naive")["of_full_ndcg@10"],
        "rcllm_less": {
            other: [rounded(x) for x in difference(values, other, f"rcllm {AT:g}", users)]
            for other in values
            if other.startswith(("epic", "cacheblend"))
        },
    })  # fmt: skip
    return table


def difference(
    values: Mapping[str, Mapping[str, Float64]], other: str, method: str, users: Int32
) -> tuple[float, float]:
    """The interval of NDCG@10 of a method less that of another."""
    apart = values[method]["ndcg@10"] - values[other]["ndcg@10"]
    low, high = interval(means_over_users(apart[:, None], users))
    return float(low[0]), float(high[0])


def row_of(table: Sequence[Row], method: str) -> Row:
    return next(row for row in table if row.get("method") == method)


def claims(name: str, table: Sequence[Row]) -> list[Claim]:
    """None where the dataset does not count."""
    verdict = table[-1]
    prefix = row_of(table, "prefix")
    same = prefix["of_full_ndcg@10"]
    found = [Claim(f"rcllm-prefix-cache-keeps-of-full-{name}", same, "", "higher", 0.999)]
    if not verdict["counts"]:
        return found
    for row in table:
        if row.get("method") in (f"rcllm {AT:g}", f"rcllm {AT:g}/{AT:g}"):
            kind = "items-and-texts" if "/" in row["method"] else "items"
            low, high = row["of_full_interval"]
            found.append(
                Claim(
                    f"rcllm-keeps-of-full-ndcg10-{kind}-{name}",
                    row["of_full_ndcg@10"],
                    "",
                    "higher",
                    KEEPS,
                    interval=(low, high),
                )
            )
    most = {other.split()[0]: other for other in verdict["rcllm_less"]}  # of EPIC the one that computes more
    for kind, other in most.items():
        low, high = verdict["rcllm_less"][other]
        found.append(
            Claim(f"rcllm-ndcg10-less-{kind}-{name}", rounded(low), "", "higher", 0.0, interval=(low, high))
        )
    return found


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Measure the datasets whose models are there; nothing is timed."""
    every: list[Claim] = []
    rows: list[Row] = []
    missing: list[str] = []
    for name in TASKS:
        try:
            task = prepared(name, quick)
        except Missing as error:
            missing.append(str(error))
            rows.append({"about": name, "left_out": str(error)})
            continue
        with tempfile.TemporaryDirectory(prefix="jgr-rcllm-") as folder:
            claimed, table = measure_one(task, Path(folder))
        every += claimed
        rows += table
    if len(missing) == len(TASKS):
        raise Missing("; ".join(missing))
    return Measured(every, rows)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="rcllm_accuracy",
            measure=measure,
            packages=("numpy", "jax", "jaxlib", "faiss-cpu"),
            sources=(
                Path(__file__),
                Path(rcllm_kept.__file__),
                *(harness.ROOT / "configs" / f"{config}.py" for config in TASKS.values()),
            ),
        )
    )
