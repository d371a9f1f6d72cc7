# SPDX-License-Identifier: Apache-2.0
"""A decoder that ranks the candidates in its prompt, in either layout: MovieLens 1M, each item a token of its own.

jgr prepare --source=movielens-1m-sasrec --raw=FOLDER --out=runs/data/ml1m_titles --bpe_vocab=2000
jgr ids --data=runs/data/ml1m_titles --method=item
jgr train --config=lrurec_ml1m --set data.path=runs/data/ml1m_titles
jgr train --config=items_ml1m
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

OUT = "runs/ranker_ml1m"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="ranker_ml1m", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{sid}", max_items=50),
        beam=BeamConfig(width=10),
        # A candidate is the begin of its title and its token; 8 tokens keep training on a CPU short.
        rank=RankConfig(
            method="item_token",
            item="{title}{sid}",
            instruction="<sid>{last}",
            item_span=8,
            requests=4,
            tokens=(1024, 4096),
            context=(4096,),
            candidates=400,
        ),
        cache=CacheConfig(policy="hotness"),
        profiles=ProfilesConfig(batch=(1, 8), tokens=(128,), widths=(10,)),
        batching=BatchingConfig(max_tokens=4096),
        data=DataConfig(kind="prepared", path="runs/data/ml1m_titles"),
        train=TrainConfig(
            model="ranker",
            out=OUT,
            start="runs/items_ml1m",
            steps=2400,  # half of them in each layout, if both are learnt
            batch=32,
            micro_batches=4,
            learning_rate=1e-3,
            warmup_steps=100,
            weight_decay=0.1,
            dropout=0.1,
            negatives=99,  # with the target as many as are ranked: users that read fewer in training lose recall
            retriever="runs/lrurec_ml1m",
            max_items=50,
            checkpoint_every=200,
            evaluate_every=200,
            validation_examples=800,
            hidden=64,
            layers=2,
            heads=4,
            kv_heads=4,
            head_dim=16,
            mlp=192,
        ),
    )
