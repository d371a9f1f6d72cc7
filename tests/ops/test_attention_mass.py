# SPDX-License-Identifier: Apache-2.0
"""How much attention each token gets, against sums over single queries and keys in numpy (RCLLM-10)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops.attention_mass import pallas_triton, xla
from jgr.ops.attention_mass.cases import FIELDS, OP
from jgr.prompt.layouts import EARLIER, LAYOUTS

CASES = {case.name: case for case in OP.tagged("ci")}
Array = np.ndarray[Any, Any]


def by_hand(
    q: Array, k: Array, request: Array, segment: Array, kind: Array, order: Array, bits: Array
) -> Array:
    """One row, query by query and head by head."""
    count, heads, dim = q.shape
    got, seen_by = np.zeros(count), np.zeros(count)
    for t in range(count):
        sees = int(bits[kind[t]])
        seen = [
            request[t] == request[s] >= 0
            and (
                (segment[t] == segment[s] and order[s] <= order[t])
                or sees >> int(kind[s]) & 1
                or (sees >> EARLIER >> int(kind[s]) & 1 and segment[s] < segment[t])
            )
            for s in range(count)
        ]
        keys = np.flatnonzero(seen)
        seen_by[keys] += 1
        for head in range(heads) if len(keys) else ():
            scores = k[head // (heads // len(k)), keys] @ q[t, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            got[keys] += weights / weights.sum()
    return got / np.maximum(seen_by, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["reference", "xla", "pallas_interpret"])
def test_the_sums_by_hand(case: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "BLOCK", 16)  # several blocks
    arrays = OP.draw(CASES[case], jnp.float32)
    options = OP.options(CASES[case])
    monkeypatch.setattr(pallas_triton, "choose_tiles", lambda *shape: pallas_triton.Tiles(32, 16, 1, 1))
    got = jax.jit(functools.partial(OP.call, **options, implementation=form))(**arrays)
    rows = {name: np.asarray(array) for name, array in arrays.items()}
    bits = LAYOUTS[options["layout"]].bits
    for at in range(len(rows["q"])):
        want = by_hand(
            rows["q"][at].astype(np.float64), rows["k"][at].astype(np.float64), *(rows[f][at] for f in FIELDS), bits
        )  # fmt: skip
        np.testing.assert_allclose(got[at], want, atol=2e-5, err_msg=form)
    assert not np.asarray(got)[rows["request"] < 0].any()


def test_what_stands_in_padding_has_no_effect() -> None:
    arrays = OP.draw(CASES["packed"], jnp.float32)
    padding = np.asarray(arrays["request"]) < 0
    assert padding.any()
    spoilt = arrays | {
        "k": jnp.where(padding[:, None, :, None], jnp.nan, arrays["k"]),
        "q": jnp.where(padding[:, :, None, None], jnp.nan, arrays["q"]),
    }
    for form in ("reference", "xla", "pallas_interpret"):
        call = jax.jit(functools.partial(OP.call, layout="causal", implementation=form))
        np.testing.assert_array_equal(call(**spoilt), call(**arrays), err_msg=form)
