# SPDX-License-Identifier: Apache-2.0
"""The validation of a training ranks what a server would return."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jgr.catalog.catalog import Catalog
from jgr.config import Config, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import Examples, Ragged, leave_one_out
from jgr.evaluation.validation import generator_recall
from jgr.models import decoder, params
from jgr.prompt.tokens import semantic_id_tokenizer

IDS = 4


def test_items_that_share_an_id_are_found_up_to_beam_items_per_id() -> None:
    """Every id has two items, and the search returns every id: the second item is found where both are returned."""
    names = [[f"<a{row // 2}>"] for row in range(2 * IDS)]
    catalog = Catalog.build([str(row) for row in range(2 * IDS)], names, [{}] * (2 * IDS))
    firsts, seconds = np.arange(0, 2 * IDS, 2, np.int32), np.arange(1, 2 * IDS, 2, np.int32)
    histories = [np.array([row], np.int32) for row in firsts]
    valid = Examples(Ragged.of(histories), seconds, np.arange(IDS, dtype=np.int32))
    dataset = Dataset(catalog, replace(leave_one_out([np.arange(3)] * IDS), valid=valid))
    cfg = decoder.DecoderConfig(
        family="qwen3", vocab_size=semantic_id_tokenizer(catalog).vocab_size, hidden=16, layers=1, heads=2,
        kv_heads=1, head_dim=8, mlp=16, rope_theta=10_000.0, norm_eps=1e-6, tied=True, max_position=64,
    )  # fmt: skip
    weights = params.initialize(decoder.spec(cfg), jax.random.key(0))
    for per_id, found in (("1", 0.0), ("2", 1.0)):
        config = override(Config(), f"beam.width={IDS}", f"beam.items_per_id={per_id}", "prompt.max_items=4")
        assert generator_recall(config, dataset)(cfg, weights) == found
