# SPDX-License-Identifier: Apache-2.0
"""The kernels between a decoder layer's products, interpreted, against numpy in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops.add_norm.cases import OP as ADD_NORM
from jgr.ops.testing import Case, OpCases
from jgr.ops.turned_heads.cases import OP as TURNED_HEADS

Arrays = dict[str, Any]
FORMS = pytest.mark.parametrize("form", ["pallas_interpret", "reference", "auto"])


def run(op: OpCases, case: Case, form: str, dtype: Any = jnp.float32) -> tuple[Arrays, Any]:
    arrays = op.draw(case, dtype)
    made = jax.jit(functools.partial(op.call, implementation=form, **op.options(case)))(**arrays)
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}, made


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale)


@FORMS
@pytest.mark.parametrize("case", ADD_NORM.tagged("ci"), ids=lambda case: case.name)
def test_a_sum_and_its_norm(case: Case, form: str) -> None:
    given, (total, normed) = run(ADD_NORM, case, form)
    want = given["x"] + given.get("added", 0)
    np.testing.assert_allclose(total, want, atol=1e-6)
    np.testing.assert_allclose(normed, norm(want, given["scale"]), atol=1e-5)


@FORMS
@pytest.mark.parametrize("case", TURNED_HEADS.tagged("ci"), ids=lambda case: case.name)
def test_heads_are_normed_and_turned_one_by_one(case: Case, form: str) -> None:
    given, made = run(TURNED_HEADS, case, form)
    dim, heads, kv_heads = (case.shape[name] for name in ("head", "heads", "kv_heads"))
    x = given["x"] + given.get("bias", 0)
    for kind, (begin, count) in enumerate(((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))):
        found = np.asarray(made[kind], np.float64)
        assert found.shape == (*x.shape[:2], count, dim)
        for head in range(count):
            want = x[..., (begin + head) * dim : (begin + head + 1) * dim]
            if kind < 2:
                name = ("q_norm", "k_norm")[kind]
                want = norm(want, given[name]) if name in given else want
                pair = want[..., : dim // 2] + 1j * want[..., dim // 2 :]
                pair = pair * (given["cos"] + 1j * given["sin"])[:, :, 0]
                want = np.concatenate([pair.real, pair.imag], axis=-1)
            np.testing.assert_allclose(found[:, :, head], want, atol=1e-5)


@pytest.mark.parametrize("op", [ADD_NORM, TURNED_HEADS], ids=lambda op: op.name)
def test_16_bits_are_those_of_the_plain_form(op: OpCases) -> None:
    """The kernels round where the plain forms do: the norm before it is multiplied with its scale, in 16 bits."""
    case = op.tagged("ci")[0]
    (_, got), (_, want) = (run(op, case, form, jnp.bfloat16) for form in ("pallas_interpret", "reference"))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("op", "wrong", "reason"),
    [
        (ADD_NORM, {"scale": jnp.ones(16, jnp.float16)}, "not both float32"),
        (
            ADD_NORM,
            {"x": jnp.ones((1, 17)), "added": jnp.ones((1, 17)), "scale": jnp.ones(17)},
            "multiple of 16",
        ),
        (TURNED_HEADS, {"q_norm": jnp.ones(32, jnp.float16)}, "not all float32"),
    ],
)
def test_what_a_kernel_cannot_run_is_said(op: OpCases, wrong: Arrays, reason: str) -> None:
    case = op.tagged("ci")[0]
    arrays = op.draw(case, jnp.float32) | wrong
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(functools.partial(op.call, implementation="pallas", **op.options(case)), **arrays)
