# SPDX-License-Identifier: Apache-2.0
"""Layers in a stack or apart, and the last one for the places that are read: the same numbers, for less work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import CacheConfig
from jgr.models import beam, decoder, generators, packed, params, quantize
from jgr.models.decoder import DecoderConfig, DecoderParams, Family, Prefill
from jgr.models.generators import with_layers_apart, with_layers_joined
from jgr.models.kv import CachedKV
from jgr.models.lazy_decoder import LazyConfig
from jgr.models.params import layer_of
from jgr.ops.quantized import Quantized
from jgr.prompt.layouts import ITEM_PREFIX, Kind, Tokens
from jgr.serving.decoders.caching import kv_cells

CFG = DecoderConfig(
    family="qwen3", vocab_size=64, hidden=64, layers=4, heads=8, kv_heads=2, head_dim=16, mlp=192,
    rope_theta=10_000.0, norm_eps=1e-6, tied=True, max_position=512,
)  # fmt: skip
LAZY = LazyConfig(
    vocab_size=39, first_tokens=(3, 15, 27), level_sizes=(12, 12, 12), max_items=6, hidden=32, layers=3, heads=4,
    kv_heads=2, head_dim=8, mlp=48, context_heads=2, context_layers=2, context_parts=2, experts=5, experts_active=2,
    expert_mlp=16, dense_layers=1,
)  # fmt: skip
BATCH, COUNT = 2, 24
HOLDINGS = pytest.mark.parametrize(
    "held", [lambda w: w, with_layers_apart, with_layers_joined], ids=["stack", "apart", "joined"]
)


def prefill(weights: DecoderParams, cfg: DecoderConfig, tokens: Any, lengths: Any, **options: Any) -> Prefill:
    """Compiled over the weights and tokens; cached tokens are given by a function, which is no argument."""
    return jax.jit(lambda w, x, n: decoder.prefill(w, cfg, x, n, **options))(weights, tokens, lengths)


def draw(cfg: DecoderConfig = CFG) -> DecoderParams:
    weights: DecoderParams = params.initialize(decoder.spec(cfg), jax.random.key(0))
    return weights


def prompts() -> tuple[Any, Any]:
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, (BATCH, COUNT)).astype(np.int32)
    return tokens, np.array([COUNT, 9], np.int32)


def segments() -> dict[str, Any]:
    """Two items and a user's text in each row, behind three cached tokens of the user; half of the items repaired."""
    kind = np.repeat([Kind.ITEM, Kind.ITEM, Kind.USER], 8)[None].repeat(BATCH, 0)
    segment, place = np.repeat([0, 1, 2], 8)[None].repeat(BATCH, 0), np.arange(COUNT)[None].repeat(BATCH, 0)
    zeros = np.zeros_like(kind)
    described = Tokens(*(x.astype(np.int32) for x in (zeros, segment, kind, place + 3, place + 3)))
    cached = np.arange(3)[None].repeat(BATCH, 0)
    of_cached = Tokens(
        *(x.astype(np.int32) for x in (cached * 0, cached * 0 + 2, cached * 0 + Kind.USER, cached, cached))
    )
    kv = jax.random.normal(jax.random.key(3), (CFG.layers, 2, BATCH, CFG.kv_heads, 3, CFG.head_dim))
    return {
        "segments": described,
        "layout": ITEM_PREFIX,
        "before": CachedKV(of_cached, lambda layer: (kv[layer, 0], kv[layer, 1])),
        "seen_by": np.where(segment == 1, 5, -1).astype(np.int32),
    }


@HOLDINGS
@pytest.mark.parametrize("layers", [4, 1])
@pytest.mark.parametrize("made", [dict, segments], ids=["plain", "segments"])
def test_what_is_read_is_what_the_whole_prompt_gives(
    held: Callable[..., Any], layers: int, made: Callable[[], dict[str, Any]]
) -> None:
    """Against the reference form of attention, over whole stacks; keys and values are those of every token."""
    cfg, options, (tokens, lengths) = dataclasses.replace(CFG, layers=layers), made(), prompts()
    if "before" in options:
        lengths[:] = COUNT
    weights, read = draw(cfg), np.array([[0, 5, 5], [8, 1, 3]], np.int32)
    want: Prefill = prefill(weights, cfg, tokens, lengths, attention="reference", **options)
    got: Prefill = prefill(held(weights), cfg, tokens, lengths, read=read, **options)
    assert got.hidden.shape == (BATCH, 3, cfg.hidden)
    np.testing.assert_allclose(got.hidden, np.take_along_axis(want.hidden, read[..., None], 1), atol=1e-5)
    for ours, theirs in zip(got.context, want.context, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(ours[:, row, :, :length], theirs[:, row, :, :length], atol=1e-5)


@HOLDINGS
def test_more_places_than_tokens_and_every_layer(held: Callable[..., Any]) -> None:
    tokens, lengths = prompts()
    want = prefill(draw(), CFG, tokens, lengths, keep_layers=True, attention="reference")
    read = np.broadcast_to(np.arange(COUNT, dtype=np.int32), (BATCH, COUNT))[:, ::-1]
    got = prefill(held(draw()), CFG, tokens, lengths, keep_layers=True, read=read)
    there = np.arange(COUNT) < lengths[:, None]
    np.testing.assert_allclose(
        np.asarray(got.hidden)[:, ::-1][there], np.asarray(want.hidden)[there], atol=1e-5
    )
    np.testing.assert_allclose(np.asarray(got.layers)[:, there], np.asarray(want.layers)[:, there], atol=1e-5)


SHORT = dataclasses.replace(LAZY, first_tokens=LAZY.first_tokens[:2], level_sizes=LAZY.level_sizes[:2])


@pytest.mark.parametrize("cfg", [dataclasses.replace(CFG, layers=2), SHORT], ids=["decoder", "lazy"])
def test_layers_of_a_gpu_search_and_rank_as_a_stack_does(cfg: DecoderConfig | LazyConfig) -> None:
    weights = params.initialize(generators.generator(cfg).spec(cfg), jax.random.key(1))
    levels = tuple(np.arange(first, first + 12, dtype=np.int32) for first in SHORT.first_tokens)
    tree = PrefixTree.build(np.random.default_rng(2).integers(0, 12, (90, 2)).astype(np.int32))
    tokens, lengths = prompts()
    tokens, lengths, widths = tokens % 39, lengths // 2 * 2, np.full(BATCH, 6, np.int32)
    found, ranked = [], []
    for held in (weights, with_layers_joined(weights)):
        tables = beam.catalog_tables(tree, levels, held)
        found.append(beam.recommend(held, tables, tokens, lengths, widths, cfg=cfg, width=6))
        ranked.append(beam.rank(held, tables, tokens, lengths, found[0].leaves, cfg=cfg))
    np.testing.assert_allclose(ranked[0], found[0].scores, atol=1e-4)
    np.testing.assert_array_equal(found[0].leaves, found[1].leaves)
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=1e-5)
    np.testing.assert_allclose(ranked[0], ranked[1], atol=1e-5)


def in_8_bits(stack: jax.Array) -> jax.Array | Quantized:
    """A stack of matrices quantised; other weights as they are."""
    if stack.ndim < 3:
        return stack
    each = [quantize.rounded(np.asarray(matrix), "int8") for matrix in stack]
    return Quantized(*(jnp.stack([getattr(q, name) for q in each]) for name in ("values", "scale")))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_joined_layers_have_the_biases_and_the_factors_of_each(family: Family, kind: str) -> None:
    """One layer, whose heads and values are taken as they are where a prompt is repaired."""
    cfg = dataclasses.replace(CFG, family=family, layers=1)
    weights = draw(cfg)
    rng = np.random.default_rng(3)
    drawn = {
        name: jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
        for name in ("bq", "bk", "bv", "attention_norm", "mlp_norm")
        if (x := getattr(weights.layers, name)) is not None
    }
    weights = dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, **drawn))
    if kind == "int8":
        weights = dataclasses.replace(weights, layers=jax.tree.map(in_8_bits, weights.layers))
    tokens, lengths = prompts()
    want, got = (prefill(held, cfg, tokens, lengths) for held in (weights, with_layers_joined(weights)))
    np.testing.assert_allclose(got.hidden[0], want.hidden[0], atol=1e-5)
    h, turn = want.hidden, decoder.rotations(cfg, jnp.broadcast_to(jnp.arange(COUNT), (BATCH, COUNT)))
    of_stack, of_joined = (
        layer_of(held(weights).layers, 0) for held in (with_layers_apart, with_layers_joined)
    )

    @jax.jit
    def taken(layer: Any) -> tuple[Any, jax.Array]:
        return decoder.heads_of(cfg, layer, h, turn), decoder.values(cfg, layer, h[0])

    (heads, found), (joined, of_joined_found) = taken(of_stack), taken(of_joined)
    for a, b in zip(heads, joined, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for own in (found, of_joined_found):
        np.testing.assert_allclose(own, a[0].reshape(COUNT, -1), atol=1e-5)


def flops(call: Callable[..., Any], *arguments: Any) -> float:
    return float(jax.jit(call).lower(*arguments).cost_analysis()["flops"])


SAVED_PER_TOKEN = 2 * CFG.hidden * (2 * CFG.heads * CFG.head_dim + 3 * CFG.mlp)
"""Of a token's last layer: its query, what attention gives, and the mlp; its key and value are still wanted."""


def test_a_generator_reads_its_prompt_for_less() -> None:
    """Layers apart, so that all are counted; a loop's body counts once."""
    weights, tokens = with_layers_apart(draw()), np.zeros((1, 128), np.int32)
    lengths = np.array([128], np.int32)
    whole = flops(lambda w, x, n: decoder.prefill(w, CFG, x, n)[:2], weights, tokens, lengths)
    begun = flops(lambda w, x, n: decoder.begin(w, CFG, x, n), weights, tokens, lengths)
    assert whole - begun > 127 * SAVED_PER_TOKEN
    assert 0.75 < begun / whole < 0.85


def test_candidates_in_the_prompt_are_scored_for_less() -> None:
    weights, count = with_layers_apart(draw()), 128
    kv = kv_cells(CacheConfig(), CFG, "float32", 4, 1 << 16)
    pool = np.zeros((4, 1 << 14), np.uint32)
    described, cached = (Tokens(*[np.zeros(n, np.int32)] * 5) for n in (count, 16))
    row = packed.Row(
        np.zeros(count, np.int32),
        described,
        np.zeros(count, np.int32),
        np.zeros((16, kv.parts), np.int32),
        cached,
    )

    def taken(candidates: int) -> float:
        asked = packed.Asked(*[np.zeros(candidates, np.int32)] * 3)
        return flops(lambda *x: packed.rank(*x, cfg=CFG, kv=kv), weights, jnp.asarray(pool), row, asked)

    assert taken(count) - taken(8) > (count - 8) * SAVED_PER_TOKEN
