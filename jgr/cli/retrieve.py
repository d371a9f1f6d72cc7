# SPDX-License-Identifier: Apache-2.0
"""`jgr retrieve`: finds candidates for a split's users by a retriever that `jgr train` made, and counts the targets
among them.

The last line of stdout is the result as one JSON document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr.cli import console
from jgr.config import UserError

HELP = "find candidates for the users of a dataset, which a ranker then orders"


def define_flags() -> None:
    flags.DEFINE_string(
        "retriever", None, "folder of a LRURec, SASRec or HSTU that jgr train made; default: train.out"
    )
    flags.DEFINE_enum("split", "test", ("valid", "test"), "the split whose users and targets are taken")
    flags.DEFINE_integer("k", 100, "candidates per user", lower_bound=1, upper_bound=10_000)
    flags.DEFINE_bool("exclude_history", False, "never name an item of the history")
    flags.DEFINE_string("out", None, ".npz file for the candidates; default: only count targets")


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    config, values = console.load(flags.FLAGS), flags.FLAGS
    folder = values.retriever or config.train.out
    if not folder:
        raise UserError("--retriever: the folder that jgr train made is not set")
    if values.out and not values.out.endswith(".npz"):
        raise UserError(f"--out must end in .npz, not '{values.out}'")
    from jgr.data.datasets import load_dataset
    from jgr.evaluation.candidates import retrieve, save_candidates
    from jgr.models import retrievers
    from jgr.models.manifest import refuse_learnt_valid

    if values.split == "valid":
        refuse_learnt_valid(folder, "--split", "give --split=test")
    dataset = load_dataset(config.data)
    examples = getattr(dataset.interactions, values.split)
    if not len(examples):
        raise UserError(f"--split: the dataset has no {values.split} examples")
    cfg, params = retrievers.load_for(Path(folder), dataset.catalog.item_ids)
    found = retrieve(params, cfg, dataset, examples, values.k, exclude_seen=values.exclude_history)
    if values.out:
        save_candidates(found, Path(values.out))
    name = retrievers.retriever(cfg).NAME
    recalls = {f"recall@{k}": round(found.recall(k), 4) for k in (10, 20, 50, values.k) if k <= values.k}
    eligible, users = int(found.eligible.sum()), len(set(examples.users.tolist()))
    asked = f"{len(examples):,} examples ({users:,} users)"
    print(f"{name}: the target of {eligible:,} of {asked} is among {values.k} candidates")
    report = {"retriever": name, "split": values.split, "exclude_history": values.exclude_history}
    counts = {"examples": len(examples), "users": users, "eligible": eligible}
    print(json.dumps({**report, **counts, **recalls}))
    return 0
