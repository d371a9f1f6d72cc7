# SPDX-License-Identifier: Apache-2.0
"""How well Climber predicts what users do on KuaiRand-Pure, asked of a running server over HTTP (POST /v1/rank).

Impressions of May 1st to 8th, 2022, after training on those up to April 29th (the 30th validates): a user's of a day in
a tab are one request, with the history, its times and what was done with it up to there. Nobody has published figures
on these days, so the targets are measured here: a logistic regression on the shares of the item, the tab and the user's
own past (`jgr.evaluation.feedback`), of each task. DLRMv3's HSTU, trained on the same, stands beside it.

What lies in runs/ is used as it is; what is not there is prepared and trained first.

    JGR_DATA=FOLDER python -m benchmarks.quality_kuairand      FOLDER holds kuairand-pure
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import evaluated, run, server
from jgr.config import Config, load_config, override

CONFIG = "configs/climber_kuairand.py"
STU = "runs/stu_kuairand"
# What differs for DLRMv3's HSTU, which reads no features.
MODELS = {
    "climber": (),
    "stu": (
        "train.model=stu",
        f"train.out={STU}",
        f"model.path={STU}",
        "model.name=stu_kuairand",
        "features.schema=",
        "features.store=",
    ),
}
METRICS = ("auc", "gauc", "log_loss", "ne")


def measure(quick: bool, quiet: Quiet) -> Measured:
    """A claim for each task, and a row for each method of each task."""
    del quiet  # nothing is timed
    config = load_config(harness.ROOT / CONFIG)
    prepare(config)
    found = {name: _evaluated(settings, quick) for name, settings in MODELS.items()}
    claims, rows = [], []
    for name, of in found.items():
        for task, methods in of["rows"].items():
            for method, row in methods.items():
                if method == of["model"]:
                    method = name
                elif name != "climber":  # the baselines are the same
                    continue
                rows.append({"task": task, "method": method, **{m: row[m] for m in METRICS}})
            rows.append({"task": task, "auc_differences_of": name, **of["differences"][task]})
    climber = found["climber"]
    for task, methods in climber["rows"].items():
        ours, target = (harness.rounded(methods[method]["auc"]) for method in (climber["model"], "logistic"))
        claims.append(
            Claim(f"kuairand-{task}-test-auc-over-http-against-logistic", ours, "", "higher", target)
        )
    rows.append({name: climber[name] for name in ("requests", "impressions", "users", "catalog_version")})
    for name, settings in MODELS.items():
        trained = override(config, *settings).train
        rows.append(
            {
                "training": name,
                "hidden": trained.hidden,
                "layers": trained.layers,
                "history": trained.max_items,
                "validation_auc": validations(harness.ROOT / trained.out),
            }
        )
    return Measured(claims, rows)


def prepare(config: Config) -> None:
    """The dataset, its items' ids, and the store of their features, where they are not there yet."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / "kuairand-pure"
    if not raw.is_dir():
        raise Missing("needs the dataset: no kuairand-pure in the folder that JGR_DATA names")
    data = config.data.path
    if not (harness.ROOT / data / "catalog.jsonl").exists():
        run("prepare", "--source=kuairand-feedback", f"--raw={raw}", f"--out={data}")
        run("ids", f"--data={data}", "--method=item")
    if not (harness.ROOT / config.features.store).exists():
        run("features", "load", f"--config={CONFIG}", f"--data={data}")


def _evaluated(settings: Sequence[str], quick: bool) -> dict[str, Any]:
    fields = [f"--config={CONFIG}", *(f"--set={setting}" for setting in settings)]
    out = override(load_config(harness.ROOT / CONFIG), *settings).train.out
    if not (harness.ROOT / out / "params").is_dir():
        run("train", *fields)
    with server(fields) as url:
        return evaluated(*fields, "--feedback", f"--url={url}", *(["--limit=3000"] if quick else []))


def validations(folder: Path) -> list[list[float]]:
    """Step and AUC of every validation of a training."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [[line["step"], line["auc"]] for line in lines if "auc" in line]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Validation AUC over training steps, a line for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        if "training" in row:
            axes.plot(*zip(*row["validation_auc"], strict=True), marker="o", label=row["training"])
    axes.set_xlabel("training step")
    axes.set_ylabel("validation AUC, mean of the tasks")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="quality_kuairand",
            measure=measure,
            packages=("numpy", "jax", "jaxlib", "optax", "grain"),
            sources=(Path(__file__), harness.ROOT / CONFIG),
            plot=plot,
        )
    )
