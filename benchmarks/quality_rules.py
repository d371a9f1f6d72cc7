# SPDX-License-Identifier: Apache-2.0
"""Baselines that know order on the test splits of the other quality benchmarks: what counting reaches there.

A Markov chain, sequential rules (the last five items, 1 / distance) and sequence-kNN. They are fitted on a split's
training sequences and rank the whole catalog for every test history, with the history's items left out or not as that
split's other figures have it; `other_convention` has the figures of the other choice. Targets: an independent
implementation of the same rules. Takes minutes and trains nothing.

    JGR_DATA=FOLDER python -m benchmarks.quality_rules      FOLDER holds the datasets
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import METRICS, run
from jgr.config import DataConfig
from jgr.data.datasets import Dataset, load_dataset
from jgr.evaluation.baselines import RULES_DECAY, RULES_WINDOW
from jgr.evaluation.report import MARKOV, RULES, SEQUENCE_KNN, compare, rank_baselines

RESAMPLES = 1000


@dataclass(frozen=True)
class Split:
    """A test split. names: of the rows of other results that are measured on it. raw: its folder in JGR_DATA.

    source: for jgr prepare; empty where the raw folder is read as it comes. exclude_history: as those rows have it.
    targets: by metric.
    """

    names: tuple[str, ...]
    raw: str
    source: str
    exclude_history: bool = True
    targets: Mapping[str, float] = field(default_factory=dict)


WHOLE = ("hstu-ml1m-whole", "hstu-large-ml1m-whole", "hstu-wide-ml1m-whole")
SPLITS = (
    Split(
        ("beauty", "beauty-given-ids"),
        "amazon-beauty",
        "amazon-beauty",
        targets={"hr@10": 0.0818, "ndcg@10": 0.0505},
    ),
    Split(
        ("industrial", "hstu-industrial"),
        "amazon-industrial-minionerec",
        "",
        exclude_history=False,
        targets={"hr@10": 0.1407, "ndcg@10": 0.1017},
    ),
    Split(("ml1m", "hstu-ml1m"), "ml-1m", "movielens-1m-sasrec"),
    Split(WHOLE, "ml-1m", "movielens-1m"),
    Split(("hstu-ml1m-half", "hstu-ml1m-half-times"), "ml-1m", "movielens-1m-half"),
)


def _load(split: Split) -> Dataset:
    """The split's dataset, prepared where it is not yet. Ids play no part, so they are of one level, an item each."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / split.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {split.raw} in the folder that JGR_DATA names")
    if not split.source:
        return load_dataset(DataConfig(kind="minionerec", path=str(raw)))
    data = harness.ROOT / "runs/data" / f"rules_{split.source}"
    if not (data / "catalog.jsonl").exists():
        run("prepare", f"--source={split.source}", f"--raw={raw}", f"--out={data}")
        run("ids", f"--data={data}", "--method=item")
    return load_dataset(DataConfig(kind="prepared", path=str(data)))


def measure(split: Split, quick: bool) -> Measured:
    """Rows for each of the split's names and each method, and claims where there are targets."""
    dataset = _load(split)
    interactions = dataset.interactions
    examples = interactions.test.select(slice(300 if quick else None))
    by_choice = {}
    for exclude in (split.exclude_history, not split.exclude_history):
        ranked = rank_baselines(interactions, examples, dataset.catalog.n_items, exclude, 10)
        methods = {method: ranked[method] for method in (MARKOV, RULES, SEQUENCE_KNN)}
        by_choice[exclude] = compare(methods, examples, (5, 10), resamples=RESAMPLES)
    found, other = by_choice[split.exclude_history], by_choice[not split.exclude_history]
    rows: list[Row] = [
        {
            "of": name,
            "method": method,
            **{metric: figures[metric] for metric in METRICS},
            "interval_95": {metric: found.intervals[method][metric] for metric in METRICS},
            **({"window": RULES_WINDOW, "decay": RULES_DECAY} if method == RULES else {}),
            "examples": len(examples),
            "exclude_history": split.exclude_history,
            "other_convention": {metric: other.rows[method][metric] for metric in METRICS},
        }
        for name in split.names
        for method, figures in found.rows.items()
    ]
    claims = []
    for metric, target in split.targets.items():
        words = f"{split.names[0]}-test-{metric}-of-sequential-rules"
        claims.append(Claim(words, harness.rounded(found.rows[RULES][metric]), "", "higher", target))
    return Measured(claims, rows)


def _measure_all(quick: bool, quiet: Quiet) -> Measured:
    """Measure every split. Nothing is timed."""
    parts = [measure(split, quick) for split in SPLITS]
    return Measured([c for part in parts for c in part.claims], [r for part in parts for r in part.rows])


BENCHMARK = Benchmark(
    name="quality_rules",
    measure=_measure_all,
    packages=("numpy", "scipy"),
    sources=(Path(__file__), Path(__file__).with_name("quality.py")),
)

if __name__ == "__main__":
    harness.main(BENCHMARK)
