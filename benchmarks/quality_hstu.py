# SPDX-License-Identifier: Apache-2.0
"""How HSTU's quality is measured: a scorer of the whole catalog, asked of a running server over HTTP (POST /v1/rank).

The files quality_hstu_*.py say for which task. What lies in runs/ is used as it is; what is not there is prepared and
trained first (minutes to hours on a CPU).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import evaluated, plot, run, server, training
from jgr.config import Config, load_config, override

METRICS = ("hr@10", "ndcg@10", "mrr@10", "hr@50", "ndcg@50", "hr@200", "ndcg@200")
TO_THE_END = ("train.learn_valid=true", "train.evaluate_every=0")
"""MODEL-11's split: all but the last event is learnt from. So nothing is validated, and the last step's weights are
kept."""

WIDE = ("train.hidden=128", "train.heads=4", "train.steps=8000")
"""The width of gSASRec. A step takes more than twice the time of one of the authors' width, so there are fewer."""


@dataclass(frozen=True)
class Task:
    """One model on one dataset. config: a file in configs/. out: its folder in runs/.

    source: for jgr prepare; empty where the raw folder is read as it is.

    baseline: another task's `out`, compared user by user. targets and published as in benchmarks.quality.Quality.
    """

    name: str
    raw: str
    config: str
    out: str
    source: str = ""
    data: str = ""
    settings: tuple[str, ...] = ()
    exclude_history: bool = True
    targets: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    baseline: str = ""


def measure(task: Task, quick: bool) -> Measured:
    """Claims on the task's targets, and rows of the model, the baselines and the training."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / task.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {task.raw} in the folder that JGR_DATA names")
    data = f"runs/data/{task.data}" if task.source else str(raw)
    if task.baseline and not (harness.ROOT / "runs" / task.baseline / "params").is_dir():
        raise Missing(f"needs runs/{task.baseline}, to compare with: measure that first")
    if task.source and not (harness.ROOT / data / "catalog.jsonl").exists():
        run("prepare", f"--source={task.source}", f"--raw={raw}", f"--out={data}")
        run("ids", f"--data={data}", "--method=item")
    out = f"runs/{task.out}"
    fields = [
        f"--config=configs/{task.config}.py",
        *(f"--set={s}" for s in (*task.settings, f"train.out={out}", f"data.path={data}")),
    ]
    if not (harness.ROOT / out / "params").is_dir():
        run("train", *fields)
    _require_trained_as(
        override(load_config(harness.ROOT / f"configs/{task.config}.py"), *task.settings), out
    )
    served = [*fields, f"--set=model.path={out}", f"--set=catalog.path={_catalog(task, data)}"]
    asked = ["--k=10,50,200", *(["--exclude_history"] if task.exclude_history else [])]
    if task.baseline:
        asked.append(f"--baseline=runs/{task.baseline}")
    with server(served) as url:
        found = evaluated(*served, f"--url={url}", *asked, *(["--limit=100"] if quick else []))
    rows: list[Row] = [
        {"of": task.name, "method": "jgr" if name == found["model"] else name, **{m: row[m] for m in METRICS},
         "interval_95": {m: found["intervals"][name][m] for m in METRICS}}
        for name, row in found["rows"].items()
    ]  # fmt: skip
    rows.append({"of": task.name, "differences_to_jgr": {
        name: {m: of[m] for m in METRICS} for name, of in found["differences"].items()
    }})  # fmt: skip
    rows.append({"of": task.name, "published": {n: list(figures) for n, figures in task.published.items()}})
    rows.append({"of": task.name, "examples": found["examples"], "exclude_history": task.exclude_history})
    rows.append({"of": task.name, "training": training(harness.ROOT / out)})
    ours = found["rows"][found["model"]]
    claims = [
        Claim(f"{task.name}-test-{metric}-over-http", harness.rounded(ours[metric]), "", "higher", target)
        for metric, target in task.targets.items()
    ]
    return Measured(claims, rows)


def _require_trained_as(config: Config, out: str) -> None:
    """Raise Missing where what lies in runs/ was trained by another recipe."""
    train, found = config.train, json.loads((harness.ROOT / out / "config.json").read_text(encoding="utf-8"))
    steps = training(harness.ROOT / out)["steps"]
    sizes = [found[name] == getattr(train, name) for name in ("hidden", "layers", "heads")]
    early = train.patience > 0 or train.minutes > 0
    if not all(sizes) or (steps > train.steps if early else steps != train.steps):
        raise Missing(f"{out} was trained with another configuration: remove it, and it is trained anew")


def _catalog(task: Task, data: str) -> str:
    """The catalog that the training read, in the folder that it wrote."""
    own = f"runs/{task.out}/catalog.jsonl"
    return own if (harness.ROOT / own).exists() else f"{data}/catalog.jsonl"


def benchmark(name: str, *tasks: Task) -> Benchmark:
    """The benchmark of a file that measures these, one after the other; nothing is timed."""

    def all_of(quick: bool, quiet: Quiet) -> Measured:
        parts = [measure(task, quick) for task in tasks]
        return Measured([c for part in parts for c in part.claims], [r for part in parts for r in part.rows])

    sources = {
        harness.ROOT / "benchmarks/quality.py",
        *harness.ROOT.glob("benchmarks/quality_hstu*.py"),
        *harness.ROOT.glob("configs/hstu_*.py"),
    }
    return Benchmark(
        name=name,
        measure=all_of,
        packages=("numpy", "jax", "jaxlib", "optax", "grain"),
        sources=tuple(sorted(sources)),
        plot=plot,
    )
