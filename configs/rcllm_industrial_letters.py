# SPDX-License-Identifier: Apache-2.0
"""A decoder that answers by the letters of candidates in prompts of plain order, for RcLLM: Amazon Industrial.

jgr prepare --source=minionerec --raw=FOLDER --out=runs/data/industrial_titles --bpe_vocab=4000
jgr ids --data=runs/data/industrial_titles --method=item --name=items
jgr train --config=lrurec_industrial
jgr vectors --config=rcllm_industrial_items --out=runs/data/industrial_titles_words.npy
jgr train --config=rcllm_industrial_items
jgr train --config=rcllm_industrial_letters $SHORT
jgr train --config=rcllm_industrial_letters $LETTERS
jgr train --config=rcllm_industrial_letters

SHORT="--set=train.start=runs/rcllm_industrial_items --set=train.out=runs/rcllm_industrial_short --set=rank.item_span=2
--set=rank.tokens=160,1024 --set=prompt.max_items=4 --set=train.max_items=4 --set=train.micro_batches=2
--set=train.lookups=1 --set=train.steps=500 --set=train.learning_rate=2e-3 --set=train.dropout=0.2
--set=train.evaluate_every=250"
LETTERS="--set=train.start=runs/rcllm_industrial_short --set=train.out=runs/rcllm_industrial_lookups
--set=train.lookups=1 --set=train.steps=130 --set=train.learning_rate=2e-3 --set=train.warmup_steps=30
--set=train.schedule=constant --set=train.evaluate_every=130"

2.6 M parameters, of which 2 M are rows of tokens: 4 layers of 128, and prompts of up to 384 tokens. It begins as a
decoder of two layers that names the next item and knows nothing of words or letters. What a letter is it learns in
short prompts that name the candidate themselves, then in whole ones, and then to answer with the letter of what the
user takes. The three trainings took 45 minutes on two cores; of 565 validation examples whose target is among the
retriever's 20 candidates it has an NDCG@10 of .562, where the retriever's order has .534.
"""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/rcllm_industrial_letters"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("rcllm_industrial.py")),
        "model.name=rcllm_industrial_letters",
        f"model.path={OUT}",
        "rank.method=list_letter",
        "rank.label=<l_{n}>",
        "rank.item_span=9",
        "rank.tokens=384,1024",
        "rank.context=1024",
        f"train.out={OUT}",
        "train.start=runs/rcllm_industrial_lookups",
        "train.tied=false",
        "train.steps=1600",
        "train.learning_rate=1.5e-3",
        "train.weight_decay=0.01",
        "train.hard_negatives=0.8",
        "train.lookups=0.2",
        "train.evaluate_every=100",
        "train.checkpoint_every=50",
        "train.validation_examples=4532",
        "train.hidden=128",
        "train.heads=4",
        "train.kv_heads=4",
        "train.mlp=256",
    )
