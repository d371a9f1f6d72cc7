# SPDX-License-Identifier: Apache-2.0
"""Whether a model beats counting: by a recipe with nothing changed but the data (configs/hstu_beauty.py), or one that
learns from vectors of the items' texts too (configs/hstu_text.py).

Every row stands twice, with the history's items left out and with them allowed; the claims are about the first choice
of each dataset, that of the published figures. The model is a scorer of the whole catalog, asked over HTTP (POST
/v1/rank). The fusion is made of its first FUSED items and those of sequential rules, by reciprocal ranks. Differences
are paired over the test users.

The files quality_counting_*.py and quality_informed_*.py say for which dataset. What lies in runs/ is used as it is;
what is not is prepared and trained first (some ten minutes on two cores). FUSED was chosen on validation users of
Beauty. The recipe without texts was not searched here, but was given with a figure of Beauty's test users, so Beauty is
not new to it; the other sets are. The one with texts was chosen on validation users of Industrial.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import evaluated, plot, run, server, training

CONFIG = "configs/hstu_beauty.py"
FUSED = 50
METRICS = ("hr@5", "ndcg@5", "hr@10", "ndcg@10", "mrr@10")
RULES, OURS = "sequential rules", "jgr"
FUSION = f"{OURS} + {RULES}"


@dataclass(frozen=True)
class Task:
    """One dataset. name: also that of its folder in runs/. source: for jgr prepare; empty: the raw folder is read.

    config: the recipe. texts, near: whether it learns from vectors of the items' texts, and of what was taken near
    them. settings: fields of this dataset's.
    targets, fused_targets: of the model and of the fusion. published: HR@10 and NDCG@10 of others on this split.
    """

    name: str
    raw: str
    source: str = ""
    exclude_history: bool = True
    targets: Mapping[str, float] = field(default_factory=dict)
    fused_targets: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    config: str = CONFIG
    texts: bool = False
    near: bool = False
    settings: tuple[str, ...] = ()


def measure(task: Task, quick: bool) -> Measured:
    """Claims on the targets and on what the model and the fusion are above, and rows of both conventions."""
    fields, out = _prepared(task)
    found = _asked(task, fields, out, quick)
    other = {**found, **found.pop("other_convention")}
    rows: list[Row] = [*_rows(task.name, task, found)]
    kept = "history-left-out" if other["exclude_history"] else "history-kept"
    rows += _rows(f"{task.name}-{kept}", Task(task.name, task.raw), other)
    rows.append({"of": task.name, "training": training(harness.ROOT / out)})
    model, fusion = found["rows"][found["model"]], found["rows"][f"{found['model']} + {RULES}"]
    claims = [
        Claim(
            f"{name}-test-{metric}-over-http", harness.rounded(figures[metric]), "", "higher", target,
            interval=_interval(found["intervals"][row][metric]),
        )
        for name, row, figures, targets in (
            (task.name, found["model"], model, task.targets),
            (f"{task.name}-fused-with-rules", f"{found['model']} + {RULES}", fusion, task.fused_targets),
        )
        for metric, target in targets.items()
    ]  # fmt: skip
    of_model = {f"{task.name}-test-{{}}-above-sequential-rules": found["differences"][RULES]}
    of_fusion = found["fusion"]["differences"]
    above = of_model | {
        f"{task.name}-test-{{}}-of-the-fusion-above-rules": of_fusion[RULES],
        f"{task.name}-test-{{}}-of-the-fusion-above-the-model": of_fusion[found["model"]],
    }
    for words, differences in above.items():
        for metric in ("hr@10", "ndcg@10"):
            of = differences[metric]
            ends = _interval((of["low"], of["high"]))
            # What counts is the lower end: above 0 it is a difference that the choice of users does not explain.
            claims.append(
                Claim(words.format(metric), harness.rounded(of["low"]), "", "higher", 0.0, interval=ends)
            )
    return Measured(claims, rows)


def _prepared(task: Task) -> tuple[list[str], str]:
    """The settings of every jgr command, and the folder of the trained model. Raises Missing."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / task.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {task.raw} in the folder that JGR_DATA names")
    data = f"runs/data/{task.name}" if task.source else str(raw)
    if task.source and not (harness.ROOT / data / "catalog.jsonl").exists():
        run("prepare", f"--source={task.source}", f"--raw={raw}", f"--out={data}")
        run("ids", f"--data={data}", "--method=item")
    out = f"runs/{task.name}"
    kind = "prepared" if task.source else "minionerec"
    chosen = (f"data.kind={kind}", f"data.path={data}", f"train.out={out}", f"model.name={task.name}")
    fields = [f"--config={task.config}", *(f"--set={setting}" for setting in (*chosen, *task.settings))]
    if not (harness.ROOT / out / "params").is_dir():
        run("train", *fields, *_vectors(task, fields))
    catalog = f"{out}/catalog.jsonl"
    return [*fields, f"--set=model.path={out}", f"--set=catalog.path={catalog}"], out


def _vectors(task: Task, fields: list[str]) -> list[str]:
    """The setting that names the vectors of the items, which are made where they are not there; they are trained with,
    and not served."""
    made = []
    kinds = {"texts": (task.texts, ()), "near": (task.near, ("--of=sequences", "--dims=128"))}
    for kind, (wanted, arguments) in kinds.items():
        path = f"runs/data/{task.name}_{kind}.npy"
        if wanted:
            made.append(path)
            if not (harness.ROOT / path).exists():
                (harness.ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                run("vectors", *fields, *arguments, f"--out={path}")
    return [f"--set=train.item_vectors={','.join(made)}"] if made else []


def _asked(task: Task, fields: list[str], out: str, quick: bool) -> dict[str, Any]:
    items = len((harness.ROOT / out / "catalog.jsonl").read_text(encoding="utf-8").splitlines())
    fields = [
        *fields,
        f"--set=server.max_candidates={items}",
        f"--set=executors.sizes={1 << (items - 1).bit_length()}",
    ]
    asked = ["--both_conventions", f"--fuse_depth={FUSED}", *(["--limit=100"] if quick else [])]
    asked += ["--exclude_history"] if task.exclude_history else []
    with server(fields) as url:
        return evaluated(*fields, f"--url={url}", *asked)


def _rows(name: str, task: Task, found: Mapping[str, Any]) -> list[Row]:
    def word(method: str) -> str:
        return method.replace(found["model"], OURS)

    rows: list[Row] = [
        {"of": name, "method": word(method), **{m: row[m] for m in METRICS},
         "interval_95": {m: found["intervals"][method][m] for m in METRICS}}
        for method, row in found["rows"].items()
    ]  # fmt: skip
    differences = {OURS: found["differences"], FUSION: found["fusion"]["differences"]}
    rows += [
        {"of": name, "differences_to": method,
         "differences": {word(other): {m: figures[m] for m in METRICS} for other, figures in of.items()}}
        for method, of in differences.items()
    ]  # fmt: skip
    rows.append({"of": name, "published": {who: list(figures) for who, figures in task.published.items()}})
    rows.append({
        "of": name, "examples": found["examples"], "exclude_history": found["exclude_history"], "fused": FUSED,
    })  # fmt: skip
    return rows


def _interval(ends: Any) -> tuple[float, float]:
    low, high = ends
    return harness.rounded(low), harness.rounded(high)


def benchmark(name: str, task: Task) -> Benchmark:
    """The benchmark of a file that measures one task; nothing is timed."""

    def of_task(quick: bool, quiet: Quiet) -> Measured:
        return measure(task, quick)

    return Benchmark(
        name=name,
        measure=of_task,
        packages=("numpy", "scipy", "jax", "jaxlib", "optax", "grain"),
        sources=(
            Path(__file__),
            harness.ROOT / "benchmarks" / f"{name}.py",
            harness.ROOT / "benchmarks/quality.py",
            harness.ROOT / task.config,
        ),
        plot=plot,
    )
