# SPDX-License-Identifier: Apache-2.0
"""Biased attention with a bias that is looked up once: every form against float64, of histories, of candidates behind
a context, and of any tokens; padding, gradients, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops.biased_attention import (
    Bias,
    Causal,
    Context,
    Places,
    Targets,
    biased_attention,
    pallas_rows,
    rows,
    spread,
)
from jgr.ops.biased_attention.bias import bucket
from jgr.ops.segment_attention.pallas_triton import Tiles
from jgr.prompt.layouts import Kind, Tokens

Array = np.ndarray[Any, Any]
FORMS = ("reference", "xla", "pallas_interpret")
BATCH, HEADS, TOKENS, CACHED, DIM = 3, 2, 21, 18, 16
LENGTHS, BEHIND = np.array([21, 0, 13], np.int32), np.array([18, 5, 0], np.int32)
CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape, np.float32)


Q, K, V = (
    normal(BATCH, TOKENS, HEADS, DIM),
    normal(BATCH, HEADS, TOKENS, DIM),
    normal(BATCH, HEADS, TOKENS, DIM),
)
CONTEXT_K, CONTEXT_V = normal(BATCH, HEADS, CACHED, DIM), normal(BATCH, HEADS, CACHED, DIM)
SQUARE, ROW = normal(BATCH, 1, TOKENS, TOKENS), normal(BATCH, HEADS, 1, CACHED + 1)
SCALE = np.array([0.1, 0.3, 0.5], np.float32)
REAL = np.arange(TOKENS) < LENGTHS[:, None]
TRIANGLE = np.tri(TOKENS, dtype=bool) & REAL[:, :, None] & REAL[:, None]
OF_HISTORY = (np.arange(CACHED) < BEHIND[:, None])[:, None] & REAL[:, :, None]
OF_TARGETS = np.concatenate([OF_HISTORY, np.eye(TOKENS, dtype=bool) & REAL[:, :, None]], axis=2)


def formula(k: Array, v: Array, bias: Array, seen: Array, silu: bool = False) -> Array:
    """[B, T, H, d] in float64; bias: [B, H, T, S]. A row that sees nothing is 0."""
    q, k, v, bias = (x.astype(np.float64) for x in (Q, k, v, bias))
    product, scale = np.einsum("bthd,bhsd->bhts", q, k), SCALE[:, None, None, None]
    seen = np.broadcast_to(seen[:, None], product.shape)
    if silu:
        logits = product * scale + bias
        weights = np.where(seen, logits / (1 + np.exp(-logits)), 0) / 7
    else:
        weights = np.where(seen, np.exp((product + bias) * scale), 0)
        weights = weights / np.where(seen.any(-1), weights.sum(-1), 1)[..., None]
    return np.einsum("bhts,bhsd->bthd", weights, v)


def compiled(**options: Any) -> Any:
    call = functools.partial(biased_attention, scale=SCALE, **options)
    return jax.jit(call, compiler_options=CHEAP)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "QUERIES", 8)
    monkeypatch.setattr(pallas_rows, "choose_tiles", lambda *sizes: Tiles(16, 16, warps=1, stages=1))


@pytest.mark.parametrize("form", FORMS)
def test_a_history(form: str) -> None:
    dirty = [np.where(REAL[:, None, :, None], x, np.nan) for x in (K, V)]
    got = compiled(tokens=Causal(LENGTHS), bias=SQUARE, implementation=form)(Q, *dirty)
    np.testing.assert_allclose(got, formula(K, V, SQUARE, TRIANGLE), atol=3e-6)


@pytest.mark.parametrize("at_once", [1 << 20, 1])
@pytest.mark.parametrize("form", FORMS)
def test_candidates_behind_a_context(form: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_LOGIT_BYTES", at_once)
    there = (np.arange(CACHED) < BEHIND[:, None])[:, None, :, None]
    context = Context(CONTEXT_K, np.where(there, CONTEXT_V, np.nan), Causal(BEHIND))
    got = compiled(tokens=Targets(LENGTHS), context=context, bias=ROW, implementation=form)(Q, K, V)
    keys = [np.concatenate([x, y], axis=2) for x, y in ((CONTEXT_K, K), (CONTEXT_V, V))]
    bias = np.concatenate([ROW[..., :-1], np.repeat(ROW[..., -1:], TOKENS, axis=3)], axis=3)
    np.testing.assert_allclose(got, formula(*keys, bias, OF_TARGETS), atol=3e-6)


@pytest.mark.parametrize("form", FORMS)
def test_candidates_by_silu_without_a_bias(form: str) -> None:
    context = Context(CONTEXT_K, CONTEXT_V, Causal(BEHIND))
    call = compiled(
        tokens=Targets(LENGTHS), context=context, activation="silu", divisor=7.0, implementation=form
    )
    keys = [np.concatenate([x, y], axis=2) for x, y in ((CONTEXT_K, K), (CONTEXT_V, V))]
    want = formula(*keys, np.zeros(1), OF_TARGETS, silu=True)
    np.testing.assert_allclose(call(Q, K, V), want, atol=3e-6)


@pytest.mark.parametrize("form", FORMS[:2])
def test_any_tokens(form: str) -> None:
    """Two requests in a row; a bias for each head and each key."""
    place = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (BATCH, TOKENS))
    request = np.where(REAL, place // 9, -1)
    kind = np.full_like(place, int(Kind.USER))
    bias = normal(1, HEADS, 1, TOKENS)
    call = compiled(tokens=Tokens(request, request, kind, place, place), bias=bias, implementation=form)
    seen = TRIANGLE & (request[:, :, None] == request[:, None])
    np.testing.assert_allclose(call(Q, K, V), formula(K, V, bias, seen), atol=3e-6)


def test_gradients_are_the_references() -> None:
    weight = normal(*Q.shape)

    def loss(form: str, q: Any, k: Any, v: Any, bias: Any, row: Any, context: Any) -> jax.Array:
        call = functools.partial(biased_attention, scale=SCALE, implementation=form)
        out = call(q, k, v, Causal(LENGTHS), bias=bias)
        out += call(q, k, v, Targets(LENGTHS), context=Context(*context, Causal(BEHIND)), bias=row)
        return (out * weight).sum()

    given = (Q, K, V, SQUARE, ROW, (CONTEXT_K, CONTEXT_V))
    want, got = (
        jax.jit(jax.grad(functools.partial(loss, form), tuple(range(6))), compiler_options=CHEAP)(*given)
        for form in ("reference", "xla")
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, want)


def test_a_spread_bias_is_its_tables_at_every_pair() -> None:
    positions, times = normal(2, 1, 9), normal(2, 1, 12)
    asked, happened = RNG.integers(0, 500, (2, 4)), RNG.integers(0, 500, (2, 5))
    queries, keys = RNG.integers(0, 9, (2, 4)), RNG.integers(0, 9, (2, 5))
    tables = Bias(jnp.asarray(positions), jnp.asarray(times))
    got = spread(
        tables,
        Places(jnp.asarray(queries), jnp.asarray(asked)),
        Places(jnp.asarray(keys), jnp.asarray(happened)),
    )
    for b, t, s in np.ndindex(2, 4, 5):
        at = np.clip(4 + keys[b, s] - queries[b, t], 0, 8)
        of_time = int(bucket(jnp.asarray(asked[b, t] - happened[b, s]), 12))
        assert got[b, 0, t, s] == positions[b, 0, at] + times[b, 0, of_time]


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"bias is \[3, 1, 20, 21\], and must be \[1 or 3, 1 or 2, 1 or 21, 21\]"
    ):
        biased_attention(Q, K, V, Causal(LENGTHS), bias=jnp.asarray(SQUARE[:, :, 1:]))
    with pytest.raises(ValueError, match="its tokens must be Causal"):
        biased_attention(Q, K, V, Targets(LENGTHS))
    with pytest.raises(ValueError, match="no keys, window or layout"):
        context = Context(CONTEXT_K, CONTEXT_V, Causal(BEHIND))
        biased_attention(
            Q, K, V, Targets(LENGTHS), context=context, window=jnp.ones((BATCH, TOKENS), jnp.int32)
        )
