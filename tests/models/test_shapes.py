# SPDX-License-Identifier: Apache-2.0
"""The named models have the parameters that their publishers count, or that their names say."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jgr.models import params, shapes
from jgr.models.generators import generator

# Of the published checkpoints, whose vocabulary has no semantic ids: in all, and without the embedding.
QWEN3 = {
    "qwen3-0.6b": (596_049_920, 440_467_456),
    "qwen3-1.7b": (1_720_574_976, 1_409_410_048),
    "qwen3-4b": (4_022_468_096, 3_633_511_936),
}


@pytest.mark.parametrize("name", QWEN3)
def test_qwen3_has_the_published_number_of_parameters(name: str) -> None:
    cfg = dataclasses.replace(shapes.named(name), vocab_size=151_936)
    total = params.count(generator(cfg).spec(cfg))
    assert (total, total - 151_936 * cfg.hidden) == QWEN3[name]


@pytest.mark.parametrize("name", [name for name in shapes.NAMES if name.startswith("onerec")])
def test_onerec_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    cfg = shapes.named(name)
    assert cfg.hidden == cfg.heads * cfg.head_dim
    billions = params.count(generator(cfg).spec(cfg)) / 1e9
    assert float(name.split("-")[2].removesuffix("b")) == pytest.approx(billions, rel=0.25)


def test_semantic_ids_lie_within_the_vocabulary_where_openonerec_has_them() -> None:
    qwen = shapes.level_tokens(shapes.named("qwen3-1.7b"))
    assert [int(tokens[0]) for tokens in qwen] == [151_669, 159_861, 168_053] and qwen[2][-1] == 176_244
    lazy = shapes.named("onerec-v2-0.1b")
    tokens = shapes.level_tokens(lazy)
    assert [int(t[0]) for t in tokens] == list(lazy.first_tokens) and tokens[2][-1] == lazy.vocab_size - 1


def test_the_context_of_a_lazy_decoder_is_one_tensor_for_all_layers() -> None:
    """What xGR's shared cache comes to: bytes of a history of 3000 items."""
    cfg = shapes.named("onerec-v2-1b")
    weights = params.abstract(generator(cfg).spec(cfg), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((1, 9000), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    _, state = jax.eval_shape(lambda *x: generator(cfg).begin(x[0], cfg, *x[1:]), weights, *ints)
    assert state.context.k.shape == (1, 1, 1, 3000, 128)
    assert state.bos.k.shape == (18, 1, 14, 1, 128)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no model 'qwen3-7b'; there are qwen3-0.6b"):
        shapes.named("qwen3-7b")
