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

from jgr.config import (
    BatchingConfig,
    BeamConfig,
    CacheConfig,
    Config,
    DataConfig,
    ModelConfig,
    ProfilesConfig,
    PromptConfig,
    RankConfig,
    TrainConfig,
)

OUT = "runs/rcllm_industrial_letters"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="rcllm_industrial_letters", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{title}{sid}", max_items=10),
        beam=BeamConfig(width=1),
        rank=RankConfig(
            method="list_letter",
            item="<sid>{title}{sid}",  # the same token begins each candidate, and is nowhere in a history
            instruction="<sid>{last}",
            item_span=13,
            requests=2,
            tokens=(560, 1120),
            context=(1120,),
            candidates=64,
        ),
        cache=CacheConfig(
            policy="blocks", repair_tokens=1, repair_share=0.3, repair_by="attention", device_mb=1024
        ),
        profiles=ProfilesConfig(batch=(1,), tokens=(512,), widths=(1,), candidates=(1,)),
        batching=BatchingConfig(max_tokens=1120),
        data=DataConfig(kind="prepared", path="runs/data/industrial_titles", catalog="items"),
        train=TrainConfig(
            model="ranker",
            layouts="causal",
            out=OUT,
            start="runs/rcllm_industrial_items",
            steps=20_000,
            minutes=3.6,
            batch=64,
            learning_rate=1e-3,
            warmup_steps=600,
            weight_decay=0.1,
            dropout=0.2,
            compute="bfloat16",
            negatives=19,
            hard_negatives=0.8,
            retriever="runs/lrurec_industrial",
            max_items=10,
            evaluate_every=400,
            checkpoint_every=20_000,
            validation_examples=4532,
            hidden=256,
            layers=4,
            heads=8,
            kv_heads=2,
            head_dim=32,
            mlp=448,
        ),
    )
