# SPDX-License-Identifier: Apache-2.0
"""Memory of the compiled generation program, from the compiler's own analysis (XGR-3, XGR-11)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import beam, decoder, params
from tests.models.test_beam import CFG

# Keys and values weigh much and scores little, so that one copy of a prompt too many could not hide.
DEEP = dataclasses.replace(CFG, layers=6, heads=1, kv_heads=1, head_dim=64)
TOKENS, LEVEL = 64, 12
PER_TOKEN = 2 * 4 * DEEP.layers * DEEP.kv_heads * DEEP.head_dim  # bytes of keys and values, float32


@functools.cache
def temporary_bytes(width: int, tokens: int = TOKENS, depth: int = 2) -> int:
    """Peak temporary memory of `recommend` for one prompt."""
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(rng.integers(0, LEVEL, (50, depth)).astype(np.int32))
    level_tokens = tuple((4 + np.arange(LEVEL)).astype(np.int32) for _ in range(depth))
    weights = params.initialize(decoder.spec(DEEP), jax.random.key(0))
    tables = beam.catalog_tables(tree, level_tokens, weights)
    prompt = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = beam.recommend.lower(weights, tables, prompt, one, one, cfg=DEEP, width=width)
    return int(lowered.compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.slow
def test_a_prompts_keys_and_values_exist_once_whatever_the_beam_width() -> None:
    def per_token(width: int) -> float:
        return (temporary_bytes(width, 4 * TOKENS) - temporary_bytes(width)) / (3 * TOKENS)

    # Scores of one layer, and their exponentials, are all that has beams and prompt tokens for axes.
    scores = 2 * 4 * DEEP.heads
    assert per_token(64) - per_token(8) <= 2 * scores * (64 - 8) < PER_TOKEN
    assert PER_TOKEN <= per_token(8) < 3 * PER_TOKEN


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    # Of a step only its beams' keys and values stay, and a few integers.
    width, steps = 64, 2
    kept = steps * width * (PER_TOKEN + 64)
    grown = temporary_bytes(width, depth=2 + steps) - temporary_bytes(width)
    assert 0 < grown <= 1.25 * kept
