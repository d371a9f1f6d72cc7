# SPDX-License-Identifier: Apache-2.0
"""The forms that are compared compute the same, and rows and claims say what was timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import beam_attention as bench
from jgr.ops.beam_attention import beam_attention

SHAPE = dict(heads=4, kv_heads=2, dim=16, dtype="float32")


@pytest.mark.parametrize("variant", bench.VARIANTS)
def test_every_form_computes_beam_attention(variant: str) -> None:
    arrays = bench.make_arrays(bench.make_case(9, 5, SHAPE))
    assert (np.diff(np.asarray(arrays["ancestors"]), axis=-1) >= 0).all()
    op = {name: a for name, a in arrays.items() if not name.startswith("copied")}
    want = beam_attention(**op, implementation="reference")
    np.testing.assert_allclose(jax.jit(bench.VARIANTS[variant])(arrays), want, atol=2e-6)


def test_copies_are_copies() -> None:
    arrays = bench.make_arrays(bench.make_case(3, 2, SHAPE))
    assert arrays["copied_k"].shape == (1, 2, 2, 3, 16)
    np.testing.assert_array_equal(arrays["copied_v"][0, 1], arrays["context_v"][0])
    assert arrays["copied_k"].dtype == jnp.float32


def test_a_row_takes_the_faster_baseline_and_the_floor_of_its_own_run() -> None:
    ms = {"staged": 2, "staged_in_place": 3, "copied": 40, "broadcast": 30, "tree_mask": 5, "matmul": 8}
    with_sdpa = {name: [t / 1e3] for name, t in (ms | {"sdpa": 4}).items()}
    found = bench.make_row(1024, 512, with_sdpa, matmuls=0.125, difference=1e-6)
    assert (found["beams_as_sequences"], found["over_staged"]["beams_as_sequences"]) == ("sdpa", 2.0)
    row = bench.make_row(
        1024, 512, {name: [t / 1e3] for name, t in ms.items()}, matmuls=0.125, difference=1e-6
    )
    assert row["beams_as_sequences"] == "broadcast"
    assert row["over_staged"] == {"beams_as_sequences": 15.0, "tree_mask": 2.5, "staged_in_place": 1.5}
    assert row["flop_floor_ms"] == 1.0
    assert [(c.id, c.value, c.holds) for c in bench.claims([row], 1e-4)] == [
        ("beam-attention-forms-differ-by", 1e-6, True),
        ("time-of-beams-as-sequences-over-staged-beam-512-prompt-1024", 15.0, True),
        ("time-of-tree-mask-over-staged-beam-512-prompt-1024", 2.5, True),
    ]
