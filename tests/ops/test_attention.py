# SPDX-License-Identifier: Apache-2.0
"""Prefill attention: every form against loops in float64, and padding without effect."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops import prefill_attention as prefill_op
from jgr.ops.prefill_attention import cases as prefill_cases
from jgr.ops.prefill_attention import prefill_attention
from jgr.ops.testing import Case, assert_as_close_as_naive

PREFILL = [c for c in prefill_cases.CASES if "ci" in c.tags]


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


def test_signatures_are_the_same() -> None:
    want = [p for p in inspect.signature(prefill_attention).parameters if p != "implementation"]
    for implementation in prefill_op.IMPLEMENTATIONS:
        assert list(inspect.signature(implementation.call).parameters) == want
