# SPDX-License-Identifier: Apache-2.0
"""What the quality benchmarks share: from raw files to metrics over HTTP, by the commands that a user would type.

    jgr prepare, jgr ids      where the dataset is not prepared yet
    jgr train                 generator and SASRec, where runs/ holds none; a killed training goes on
    jgr serve, jgr evaluate   every test target, asked of the server; beside counting baselines and SASRec
    jgr evaluate --unconstrained

What lies in runs/ is used as it is; remove it to train anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.config import Config, load_config, override
from jgr.data.datasets import load_dataset

JGR = (sys.executable, "-c", "import sys; from jgr.cli.main import run; sys.exit(run())")
METRICS = ("hr@5", "ndcg@5", "hr@10", "ndcg@10", "mrr@10")
UNCONSTRAINED_EXAMPLES = 1000
SPANS = 40  # of a training's losses, whose means are in the result


@dataclass(frozen=True)
class Quality:
    """One model on one dataset.

    name: with which its claims begin. raw: the dataset's folder in JGR_DATA. counts: numbers of its train, valid and
    test examples. config, sasrec: files in configs/, the latter "" for none. targets: by metric. published: HR@10 and
    NDCG@10 of others on this split. exclude_history: whether those were measured without the items of the history.
    prepare: the arguments of jgr prepare, jgr ids and jgr vectors, {raw} and {data} standing for the folders; empty
    where the dataset is read as it comes. settings: fields that differ from the config. above_rules: whether it is
    claimed to be above sequential rules, and its rows stand in both conventions of the history's items.
    """

    name: str
    raw: str
    counts: tuple[int, int, int]
    config: str
    sasrec: str
    targets: Mapping[str, float]
    published: Mapping[str, tuple[float, float]]
    exclude_history: bool
    prepare: tuple[Sequence[str], ...] = ()
    settings: tuple[str, ...] = ()
    above_rules: bool = False

    def loaded(self, raw: Path) -> Config:
        config = override(load_config(harness.ROOT / "configs" / self.config), *self.settings)
        return config if self.prepare else override(config, f"data.path={raw}")


def run(*arguments: str) -> str:
    """stdout of a jgr command; its words on stderr are shown as they come. Raises Missing where it fails."""
    done = subprocess.run(
        [*JGR, *arguments], stdout=subprocess.PIPE, text=True, cwd=harness.ROOT, check=False
    )
    if done.returncode:
        raise Missing(f"jgr {arguments[0]} failed; its own words are above")
    return done.stdout


def evaluated(*arguments: str) -> dict[str, Any]:
    """The JSON document of a jgr evaluate."""
    found: dict[str, Any] = json.loads(run("evaluate", *arguments).splitlines()[-1])
    return found


def measure(quality: Quality, quick: bool) -> Measured:
    """Claims on every target, the share of invalid items, and rows of all methods."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / quality.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {quality.raw} in the folder that JGR_DATA names")
    config = quality.loaded(raw)
    for command in quality.prepare:
        name, *arguments = (part.format(raw=raw, data=config.data.path) for part in command)
        if not (harness.ROOT / _written(name, arguments, config.data.path)).exists():
            run(name, *arguments)
    data = override(config, f"data.path={harness.ROOT / config.data.path}").data
    interactions = load_dataset(data).interactions
    sizes = tuple(len(split) for split in (interactions.train, interactions.valid, interactions.test))
    if sizes != quality.counts:
        raise Missing(f"{raw}: has {sizes} examples, the published split has {quality.counts}")

    fields = [
        f"--config=configs/{quality.config}",
        *(f"--set={s}" for s in quality.settings),
        f"--set=data.path={config.data.path}",
    ]
    trained, asked = {config.train.out: fields}, ["--limit=300"] if quick else []
    if quality.sasrec:
        sasrec = load_config(harness.ROOT / "configs" / quality.sasrec).train.out
        trained[sasrec] = [f"--config=configs/{quality.sasrec}", f"--set=data.path={config.data.path}"]
        asked.append(f"--baseline={sasrec}")
    for out, arguments in trained.items():
        if not (harness.ROOT / out).is_dir():
            run("train", *arguments)
    if quality.above_rules:
        asked.append("--both_conventions")
    served = list(fields)
    if quality.exclude_history:
        fields.append("--exclude_history")
    with server(served) as url:
        found = evaluated(*fields, f"--url={url}", *asked)
    few = 100 if quick else UNCONSTRAINED_EXAMPLES
    free = evaluated(*fields, "--unconstrained", f"--limit={few}", "--resamples=0")["invalid"]
    rows = _ranked(found)
    if quality.above_rules:
        other = {**found, **found["other_convention"]}
        of = f"{quality.name}-history-{'left-out' if other['exclude_history'] else 'kept'}"
        rows += [{"of": of, **row} for row in _ranked(other)]
        rows.append({"of": of, "examples": other["examples"], "exclude_history": other["exclude_history"]})
    rows.append({"published": {name: list(figures) for name, figures in quality.published.items()}})
    rows.append({"invalid": free, "invalid_examples": few})
    rows.append(_described(config, found))
    rows.append({"training": training(harness.ROOT / config.train.out)})
    ours = found["rows"][found["model"]]
    claims = [
        Claim(f"{quality.name}-test-{metric}-over-http", harness.rounded(ours[metric]), "", "higher", target)
        for metric, target in quality.targets.items()
    ]
    claims.append(
        Claim(
            f"{quality.name}-invalid-items-with-the-constraint",
            free["constrained"]["share"],
            "",
            "lower",
            0.0,
        )
    )
    for metric in ("hr@10", "ndcg@10") if quality.above_rules else ():
        of_rules = found["differences"]["sequential rules"][metric]
        ends = harness.rounded(of_rules["low"]), harness.rounded(of_rules["high"])
        claims.append(
            Claim(
                f"{quality.name}-test-{metric}-above-sequential-rules",
                ends[0],  # what counts is the lower end
                "",
                "higher",
                0.0,
                interval=ends,
            )
        )
    return Measured(claims, rows)


def _ranked(found: Mapping[str, Any]) -> list[Row]:
    """A row for each method, and one of what the others are above or below the model."""
    rows: list[Row] = [
        {"method": "jgr" if name == found["model"] else name, **{m: row[m] for m in METRICS},
         "interval_95": {m: found["intervals"][name][m] for m in METRICS}}
        for name, row in found["rows"].items()
    ]  # fmt: skip
    rows.append({"differences_to_jgr": {
        name: {m: of[m] for m in METRICS} for name, of in found["differences"].items()
    }})  # fmt: skip
    return rows


def _written(command: str, arguments: Sequence[str], data: str) -> Path:
    """The file by which it is known that a command which prepares has run."""
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    if command == "vectors":
        return Path(given["out"])
    name = f"{given['name']}." if "name" in given else ""
    return Path(data, "manifest.json" if command == "prepare" else f"{name}catalog.jsonl")


def _described(config: Config, found: Mapping[str, Any]) -> Row:
    train, beam = config.train, config.beam
    return {
        "config": {
            "decoder": f"{train.layers} layers, hidden {train.hidden}",
            "steps": train.steps,
            "batch": train.batch,
            "beam_width": beam.width,
            "normalize": beam.normalize,
        },
        "examples": found["examples"],
        "exclude_history": found["exclude_history"],
        "catalog_version": found["catalog_version"],
    }


def training(folder: Path) -> Row:
    """The validations of the training that made the model, and its losses: the mean of each span of steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    span = -(-len(losses) // SPANS)
    spans = [losses[at : at + span] for at in range(0, len(losses), span)]
    return {
        "steps": len(losses),
        "losses": [[at * span + len(of), harness.rounded(sum(of) / len(of))] for at, of in enumerate(spans)],
        "validation_recall@10": [[line["step"], line["recall@10"]] for line in lines if "recall@10" in line],
    }


@contextlib.contextmanager
def server(fields: Sequence[str]) -> Iterator[str]:
    """Run `jgr serve` on a free port, and give its URL."""
    command = [*JGR, "serve", *fields, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise Missing("the server did not start; its own words are above")
            yield url
        finally:
            process.terminate()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Loss and validation recall over training steps, a line for each model. Some validate nothing."""
    from matplotlib.figure import Figure

    curves = {"losses": "loss, nats a target", "validation_recall@10": "validation recall@10"}
    trained = [row for row in rows if "training" in row]
    shown = [name for name in curves if any(row["training"].get(name) for row in trained)]
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for row in trained:
            if row["training"].get(name):  # older results have no losses
                axes.plot(*zip(*row["training"][name], strict=True), marker=".", label=row["of"])
        axes.set_xlabel("training step")
        axes.set_ylabel(curves[name])
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def benchmark(name: str, source: str, *measured: Quality) -> Benchmark:
    """The benchmark of a file that measures these, one after the other;
    nothing is timed."""

    def all_of(quick: bool, quiet: Quiet) -> Measured:
        parts = [measure(quality, quick) for quality in measured]
        rows = [
            {"of": quality.name, **row}
            for quality, part in zip(measured, parts, strict=True)
            for row in part.rows
        ]
        return Measured([claim for part in parts for claim in part.claims], rows)

    configs = [
        harness.ROOT / "configs" / f for quality in measured for f in (quality.config, quality.sasrec) if f
    ]
    return Benchmark(
        name=name,
        measure=all_of,
        packages=("numpy", "jax", "jaxlib", "optax", "grain"),
        sources=(Path(source), Path(__file__), *dict.fromkeys(configs)),
        plot=plot,
    )
