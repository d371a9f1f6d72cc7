# SPDX-License-Identifier: Apache-2.0
"""A decoder that ranks candidates in prompts of plain order, for RcLLM: Amazon Industrial, in its titles.

jgr prepare --source=minionerec --raw=FOLDER --out=runs/data/industrial_titles --bpe_vocab=4000
jgr ids --data=runs/data/industrial_titles --method=item --name=items
jgr train --config=lrurec_industrial
jgr train --config=rcllm_industrial

3 M parameters, half of them embeddings: 4 layers of 192, and prompts of up to 512 tokens. The 1,500 steps, about seven
times all users, took some four hours on two cores of a CPU that others used too. The last step is kept: of 400
validation examples 46 have their target among the candidates, too few to choose a step by. By those step 800 was the
best; on all 564 of the validation split it has an NDCG@10 of .498, and the last one .547. A training that was ended
goes on by the same command.

16 M parameters take twelve hours of two idle cores: --set=train.hidden=384 --set=train.layers=8 --set=train.head_dim=64
--set=train.mlp=1024 --set=train.learning_rate=5e-4 --set=train.steps=2000. With --set=rank.tokens=1024
--set=train.negatives=49 --set=train.start=FOLDER and another train.out a model goes on to longer prompts.
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

OUT = "runs/rcllm_industrial"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="rcllm_industrial", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{title}{sid}", max_items=10),
        beam=BeamConfig(width=1),
        rank=RankConfig(
            method="item_token",
            item="{title}{sid}",
            instruction="<sid>{last}",
            item_span=12,
            requests=2,
            tokens=(512, 1024),
            context=(1024,),
            candidates=64,
        ),
        cache=CacheConfig(
            policy="blocks", repair_tokens=1, repair_share=0.3, repair_by="attention", device_mb=1024
        ),
        profiles=ProfilesConfig(batch=(1,), tokens=(512,), widths=(1,), candidates=(1,)),
        batching=BatchingConfig(max_tokens=1024),
        data=DataConfig(kind="prepared", path="runs/data/industrial_titles", catalog="items"),
        train=TrainConfig(
            model="ranker",
            layouts="causal",
            out=OUT,
            steps=1500,
            batch=32,
            micro_batches=4,
            learning_rate=1e-3,
            warmup_steps=100,
            weight_decay=0.1,
            dropout=0.1,
            negatives=19,
            retriever="runs/lrurec_industrial",
            max_items=10,
            checkpoint_every=20,
            hidden=192,
            layers=4,
            heads=6,
            kv_heads=2,
            head_dim=32,
            mlp=512,
        ),
    )
