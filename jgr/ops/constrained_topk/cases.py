# SPDX-License-Identifier: Apache-2.0
"""Shapes that test and time the beam step: `vocabulary` columns, `nodes` nodes of at most `degree` children.

packed: the capacity of the packed form; 0 for the dense form.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.child_bitmaps import wide_children
from jgr.ops.constrained_topk import BeamStep, TreeLevel, constrained_topk
from jgr.ops.testing import Case, OpCases, Work

_BENCH = frozenset({"bench"})
_ONEREC = dict(batch=1, beams=256, hidden=1024, vocabulary=8192, nodes=8192, width=256)

CASES = (
    Case("root", dict(batch=2, beams=1, hidden=16, vocabulary=16, nodes=1, degree=9, width=12, packed=0)),
    Case("one_child", dict(batch=2, beams=3, hidden=5, vocabulary=5, nodes=4, degree=1, width=3, packed=8)),
    Case(
        "wide_nodes",
        dict(batch=3, beams=8, hidden=300, vocabulary=300, nodes=40, degree=90, width=8, packed=0),
    ),
    Case("onerec_w256_dense", dict(**_ONEREC, degree=1200, packed=0), _BENCH),
    Case("onerec_w256_packed", dict(**_ONEREC, degree=16, packed=8192), _BENCH),
)


def flat(
    hidden: jax.Array,
    head: jax.Array,
    beam_scores: jax.Array,
    nodes: jax.Array,
    offsets: jax.Array,
    codes: jax.Array,
    wide_nodes: jax.Array,
    wide_bitmaps: jax.Array,
    *,
    width: int,
    packed: int,
    implementation: str = "auto",
) -> BeamStep:
    """constrained_topk with each array as an argument of its own, as OpCases calls it."""
    level = TreeLevel(offsets, codes, wide_nodes, wide_bitmaps)
    return constrained_topk(
        hidden, head, beam_scores, nodes, level, width=width, packed=packed, implementation=implementation
    )


def tree_level(shape: Any, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    """A random level: node 0 has `degree` children, the others 1 to `degree`."""
    degrees = rng.integers(1, shape["degree"] + 1, shape["nodes"])
    degrees[0] = shape["degree"]
    codes = [np.sort(rng.choice(shape["vocabulary"], d, replace=False)) for d in degrees]
    offsets = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    children = np.concatenate(codes).astype(np.int32)
    wide_nodes, wide_bitmaps = wide_children(offsets, children, shape["vocabulary"])
    return {"offsets": offsets, "codes": children, "wide_nodes": wide_nodes, "wide_bitmaps": wide_bitmaps}


def _integers(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    s = case.shape
    # The level is the same whatever `rng` has given before: its shapes must be known without values.
    return tree_level(s, np.random.default_rng(0)) | {
        "nodes": rng.integers(0, s["nodes"], (s["batch"], s["beams"]))
    }


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    s = case.shape
    level = tree_level(s, np.random.default_rng(0))
    return {
        "hidden": jax.ShapeDtypeStruct((s["batch"], s["beams"], s["hidden"]), dtype),
        "head": jax.ShapeDtypeStruct((s["vocabulary"], s["hidden"]), dtype),
        "beam_scores": jax.ShapeDtypeStruct((s["batch"], s["beams"]), jnp.float32),
        "nodes": jax.ShapeDtypeStruct((s["batch"], s["beams"]), jnp.int32),
        **{name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in level.items()},
    }


def _work(case: Case, dtype: Any) -> Work:
    """The work of the form that the case runs; the packed form has half of `degree` children a beam."""
    s, size = case.shape, jnp.dtype(dtype).itemsize
    beams = s["batch"] * s["beams"]
    rows = beams * (s["degree"] + 1) / 2 if s["packed"] else s["vocabulary"]
    logits = rows if s["packed"] else beams * rows
    return Work(2 * s["hidden"] * logits, size * s["hidden"] * (rows + beams) + 4 * logits)


OP = OpCases(
    "constrained_topk",
    flat,
    CASES,
    _shapes,
    _integers,
    _work,
    lambda case: {"width": case.shape["width"], "packed": case.shape["packed"]},
    timed=("xla",),
)
