# SPDX-License-Identifier: Apache-2.0
"""Generators on Amazon Industrial and Scientific by the recipe of Beauty's, over HTTP: nothing differs but the data.

One has ids of two codes, in which texts count too, and one a code of each item's own (quality_beauty_text). Split and
texts are MiniOneRec's, its semantic ids are not used. Targets: LC-Rec as published on this split.

    JGR_DATA=FOLDER python -m benchmarks.quality_industrial_text      FOLDER holds amazon-industrial-minionerec
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality import benchmark
from benchmarks.quality_beauty_text import OWN as BEAUTY_OWN
from benchmarks.quality_beauty_text import TEXT as BEAUTY_TEXT
from benchmarks.quality_industrial import INDUSTRIAL

# The source brings ids of its own, which stand where Beauty's have no name.
_ITEMS = ("ids", "--data={data}", "--name=items", "--method=item")
_REST = BEAUTY_TEXT.prepare[2:]

TEXT = replace(
    INDUSTRIAL,
    name="industrial-text",
    config="industrial_text.py",
    sasrec="",
    above_rules=True,
    targets={"hr@10": 0.1332, "ndcg@10": 0.0952},
    prepare=(("prepare", "--source=minionerec", "--raw={raw}", "--out={data}"), _ITEMS, *_REST),
)

OWN = replace(
    TEXT,
    name="industrial-own-code",
    prepare=TEXT.prepare[:3],
    settings=(
        "data.catalog=items",
        *BEAUTY_OWN.settings[1:3],
        "model.path=runs/industrial_own_code",
        "train.out=runs/industrial_own_code",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_industrial_text", __file__, TEXT, OWN))
