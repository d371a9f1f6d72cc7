# SPDX-License-Identifier: Apache-2.0
"""Every op on a GPU, as "auto" runs it there, against the plain form in float32.

A kernel that is interpreted on a CPU is right in what it says; only a GPU shows what its compiler made of it. These
tests run where JAX_PLATFORMS names a GPU:

    JAX_PLATFORMS=cuda JGR_AS_SERVED=1 python -m pytest -m gpu tests/ops
"""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops.testing import Case, OpCases, all_ops

# The plain form of a beam step has a score for every item and beam, which is too much for the cases that are timed.
CALLS = [
    (op, case, dtype)
    for op in all_ops()
    if "native" not in op.timed or op.name == "segment_attention"
    for case in op.cases
    if op.name != "constrained_topk" or "ci" in case.tags
    for dtype in ([case.shape["dtype"]] if "dtype" in case.shape else ["bfloat16", "float32"])
]
FARTHEST = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
"""The most that ||got - exact|| may be of ||exact||. One pass of TF32 is near 3e-4, and is not float32."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("op", "case", "dtype"), CALLS, ids=[f"{op.name}-{case.name}-{dtype}" for op, case, dtype in CALLS]
)
def test_auto_is_the_plain_form_in_float32(op: OpCases, case: Case, dtype: str) -> None:
    arrays = op.draw(case, jnp.dtype(dtype), seed=zlib.crc32(case.name.encode()))
    wide = {name: x.astype(jnp.float32) if x.dtype == dtype else x for name, x in arrays.items()}
    call = functools.partial(op.call, **op.options(case))
    plain = "xla" if op.name == "reorder_beam_kv" else "reference"
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(call, implementation=plain))(**wide)
    got = jax.jit(functools.partial(call, implementation="auto"))(**arrays)
    if (
        op.name == "segment_attention" and "lengths" in arrays
    ):  # what padding gets after a plain prompt is anybody's
        real = np.arange(exact.shape[1]) < np.asarray(arrays["lengths"])[:, None]
        got, exact = got[real], exact[real]
    for one, best in zip(*map(jax.tree.leaves, (got, exact)), strict=True):
        if jnp.issubdtype(best.dtype, jnp.floating):
            assert far(one, best) <= FARTHEST[dtype]


def far(got: jax.Array, exact: jax.Array) -> float:
    """||got - exact|| / ||exact|| over what is finite; infinity where not the same places are."""
    x, y = (np.asarray(z, np.float64) for z in (got, exact))
    there = np.isfinite(y)
    if not np.array_equal(np.isfinite(x), there):
        return float("inf")
    return float(np.linalg.norm(x[there] - y[there]) / (np.linalg.norm(y[there]) or 1.0))
