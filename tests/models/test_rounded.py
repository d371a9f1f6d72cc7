# SPDX-License-Identifier: Apache-2.0
"""Kept numbers in 8 bits: runs of words against what numpy reads from their bytes, and how far a number may be off."""

from __future__ import annotations

from typing import Any, Literal

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from jgr.models.rounded import Rounded

Kind = Literal["int8", "fp8"]
TYPES: dict[Kind, tuple[Any, float]] = {"int8": (np.int8, 127.0), "fp8": (ml_dtypes.float8_e4m3fn, 448.0)}
FLOAT32 = np.dtype(np.float32)
write, read = jax.jit(Rounded.write, static_argnums=0), jax.jit(Rounded.read, static_argnums=(0, 2))
KINDS = st.sampled_from([*TYPES])


def parts(run: npt.NDArray[np.uint32], of: Rounded) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The values [..., n, d] and factors [..., n] of runs, as float64, by their bytes."""
    raw, count = np.ascontiguousarray(run).view(np.uint8), of.vectors * of.size
    at = -(-count // 4) * 4
    values = np.ascontiguousarray(raw[..., :count]).view(TYPES[of.kind][0]).astype(np.float64)
    factors = np.ascontiguousarray(raw[..., at : at + 2 * of.vectors]).view(ml_dtypes.bfloat16)
    return values.reshape(*run.shape[:-1], of.vectors, of.size), factors.astype(np.float64)


def off_by(kind: Kind, x: npt.NDArray[Any], factor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The most that a number may be off: half a step of its type at its place."""
    if kind == "int8":
        return np.broadcast_to(factor / 2, x.shape)
    return np.maximum(np.abs(x) / 16, factor * 2.0**-10)


@given(KINDS, st.sampled_from([(1, 1), (3, 5), (4, 8)]), st.integers(0, 2**31), st.sampled_from([0, 1, 30]))
@settings(max_examples=25, deadline=None)
def test_a_number_is_off_by_half_a_step_at_most(
    kind: Kind, shape: tuple[int, int], seed: int, spread: int
) -> None:
    n, d = shape
    of, rng = Rounded(kind, n, d), np.random.default_rng(seed)
    x = (rng.normal(size=(3, n, d)) * 10.0 ** rng.uniform(-spread, spread, (3, n, 1))).astype(np.float32)
    x[0, 0] = 0
    run = np.asarray(write(of, x))
    assert run.shape == (3, of.words) and run.dtype == np.uint32
    values, factors = parts(run, of)
    found, largest = values * factors[..., None], np.abs(x.astype(np.float64)).max(-1)
    assert (factors * TYPES[kind][1] >= largest).all(), "the largest number is not cut off"
    assert (factors * TYPES[kind][1] <= largest * (1 + 2.0**-7)).all()
    assert (np.abs(found - x) <= off_by(kind, x, factors[..., None]) * (1 + 1e-6)).all()
    np.testing.assert_array_equal(np.asarray(read(of, run, FLOAT32)), found.astype(np.float32))


@pytest.mark.parametrize("kind", [*TYPES])
def test_kept_bits_are_read_as_they_are(kind: Kind) -> None:
    """All 256 values, beside factors that numpy wrote; in bfloat16 too."""
    of, bits = Rounded(kind, 4, 64), np.arange(256, dtype=np.uint8)
    values = bits.view(TYPES[kind][0]).astype(np.float64).reshape(4, 64)
    factors = np.array([0.5, 3.0, 1e-20, 0], ml_dtypes.bfloat16)
    run = np.concatenate([bits, factors.view(np.uint8)]).view(np.uint32)
    wanted = (values * factors.astype(np.float64)[:, None]).astype(np.float32)
    for dtype in (FLOAT32, np.dtype(ml_dtypes.bfloat16)):
        found = np.asarray(read(of, run, dtype))
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("kind", [*TYPES])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_what_is_no_finite_number_is_none_when_it_is_read(kind: Kind, what: float) -> None:
    of = Rounded(kind, 2, 4)
    found = read(of, write(of, jnp.asarray([[1, what, 2, 3], [1, 2, 3, 4.0]])), FLOAT32)
    assert not np.isfinite(found[0]).any() and np.isfinite(found[1]).all()
