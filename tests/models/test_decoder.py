# SPDX-License-Identifier: Apache-2.0
"""The decoder's own identities: rope, prefill then decode equals one forward, padding and neighbours, 16 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.models import decoder, params
from jgr.models.kv import BeamKV
from jgr.models.rope import RopeScaling, rope, rope_frequencies

BASE = dict(
    vocab_size=64, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48,
    rope_theta=10_000.0, norm_eps=1e-6, tied=False, max_position=64,
)  # fmt: skip
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16)
CONFIGS = {
    "qwen2": decoder.DecoderConfig(family="qwen2", **BASE),
    "qwen3": decoder.DecoderConfig(family="qwen3", **BASE),
    "llama": decoder.DecoderConfig(family="llama", rope_scaling=SCALING, **BASE),
}


def weights(cfg: decoder.DecoderConfig, dtype=jnp.float32) -> decoder.DecoderParams:
    return params.initialize(decoder.spec(cfg), jax.random.key(1), dtype)


prefill = jax.jit(decoder.prefill, static_argnames="cfg")
decode = jax.jit(decoder.decode, static_argnames="cfg")


@pytest.mark.parametrize("family", CONFIGS)
def test_prefill_then_decode_equals_one_forward(family: str) -> None:
    cfg, prompt, steps, width = CONFIGS[family], 7, 3, 5
    w = weights(cfg)
    rng = np.random.default_rng(0)
    start = rng.integers(0, 64, (2, prompt)).astype(np.int32)
    lengths = np.array([7, 4], np.int32)
    chosen = rng.integers(0, 64, (2, steps, width)).astype(np.int32)
    context = prefill(w, cfg, start, lengths).context
    beams = BeamKV()
    rows = np.broadcast_to(np.arange(width, dtype=np.int32), (2, 1, width))
    ancestors = np.zeros((2, 0, width), np.int32)
    paths = np.zeros((2, 0, width), np.int32)
    for s in range(steps):
        # After each step every beam descends from a random row, as a beam search would have it.
        ancestors = np.concatenate([ancestors, rows], 1)
        paths = np.concatenate([paths, chosen[:, s : s + 1]], 1)
        hidden, beams = decode(w, cfg, chosen[:, s], context, lengths, beams, ancestors)
        whole = np.zeros((2, width, prompt + steps), np.int32)
        for b, length in enumerate(lengths):
            whole[b, :, :length], whole[b, :, length : length + s + 1] = start[b, :length], paths[b].T
        last = np.repeat(lengths + s, width)
        full = prefill(w, cfg, whole.reshape(2 * width, -1), last + 1).hidden[np.arange(2 * width), last]
        np.testing.assert_allclose(np.asarray(hidden).reshape(2 * width, -1), full, atol=2e-5)
        parents = rng.integers(0, width, (2, 1, width))
        ancestors, paths = np.take_along_axis(ancestors, parents, 2), np.take_along_axis(paths, parents, 2)


def test_rope_at_position_0_is_identity_and_rotations_compose() -> None:
    cfg = CONFIGS["llama"]
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    rotated = {p: rope(x, *decoder.rotations(cfg, jnp.full((1, 3), p))) for p in (0, 5, 12)}
    np.testing.assert_array_equal(rotated[0], x)
    again = rope(rotated[5], *decoder.rotations(cfg, jnp.full((1, 3), 7)))
    np.testing.assert_allclose(again, rotated[12], atol=1e-5)


def test_llama3_frequencies_by_the_formula() -> None:
    cfg = CONFIGS["llama"]
    want = []
    for i in range(4):
        f = 10_000.0 ** (-2 * i / 8)
        wavelength = 2 * np.pi / f
        if wavelength < 16 / 4:
            want.append(f)
        elif wavelength > 16 / 1:
            want.append(f / 8)
        else:
            s = (16 / wavelength - 1) / (4 - 1)
            want.append((1 - s) * f / 8 + s * f)
    np.testing.assert_allclose(
        rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling), want, rtol=1e-6
    )


def test_grouped_heads_equal_repeated_heads() -> None:
    cfg = CONFIGS["qwen3"]
    w = weights(cfg)
    wide = decoder.DecoderConfig(family="qwen3", **{**BASE, "kv_heads": 4})

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x.reshape(*x.shape[:-1], 2, 8), 2, axis=-2).reshape(*x.shape[:-1], 32)

    layers = decoder.LayerParams(**{**vars(w.layers), "wk": repeat(w.layers.wk), "wv": repeat(w.layers.wv)})
    tokens, lengths = jnp.arange(10, dtype=jnp.int32)[None], jnp.array([10])
    got = prefill(w, cfg, tokens, lengths).hidden
    want = prefill(decoder.DecoderParams(w.embed, layers, w.norm, w.head), wide, tokens, lengths).hidden
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_bfloat16_follows_float32() -> None:
    cfg = CONFIGS["qwen3"]
    w16 = weights(cfg, jnp.bfloat16)
    w32 = jax.tree.map(lambda x: x.astype(jnp.float32), w16)
    tokens, lengths = jnp.arange(20, dtype=jnp.int32)[None], jnp.array([20])
    logits = [decoder.logits(w, prefill(w, cfg, tokens, lengths).hidden) for w in (w16, w32)]
    assert prefill(w16, cfg, tokens, lengths).context.k.dtype == jnp.bfloat16
    assert logits[0].dtype == jnp.float32
    scale = float(jnp.abs(logits[1]).max())
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-2 * scale)


@pytest.mark.parametrize(
    ("row", "total", "inner"),
    [
        (("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, True), 1_543_714_304, 1_310_340_608),
        (("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, False), 7_615_616_512, 6_525_621_760),
        (("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, True), 596_049_920, 440_467_456),
        (("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, False), 8_190_735_360, 6_946_075_648),
        (("llama", 128256, 2048, 16, 32, 8, 64, 8192, True), 1_235_814_400, 973_146_112),
    ],
)
def test_parameter_counts_of_published_models(row: tuple, total: int, inner: int) -> None:
    family, vocab, hidden, layers, heads, kv_heads, head_dim, mlp, tied = row
    cfg = decoder.DecoderConfig(
        family, vocab, hidden, layers, heads, kv_heads, head_dim, mlp, 1e6, 1e-6, tied, 32768
    )
    assert params.count(decoder.spec(cfg)) == total
    assert params.count(decoder.spec(cfg)) - vocab * hidden * (1 if tied else 2) == inner


def test_long_prompts_are_read_one_by_one_and_are_the_same() -> None:
    cfg = CONFIGS["qwen3"]
    w = weights(cfg)
    rows, count = decoder.ONE_BY_ONE_PROMPTS, decoder.ONE_BY_ONE_TOKENS
    tokens = np.random.default_rng(0).integers(0, 64, (rows, count)).astype(np.int32)
    lengths = np.array([count, 1, 200, 7], np.int32)
    last, state = jax.jit(decoder.begin, static_argnames="cfg")(w, cfg, tokens, lengths)
    whole = prefill(w, cfg, tokens, lengths)
    np.testing.assert_allclose(last[:, 0], whole.hidden[np.arange(rows), lengths - 1], atol=2e-5)
    for row, length in enumerate(lengths):
        for got, want in zip(state.context, whole.context, strict=True):
            np.testing.assert_allclose(got[:, row, :, :length], want[:, row, :, :length], atol=2e-5)
