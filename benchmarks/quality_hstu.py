# SPDX-License-Identifier: Apache-2.0
"""HSTU's quality as a ranker of the whole catalog, asked of a running server over HTTP (POST /v1/rank).

    industrial    MiniOneRec's split, histories of ten items
    ml1m          the 3,416 movies of the SASRec papers, leave-one-out, without the items of the history
    ml1m-whole    HSTU's protocol (MODEL-11): all 3,706 movies; here by the order of events alone, for all users
    ml1m-whole-large    the same with HSTU-large
    ml1m-half     the 2,999 users whose ratings have times here, which the published HSTU reads: with and without them

What lies in runs/ is used as it is; what is not there is prepared and trained first (hours on a CPU).

    JGR_DATA=FOLDER python -m benchmarks.quality_hstu      FOLDER holds ml-1m and amazon-industrial-minionerec
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import evaluated, plot, run, server, training

METRICS = ("hr@10", "ndcg@10", "mrr@10", "hr@50", "ndcg@50", "hr@200", "ndcg@200")
RECIPE = ("train.negatives=512", "train.weigh_negatives=true")
"""Of all but the published one: softmax over more items, weighed as if they were all, which learns faster."""


@dataclass(frozen=True)
class Task:
    """config: file in configs/. source: of jgr prepare, empty where the raw folder is read as it is. out: in runs/.

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


PUBLISHED_WHOLE = {"SASRec": (0.2853, 0.1603), "HSTU": (0.3097, 0.1720), "HSTU-large": (0.3294, 0.1893)}
TASKS = (
    Task(
        "industrial", "amazon-industrial-minionerec", "hstu_industrial", "hstu_industrial",
        exclude_history=False,
        targets={"hr@10": 0.1163, "ndcg@10": 0.0958},
        published={"SASRec": (0.1088, 0.0806), "HSTU": (0.1163, 0.0958)},
    ),
    Task(
        "ml1m", "ml-1m", "hstu_ml1m", "hstu_ml1m", "movielens-1m-sasrec", "ml1m", RECIPE,
        targets={"hr@10": 0.3003, "ndcg@10": 0.1726},
        published={"SASRec": (0.2392, 0.1259), "gSASRec": (0.3003, 0.1726)},
    ),
    Task(
        "ml1m-whole", "ml-1m", "hstu_ml1m", "hstu_ml1m_whole", "movielens-1m", "ml1m_whole", RECIPE,
        targets={"hr@10": 0.2853, "ndcg@10": 0.1603},
        published=PUBLISHED_WHOLE,
    ),
    Task(
        "ml1m-whole-large", "ml-1m", "hstu_large_ml1m", "hstu_large_ml1m", "movielens-1m", "ml1m_whole", RECIPE,
        targets={"hr@10": 0.2853, "ndcg@10": 0.1603},
        published=PUBLISHED_WHOLE,
        baseline="hstu_ml1m_whole",
    ),
    Task("ml1m-half", "ml-1m", "hstu_ml1m", "hstu_ml1m_half_order", "movielens-1m-half", "ml1m_half", RECIPE),
    Task(
        "ml1m-half-times", "ml-1m", "hstu_ml1m", "hstu_ml1m_half_times", "movielens-1m-half", "ml1m_half",
        (*RECIPE, "train.times=true"),
        baseline="hstu_ml1m_half_order",
    ),
)  # fmt: skip


def measure(task: Task, quick: bool) -> Measured:
    """Claims on the task's targets, and rows of the model, the baselines and the training."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / task.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {task.raw} in the folder that JGR_DATA names")
    data = f"runs/data/{task.data}" if task.source else str(raw)
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
        Claim(
            f"hstu-{task.name}-test-{metric}-over-http", harness.rounded(ours[metric]), "", "higher", target
        )
        for metric, target in task.targets.items()
    ]
    return Measured(claims, rows)


def _catalog(task: Task, data: str) -> str:
    """The catalog that the training read, in the folder that it wrote."""
    own = f"runs/{task.out}/catalog.jsonl"
    return own if (harness.ROOT / own).exists() else f"{data}/catalog.jsonl"


def every(quick: bool, quiet: Quiet) -> Measured:
    """All tasks; nothing is timed."""
    parts = [measure(task, quick) for task in TASKS]
    return Measured([c for part in parts for c in part.claims], [r for part in parts for r in part.rows])


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="quality_hstu",
            measure=every,
            packages=("numpy", "jax", "jaxlib", "optax", "grain"),
            sources=(Path(__file__), *(harness.ROOT / "configs" / f"{task.config}.py" for task in TASKS)),
            plot=plot,
        )
    )
