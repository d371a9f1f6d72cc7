# SPDX-License-Identifier: Apache-2.0
"""The fused linear layer: every form against the formula in float64, its gradients, and what it refuses."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops.fused_linear import fused_linear, pallas_triton
from jgr.ops.fused_linear.arguments import Layer
from jgr.ops.fused_linear.cases import OP
from tests.ops.closeness import assert_as_close_as_naive

FORMS = ("reference", "xla", "pallas_interpret")
CASES = {case.name: case for case in OP.tagged("ci")}
CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Array = np.ndarray[Any, Any]


def activate(x: Array, name: str) -> Array:
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return {"none": x, "silu": x / (1 + np.exp(-x)), "relu": np.maximum(x, 0)}[name]


def by_hand(
    x: Array,
    w: Array,
    bias: Array | float = 0.0,
    scale: Array | float = 1.0,
    shift: Array | float = 0.0,
    residual: Array | float = 0.0,
    normalize: bool = True,
    activation: str = "none",
) -> Array:
    if normalize:
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6) * scale + shift
    return activate(x @ w + bias, activation) + residual


@functools.cache
def compiled(case: str, form: str) -> Any:
    call = functools.partial(OP.call, **OP.options(CASES[case]), implementation=form)
    return jax.jit(call, compiler_options=CHEAP)


@pytest.mark.parametrize("case", CASES)
def test_the_formula(case: str) -> None:
    arrays = OP.draw(CASES[case], jnp.float32)
    arrays["x"] = arrays["x"] * 0.3 + 2.0  # far from normal
    exact = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    want = by_hand(**exact, **OP.options(CASES[case]))
    for form in FORMS:
        got = compiled(case, form)(**arrays)
        np.testing.assert_allclose(got, want, atol=5e-5, err_msg=form)


def test_16_bits() -> None:
    arrays = OP.draw(CASES["all"], jnp.bfloat16)
    exact = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    want = by_hand(**exact, **OP.options(CASES["all"]))
    naive = np.asarray(compiled("all", "reference")(**arrays), np.float32)
    for form in ("xla", "pallas_interpret"):
        got = compiled("all", form)(**arrays)
        assert got.dtype == jnp.bfloat16
        # The factors of the product are rounded besides the result.
        assert_as_close_as_naive(np.asarray(got, np.float32), want, naive, slack=6.0)


def test_the_kernel_in_several_tiles_and_pieces() -> None:
    """Of gelu everywhere, also where the approximation of the error function changes its form."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((70, 48)), rng.standard_normal((48, 64)) * 0.5
    x[0] = 1e3 + x[0]  # a mean that dwarfs the deviation
    rounded = [np.asarray(a, np.float32) for a in (x, w)]
    layer = Layer(*map(jnp.asarray, rounded), None, None, None, None, True, "gelu")
    found = pallas_triton.run(layer, pallas_triton.Tiles(32, 16, 16, 1, 1), interpret=True)
    want = by_hand(*(a.astype(np.float64) for a in rounded), activation="gelu")
    np.testing.assert_allclose(found[1:], want[1:], atol=1e-5)
    np.testing.assert_allclose(found[:1], want[:1], atol=5e-3)


def test_gradients_and_leading_dimensions() -> None:
    arrays = OP.draw(CASES["all"], jnp.float32)
    names = tuple(arrays)

    def loss(form: str, *values: jax.Array) -> jax.Array:
        given = dict(zip(names, values, strict=True))
        given |= {name: given[name][:36].reshape(3, 12, -1) for name in ("x", "residual")}
        out = fused_linear(**given, activation="silu", implementation=form)
        assert out.shape == (3, 12, 80)
        return (out * out).mean()

    def gradients(form: str) -> Any:
        found = jax.grad(functools.partial(loss, form), tuple(range(len(names))))
        return jax.jit(found, compiler_options=CHEAP)(*arrays.values())

    for a, b in zip(gradients("xla"), gradients("reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_is_refused() -> None:
    x, w = jnp.ones((4, 32)), jnp.ones((32, 16))
    with pytest.raises(ValueError, match=r"bias is \[32\], and must be \[16\]"):
        fused_linear(x, w, jnp.ones(32))
    with pytest.raises(ValueError, match=r"x is \[4, 32\], and must be \[4, 16\]"):
        fused_linear(x, w.T)
    with pytest.raises(ValueError, match="belong to a norm"):
        fused_linear(x, w, normalize=False, scale=jnp.ones(32))
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        fused_linear(x, w, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot run: the width is 15"):
        fused_linear(x, w[:, :15], implementation="pallas_interpret")


def test_work_is_the_product_and_every_array_once() -> None:
    work = OP.work(CASES["no_norm"], jnp.float32)
    assert work.flops == 2 * 20 * 48 * 32
    assert work.bytes == 4 * (20 * 48 + 48 * 32 + 32 + 2 * 20 * 32)
