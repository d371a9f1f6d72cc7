# SPDX-License-Identifier: Apache-2.0
"""A decoder that ranks the candidates in its prompt, in either layout: Amazon Beauty, each item a token of its own.

jgr prepare --source=amazon-beauty --raw=FOLDER --out=runs/data/beauty_titles --bpe_vocab=2000
jgr ids --data=runs/data/beauty_titles --method=item
jgr train --config=lrurec_beauty --set data.path=runs/data/beauty_titles
jgr train --config=items_beauty
"""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/ranker_beauty"
HISTORY = 20


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("ranker_ml1m.py")),
        "model.name=ranker_beauty",
        f"model.path={OUT}",
        f"prompt.max_items={HISTORY}",
        "profiles.tokens=64",
        "data.path=runs/data/beauty_titles",
        f"train.out={OUT}",
        "train.start=runs/items_beauty",
        "train.dropout=0.3",
        "train.learning_rate=3e-4",  # at 1e-3 the items lose what the generator knew of them
        "train.steps=1200",
        "train.retriever=runs/lrurec_beauty",
        f"train.max_items={HISTORY}",
    )
