# SPDX-License-Identifier: Apache-2.0
"""A decoder that answers by the letters of candidates in prompts of plain order, for RcLLM: Amazon Industrial.

jgr prepare --source=minionerec --raw=FOLDER --out=runs/data/industrial_titles --bpe_vocab=4000
jgr ids --data=runs/data/industrial_titles --method=item --name=items
jgr train --config=lrurec_industrial
jgr train --config=rcllm_industrial_items
jgr train --config=rcllm_industrial_letters

4 M parameters, half of them embeddings: 4 layers of 256, and prompts of up to 560 tokens. It starts from a decoder that
knows the items' tokens and nothing of words. The trainings are for a GPU, and end after train.minutes; on a CPU,
--set=train.compute=float32 is several times as fast, and hours are needed. The step is chosen by the NDCG@10 of the
validation examples.

It is not shown to work. On an H200, beside six other trainings, 1,335 steps reached an NDCG@10 of .255 where the
retriever's own order has .535 (564 validation examples): hardly more than chance among 20. configs/rcllm_ml1m.py, of
the same recipe, reached .216 in 732 steps, and the retriever .300 (233 examples). configs/rcllm_industrial.py, which
scores each candidate by its own token, has .547.
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
        "rank.item=<sid>{title}{sid}",  # the same token begins each candidate, and is nowhere in a history
        "rank.item_span=13",
        "rank.tokens=560,1120",
        "rank.context=1120",
        "batching.max_tokens=1120",
        f"train.out={OUT}",
        "train.start=runs/rcllm_industrial_items",
        "train.steps=20000",
        "train.minutes=3.6",
        "train.batch=64",
        "train.micro_batches=1",
        "train.warmup_steps=600",
        "train.dropout=0.2",
        "train.compute=bfloat16",
        "train.hard_negatives=0.8",
        "train.evaluate_every=400",
        "train.checkpoint_every=20000",
        "train.validation_examples=4532",
        "train.hidden=256",
        "train.heads=8",
        "train.mlp=448",
    )
