# SPDX-License-Identifier: Apache-2.0
"""A generator on Amazon Sports and Outdoors by the recipe of Beauty's, over HTTP: a code of each item's own, and texts.

The texts are short ones of IDGenRec. The steps are as many passes over the users as on Beauty; nothing else differs
but the data. Targets: those of HSTU there, .05 / .03; the best that is published for a generator is .0422 / .0226.

    JGR_DATA=FOLDER python -m benchmarks.quality_sports_text      FOLDER holds amazon-sports
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality import benchmark
from benchmarks.quality_beauty_text import OWN as BEAUTY_OWN
from benchmarks.quality_counting_sports import TASK as COUNTING

OWN = replace(
    BEAUTY_OWN,
    name="sports-own-code",
    raw=COUNTING.raw,
    counts=(189_543, 35_598, 35_598),
    targets=COUNTING.targets,
    published=COUNTING.published,
    prepare=(("prepare", "--source=amazon-sports", "--raw={raw}", "--out={data}"), *BEAUTY_OWN.prepare[1:]),
    settings=(
        *BEAUTY_OWN.settings[:3],
        "data.path=runs/data/sports_text",
        "train.item_vectors=runs/data/sports_text_words.npy",
        "train.steps=2560",
        "model.path=runs/sports_own_code",
        "train.out=runs/sports_own_code",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_sports_text", __file__, OWN))
