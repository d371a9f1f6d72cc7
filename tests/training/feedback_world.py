# SPDX-License-Identifier: Apache-2.0
"""A small dataset with feedback, by a rule: users click the items of their parity, in scenario 1 the others too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ExecutorsConfig, FeedbackConfig, ModelConfig, TrainConfig
from jgr.data.datasets import Dataset
from jgr.data.prepared import Arrays

USERS, EVENTS, ITEMS = 60, 20, 12
CLICK, LIKE, UNRECORDED = 1, 2, 4
MONDAY = 1_651_449_600


def world() -> Dataset:
    """The first 4 events of each user are unrecorded; 10 are learnt from, 3 validate, 3 test. Two hours apart."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, ITEMS, (USERS, EVENTS))
    scenarios = rng.integers(0, 2, (USERS, EVENTS))
    clicked = (rows % 2 == np.arange(USERS)[:, None] % 2) | (scenarios == 1)
    actions = np.where(clicked, CLICK, 0) | np.where(clicked & (rows < 4), LIKE, 0)
    actions[:, :4], scenarios[:, :4] = UNRECORDED, -1
    times = MONDAY + 7200 * np.arange(EVENTS) + np.arange(USERS)[:, None]
    offsets = np.arange(USERS + 1) * EVENTS

    def examples(places: range) -> np.ndarray:
        user = np.repeat(np.arange(USERS), len(places))
        at = user * EVENTS + np.tile(np.array(places), USERS)
        return np.stack([user, offsets[user], at, at])

    arrays = Arrays(
        rows.ravel().astype(np.int32),
        offsets,
        offsets[:-1] + 14,
        examples(range(1, 14)),
        examples(range(14, 17)),
        examples(range(17, 20)),
        times.ravel(),
        actions.ravel().astype(np.int32),
        scenarios.ravel().astype(np.int32),
    )
    ids = tuple(f"i{row}" for row in range(ITEMS))
    arrays.check(ITEMS, tuple(map(str, range(USERS))))
    catalog = Catalog.build(ids, [(f"<a_{row}>",) for row in range(ITEMS)], [{}] * ITEMS)
    return Dataset(
        catalog, arrays.interactions(tuple(map(str, range(USERS))), ("click", "like", "unrecorded"))
    )


def config(out: Path, model: str = "stu") -> Config:
    return Config(
        model=ModelConfig(name=model, path=str(out), compilation_cache=""),
        executors=ExecutorsConfig(sizes=(4,), number=1, streams=1),
        train=TrainConfig(
            model=model,  # type: ignore[arg-type]
            out=str(out),
            steps=120,
            batch=64,
            learning_rate=1e-2,
            warmup_steps=10,
            dropout=0.0,
            max_items=8,
            checkpoint_every=60,
            evaluate_every=60,
            hidden=16,
            layers=1,
            heads=2,
            kv_heads=2,
            head_dim=8,
            mlp=16,
        ),
        feedback=FeedbackConfig(tasks=("click", "like"), weights=(1.0, 0.5), candidates=3),
    )
