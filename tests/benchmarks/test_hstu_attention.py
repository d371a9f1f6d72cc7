# SPDX-License-Identifier: Apache-2.0
"""The forms that are compared compute the same, and rows and claims say what was timed and compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import hstu_attention as bench
from jgr.ops.biased_attention.cases import OP


def test_the_plain_form_computes_the_op_and_its_gradient_is_one() -> None:
    case = bench.make_case(13, dict(heads=2, kv_heads=2, dim=8))
    arrays = jax.jit(lambda: OP.draw(case, jnp.float32))()
    forms = bench.calls(case, ("reference",))
    plain, reference = (jax.jit(forms[name])(arrays) for name in ("plain", "reference"))
    np.testing.assert_allclose(plain, reference, atol=1e-6)
    got = jax.jit(bench.gradient(forms["plain"]))(arrays)
    assert {name: x.shape for name, x in got.items()} == {n: arrays[n].shape for n in bench.GRADIENTS_OF}


def test_a_row_takes_the_best_form_and_the_floor_of_its_own_run() -> None:
    memory = {"plain": 900, "xla": 100}
    seconds = {"plain": [0.04], "xla": [0.02], "pallas": [0.01], "matmul": [0.008]}
    row = bench.make_row(8192, seconds, 0.5, memory, memory, 1e-6)
    assert (row["flop_floor_ms"], row["share_of_floor"], row["plain_over_best"]) == (4.0, 0.4, 4.0)
    longest = bench.make_row(
        16384, {"xla": [0.1], "matmul": [0.008]}, 8, {"xla": 2**26}, {"xla": 2**29}, 1e-3
    )
    assert "plain_over_best" not in longest
    assert [(c.id, c.value, c.holds) for c in bench.claims([row, longest], 1e-4)] == [
        ("hstu-attention-forms-differ-by", 1e-3, False),
        ("time-of-plain-attention-over-ours-8192-tokens", 4.0, True),
        ("temporary-bytes-a-pair-16384-tokens", 0.25, True),
        ("gradient-temporary-bytes-a-pair-16384-tokens", 2.0, False),
    ]
