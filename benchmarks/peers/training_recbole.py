# SPDX-License-Identifier: Apache-2.0
"""RecBole's SASRec, trained by RecBole: its dataset, its loader, its model and its trainer's own loop over batches.

Sizes, dropout, batch and learning rate are jgr's; the rest is RecBole's: every prefix of a history is an example of its
own, with one target, and a batch is padded to the longest history. So one of its steps learns `batch` targets, where
one of jgr's learns every target of `batch` users. Its dropout of attention weights is off, since jgr has none.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from logging import disable
from pathlib import Path
from typing import Any

import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer

from benchmarks.peers.lines import Message, serve

DATASET = "histories"


class Training:
    """A training on FOLDER/histories/histories.inter, whose sizes are those of FOLDER/sizes.json."""

    def __init__(self, folder: str) -> None:
        sizes = json.loads((Path(folder) / "sizes.json").read_text())
        train = sizes["train"]
        settings = {
            "data_path": folder,
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "USER_ID_FIELD": "user_id",
            "ITEM_ID_FIELD": "item_id",
            "TIME_FIELD": "timestamp",
            "MAX_ITEM_LIST_LENGTH": sizes["max_items"],
            "hidden_size": sizes["hidden"],
            "inner_size": sizes["mlp"],
            "n_layers": sizes["layers"],
            "n_heads": sizes["heads"],
            "hidden_dropout_prob": train["dropout"],
            "attn_dropout_prob": 0.0,
            "loss_type": "CE",
            "train_neg_sample_args": None,
            "train_batch_size": train["batch"],
            "learning_rate": train["learning_rate"],
            "learner": "adam",
            "use_gpu": False,
            "checkpoint_dir": folder,
            "show_progress": False,
        }
        config = Config(model="SASRec", dataset=DATASET, config_dict=settings)
        dataset = create_dataset(config)
        loader, _, _ = data_preparation(config, dataset)
        self._trainer = Trainer(config, SASRec(config, loader.dataset))
        self._batches = self._endless(loader)
        self._batch = train["batch"]

    @staticmethod
    def _endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def answer(self, request: Message) -> Message:
        count = request["count"]
        start = time.perf_counter()
        total = self._trainer._train_epoch(itertools.islice(self._batches, count), 0)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "loss": total / count, "targets": count * self._batch}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    disable()
    serve(lambda folder: Training(folder).answer, ("recbole", "torch"))
