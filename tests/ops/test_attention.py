# SPDX-License-Identifier: Apache-2.0
"""Both attentions: every form against loops in float64, and padding without effect."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops import beam_attention as beam_op
from jgr.ops import prefill_attention as prefill_op
from jgr.ops.beam_attention import beam_attention
from jgr.ops.beam_attention import cases as beam_cases
from jgr.ops.prefill_attention import cases as prefill_cases
from jgr.ops.prefill_attention import prefill_attention
from jgr.ops.testing import Case, assert_as_close_as_naive

PREFILL = [c for c in prefill_cases.CASES if "ci" in c.tags]
BEAM = [c for c in beam_cases.CASES if "ci" in c.tags]


def softmax_mix(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One query [d] over keys and values [n, d], float64."""
    scores = k @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


def prefill_inputs(shape: Mapping[str, Any], seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    batch = len(shape["lengths"])
    q = rng.normal(size=(batch, shape["tokens"], shape["heads"], shape["dim"]))
    k, v = rng.normal(size=(2, batch, shape["kv_heads"], shape["tokens"], shape["dim"]))
    return q, k, v, np.array(shape["lengths"], np.int32)


def prefill_loop(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    out = np.zeros_like(q)
    groups = q.shape[2] // k.shape[1]
    for b, length in enumerate(lengths):
        for t in range(length):
            for h in range(q.shape[2]):
                kv = h // groups
                out[b, t, h] = softmax_mix(q[b, t, h], k[b, kv, : t + 1], v[b, kv, : t + 1])
    return out


def real_rows(x: Any, lengths: np.ndarray) -> np.ndarray:
    rows = np.asarray(x)
    return np.concatenate([rows[b, :length] for b, length in enumerate(lengths)])


@pytest.mark.parametrize("case", PREFILL, ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", ["reference", "xla", "auto"])
def test_prefill_equals_the_loop(case: Case, implementation: str) -> None:
    q, k, v, lengths = prefill_inputs(case.shape)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    got = prefill_attention(*arrays, jnp.asarray(lengths), implementation=implementation)
    naive = prefill_attention(*arrays, jnp.asarray(lengths), implementation="reference")
    exact = prefill_loop(*(np.asarray(x, np.float64) for x in arrays), lengths)
    assert_as_close_as_naive(*(real_rows(x, lengths) for x in (got, exact, naive)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_prefill_padding_has_no_effect(implementation: str) -> None:
    q, k, v, lengths = prefill_inputs(PREFILL[1].shape)
    clean = prefill_attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), lengths, implementation=implementation
    )
    for b, length in enumerate(lengths):
        q[b, length:], k[b, :, length:], v[b, :, length:] = np.nan, np.nan, np.nan
    dirty = prefill_attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), lengths, implementation=implementation
    )
    np.testing.assert_array_equal(real_rows(dirty, lengths), real_rows(clean, lengths))


def test_prefill_under_a_mask() -> None:
    q, k, v, lengths = prefill_inputs(PREFILL[1].shape)
    mask = np.random.default_rng(1).random((3, 19, 19)) < 0.5
    mask |= np.eye(19, dtype=bool)
    got = np.asarray(
        prefill_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), lengths, jnp.asarray(mask))
    )
    for b, length in enumerate(lengths):
        for t in range(length):
            seen = np.flatnonzero(mask[b, t, :length])
            want = softmax_mix(q[b, t, 3], k[b, 1, seen], v[b, 1, seen])
            np.testing.assert_allclose(got[b, t, 3], want, atol=1e-5)


def test_prefill_refuses_what_it_cannot_run() -> None:
    q, k, v, lengths = (jnp.asarray(x) for x in prefill_inputs(PREFILL[0].shape))
    with pytest.raises(ValueError, match="'xla' cannot run: a dense mask is given"):
        prefill_attention(q, k, v, lengths, jnp.ones((1, 1, 1), bool), implementation="xla")
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        prefill_attention(q, k, v, lengths, implementation="cuda")


def beam_inputs(shape: Mapping[str, Any], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    batch, width, slots = len(shape["lengths"]), shape["width"], shape["slots"]
    q = rng.normal(size=(batch, width, shape["heads"], shape["dim"]))
    context = rng.normal(size=(2, batch, shape["kv_heads"], shape["tokens"], shape["dim"]))
    own = rng.normal(size=(2, batch, slots, width, shape["kv_heads"], shape["dim"]))
    ancestors = rng.integers(0, width, (batch, slots, width)).astype(np.int32)
    ancestors[:, -1] = np.arange(width)
    return [q, *context, np.array(shape["lengths"], np.int32), *own, ancestors]


def beam_loop(q, ck, cv, lengths, bk, bv, ancestors) -> np.ndarray:
    out = np.zeros_like(q)
    groups = q.shape[2] // ck.shape[1]
    for b, w, h in np.ndindex(q.shape[:3]):
        kv, length = h // groups, lengths[b]
        own = [(s, ancestors[b, s, w]) for s in range(bk.shape[1])]
        k = np.concatenate([ck[b, kv, :length], [bk[b, s, row, kv] for s, row in own]])
        v = np.concatenate([cv[b, kv, :length], [bv[b, s, row, kv] for s, row in own]])
        out[b, w, h] = softmax_mix(q[b, w, h], k, v)
    return out


def as_float32(arrays: list[np.ndarray]) -> list[Any]:
    return [jnp.asarray(a, jnp.float32 if a.dtype.kind == "f" else jnp.int32) for a in arrays]


@pytest.mark.parametrize("case", BEAM, ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", ["reference", "xla", "auto"])
def test_beam_equals_the_loop(case: Case, implementation: str) -> None:
    arrays = as_float32(beam_inputs(case.shape))
    exact = beam_loop(
        *(np.asarray(a, np.float64) if a.dtype == jnp.float32 else np.asarray(a) for a in arrays)
    )
    naive = beam_attention(*arrays, implementation="reference")
    assert_as_close_as_naive(beam_attention(*arrays, implementation=implementation), exact, naive)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_beam_padding_has_no_effect(implementation: str) -> None:
    arrays = beam_inputs(BEAM[1].shape)
    clean = beam_attention(*as_float32(arrays), implementation=implementation)
    for b, length in enumerate(arrays[3]):
        arrays[1][b, :, length:], arrays[2][b, :, length:] = np.nan, np.nan
    np.testing.assert_array_equal(beam_attention(*as_float32(arrays), implementation=implementation), clean)


@pytest.mark.parametrize(
    ("public", "implementations"),
    [(prefill_attention, prefill_op.IMPLEMENTATIONS), (beam_attention, beam_op.IMPLEMENTATIONS)],
)
def test_signatures_are_the_same(public: Any, implementations: Any) -> None:
    want = [p for p in inspect.signature(public).parameters if p != "implementation"]
    for implementation in implementations:
        assert list(inspect.signature(implementation.call).parameters) == want
