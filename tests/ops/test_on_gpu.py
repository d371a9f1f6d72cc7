# SPDX-License-Identifier: Apache-2.0
"""Every op on a GPU, as "auto" runs it there, against the plain form in float32.

A kernel that is interpreted on a CPU is right in what it says; only a GPU shows what its compiler made of it. These
tests run where JAX_PLATFORMS names a GPU:

    JAX_PLATFORMS=cuda JGR_AS_SERVED=1 python -m pytest -m gpu tests/ops

The comparison itself is tried on every machine, on a few cases.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jgr.ops.testing import FARTHEST, Check, checks

CHECKS = pytest.mark.parametrize("check", checks(), ids=lambda check: check.name.replace(" ", "-"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@CHECKS
def test_auto_is_the_plain_form_in_float32(check: Check) -> None:
    assert check.distance() <= FARTHEST[check.dtype]


FEW = [
    check
    for check in checks()
    if check.name in ("add_norm pieces float32", "segment_attention ragged float32")
]


@pytest.mark.parametrize("check", FEW, ids=lambda check: check.op.name)
def test_the_comparison_tells_wrong_from_right(check: Check) -> None:
    assert check.distance() <= FARTHEST["float32"]

    def wrong(**arguments: object) -> object:
        made = check.op.call(**arguments)
        return made if arguments["implementation"] == "reference" else jax.tree.map(lambda x: x * 1.001, made)

    def lost(**arguments: object) -> object:
        made = check.op.call(**arguments)
        return (
            made
            if arguments["implementation"] == "reference"
            else jax.tree.map(lambda x: x / jnp.zeros(()), made)
        )

    for call in (wrong, lost):
        assert check._replace(op=dataclasses.replace(check.op, call=call)).distance() > FARTHEST["float32"]
