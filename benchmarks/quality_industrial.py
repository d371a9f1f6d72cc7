# SPDX-License-Identifier: Apache-2.0
"""Recommendation quality on Amazon Industrial and Scientific, asked of a running server over HTTP.

Split, semantic ids and item texts are MiniOneRec's; every one of the 4,533 test targets is predicted, by beam search
over the whole catalog. The published figures on this split are the targets: SASRec's. The model is the one that
configs/industrial.py describes, trained from scratch; a folder that an earlier run left in runs/ is used as it is.

    JGR_DATA=FOLDER python -m benchmarks.quality_industrial      FOLDER holds amazon-industrial-minionerec
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.config import Config, load_config, override
from jgr.data.datasets import load_dataset
from jgr.evaluation.client import Client, recommend_all
from jgr.evaluation.report import TOP_K, score, score_baselines

CONFIG = harness.ROOT / "configs" / "industrial.py"
DATASET = "amazon-industrial-minionerec"
COUNTS = (36_259, 4_532, 4_533)
SASREC_HR10, SASREC_NDCG10 = 0.1088, 0.0806  # as published with the split
JGR = (sys.executable, "-c", "import sys; from jgr.cli.main import run; sys.exit(run())")


def measure(quick: bool, quiet: Quiet) -> Measured:
    folder = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / DATASET
    if not folder.is_dir():
        raise Missing(f"needs the dataset: no {DATASET} in the folder that JGR_DATA names")
    config = override(load_config(CONFIG), f"data.path={folder}")
    dataset = load_dataset(config.data)
    interactions = dataset.interactions
    sizes = tuple(len(split) for split in (interactions.train, interactions.valid, interactions.test))
    if sizes != COUNTS:
        raise Missing(f"{folder}: has {sizes} rows, the published split has {COUNTS}")
    if not Path(config.model.path).is_dir():
        subprocess.run([*JGR, "train", f"--config={CONFIG}", f"--set=data.path={folder}"], check=True)
    examples = interactions.test.select(slice(300 if quick else None))
    with server() as url, Client(url) as client:
        ranked = recommend_all(client, dataset.catalog, examples, top_k=TOP_K)
    rows: list[Row] = [
        {"method": name, "examples": len(examples), **metrics}
        for name, metrics in {
            **score_baselines(interactions, examples, dataset.catalog.n_items, exclude_history=False),
            "jgr": score(ranked, examples),
        }.items()
    ]
    rows.append({"config": _described(config), "catalog_version": dataset.catalog.version})
    ours = rows[2]
    return Measured(
        [
            Claim(
                "industrial-test-hr@10-over-http", harness.rounded(ours["hr@10"]), "", "higher", SASREC_HR10
            ),
            Claim(
                "industrial-test-ndcg@10-over-http",
                harness.rounded(ours["ndcg@10"]),
                "",
                "higher",
                SASREC_NDCG10,
            ),
            Claim(
                "industrial-recommended-items-in-the-catalog", float(np.mean(ranked >= 0)), "", "higher", 1.0
            ),
        ],
        rows,
    )


def _described(config: Config) -> dict[str, object]:
    train, beam = config.train, config.beam
    return {
        "decoder": f"{train.layers} layers, hidden {train.hidden}",
        "steps": train.steps,
        "batch": train.batch,
        "beam_width": beam.width,
        "normalize": beam.normalize,
    }


@contextlib.contextmanager
def server() -> Iterator[str]:
    """`jgr serve` on a free port; its URL."""
    command = [*JGR, "serve", f"--config={CONFIG}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise Missing("the server did not start; its own words are above")
            yield url
        finally:
            process.terminate()


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="quality_industrial",
            measure=measure,
            packages=("numpy", "jax", "jaxlib", "optax"),
            sources=(Path(__file__), CONFIG),
        )
    )
