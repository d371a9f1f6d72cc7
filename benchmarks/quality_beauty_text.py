# SPDX-License-Identifier: Apache-2.0
"""Generators on Amazon Beauty that know the items' texts, over HTTP: one by ids of two codes, in which texts count too,
and one by a code of each item's own, with the rest of the recipe unchanged.

Target: ActionPiece's .0775 / .0424 (ICML 2025, quoted from memory), above TIGER's .0648 / .0384. The recipe was chosen
on validation users alone (configs/beauty_text.py).

    JGR_DATA=FOLDER python -m benchmarks.quality_beauty_text      FOLDER holds amazon-beauty
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality import benchmark
from benchmarks.quality_beauty import BEAUTY, PREPARE

_PREPARED = ("--set=data.kind=prepared", "--set=data.path={data}")
_VECTORS = "--vectors={data}_words.npy,{data}_near.npy"

TEXT = replace(
    BEAUTY,
    name="beauty-text",
    config="beauty_text.py",
    sasrec="",
    above_rules=True,
    targets={"hr@10": 0.0775, "ndcg@10": 0.0424},
    published={"TIGER": (0.0648, 0.0384), "ActionPiece": (0.0775, 0.0424)},
    prepare=(
        PREPARE,
        ("ids", "--data={data}", "--method=item"),
        ("vectors", *_PREPARED, "--out={data}_words.npy"),
        ("vectors", *_PREPARED, "--of=sequences", "--dims=128", "--out={data}_near.npy"),
        (
            "ids", "--data={data}", "--name=flat", _VECTORS,
            "--method=balanced", "--sizes=256", "--collisions=item",
        ),
    ),
)  # fmt: skip

OWN = replace(
    TEXT,
    name="beauty-own-code",
    prepare=TEXT.prepare[:3],
    settings=(
        "data.catalog=",
        "train.item_loss=0",
        "train.later_codes=1",
        "model.path=runs/beauty_own_code",
        "train.out=runs/beauty_own_code",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_beauty_text", __file__, TEXT, OWN))
