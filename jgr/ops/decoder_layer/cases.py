# SPDX-License-Identifier: Apache-2.0
"""Shapes of the two ops around a layer's attention for tests and timing.

rows: batch and tokens. hidden, heads, kv_heads, dim, mlp: the sizes of the layer. with_: which optional weights there
are. The second of three layers is computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.ops.decoder_layer import InputWeights, OutputWeights, attention_inputs, layer_output
from jgr.ops.testing import Case, OpCases, Work

LAYERS, NUMBER, EPS = 3, 1, 1e-6
_BENCH = frozenset({"bench"})
_QWEN2, _QWEN3 = ("bq", "bk", "bv"), ("q_norm", "k_norm")
_SMALL = dict(hidden=256, heads=4, kv_heads=4, dim=64, mlp=704, with_=_QWEN3)
_QWEN3_06B = dict(hidden=1024, heads=16, kv_heads=8, dim=128, mlp=3072, with_=_QWEN3)
CASES = (
    Case("odd_sizes", dict(rows=(3, 31), hidden=90, heads=6, kv_heads=2, dim=10, mlp=70, with_=())),
    Case("biases", dict(rows=(1, 67), hidden=64, heads=4, kv_heads=1, dim=32, mlp=130, with_=_QWEN2)),
    Case("deep", dict(rows=(2, 100), hidden=600, heads=2, kv_heads=2, dim=48, mlp=1100, with_=_QWEN3)),
    Case("small_512", dict(rows=(1, 512), **_SMALL), _BENCH),
    Case("small_2k", dict(rows=(1, 2048), **_SMALL), _BENCH),
    Case("qwen3_0.6b_1k", dict(rows=(1, 1024), **_QWEN3_06B), _BENCH),
)


def _sizes(case: Case) -> tuple[int, int, int, int]:
    """D, H * d, K * d and F."""
    s = case.shape
    return s["hidden"], s["heads"] * s["dim"], s["kv_heads"] * s["dim"], s["mlp"]


def _stacks(case: Case, dtype: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    batch, tokens = case.shape["rows"]
    given = {name: (LAYERS, *shape) for name, shape in shapes.items()}
    given["h"] = (batch, tokens, case.shape["hidden"])
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in given.items()}


def _of_inputs(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    (hidden, q, kv, _), dim = _sizes(case), case.shape["dim"]
    optional = {"bq": (q,), "bk": (kv,), "bv": (kv,), "q_norm": (dim,), "k_norm": (dim,)}
    shapes = {"norm": (hidden,), "wq": (hidden, q), "wk": (hidden, kv), "wv": (hidden, kv)}
    shapes |= {name: optional[name] for name in case.shape["with_"]}
    found = _stacks(case, dtype, shapes)
    angles = jax.ShapeDtypeStruct((*case.shape["rows"], 1, dim // 2), jnp.float32)
    return found | {"cos": angles, "sin": angles}


def _of_output(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    hidden, q, _, mlp = _sizes(case)
    shapes = {
        "wo": (q, hidden),
        "norm": (hidden,),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }
    attended = jax.ShapeDtypeStruct((*case.shape["rows"], q), dtype)
    return _stacks(case, dtype, shapes) | {"attended": attended}


def _none(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    return {}


def _inputs(
    h: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    head: int,
    real: jax.Array | None = None,
    implementation: str = "auto",
    **weights: jax.Array,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """attention_inputs with each array as an argument of its own. Matrices are scaled to keep the size of h."""
    scaled = {
        name: x / float(np.sqrt(h.shape[2])) if name in ("wq", "wk", "wv") else x
        for name, x in weights.items()
    }
    given = h, InputWeights(**scaled), jnp.int32(NUMBER), cos, sin
    return attention_inputs(*given, eps=EPS, head=head, real=real, implementation=implementation)


def _output(
    h: jax.Array,
    attended: jax.Array,
    *,
    real: jax.Array | None = None,
    implementation: str = "auto",
    **weights: jax.Array,
) -> jax.Array:
    """layer_output with each array as an argument of its own. Matrices are scaled to keep the size of h."""
    scaled = {name: x if name == "norm" else x / float(np.sqrt(x.shape[1])) for name, x in weights.items()}
    given = h, attended, OutputWeights(**scaled), jnp.int32(NUMBER)
    return layer_output(*given, eps=EPS, real=real, implementation=implementation)


def _work(case: Case, dtype: Any, of_output: bool) -> Work:
    """The matmuls, and every array once; norms are left out."""
    (hidden, q, kv, mlp), (batch, tokens) = _sizes(case), case.shape["rows"]
    weights = q * hidden + 3 * hidden * mlp if of_output else hidden * (q + 2 * kv)
    made = hidden + q if of_output else q + 2 * kv
    size = jnp.dtype(dtype).itemsize
    return Work(2.0 * batch * tokens * weights, float(size * (weights + batch * tokens * (hidden + made))))


OF_INPUTS = OpCases(
    "attention_inputs",
    _inputs,
    CASES,
    _of_inputs,
    _none,
    lambda case, dtype: _work(case, dtype, of_output=False),
    lambda case: {"head": case.shape["dim"]},
    timed=("native", "reference"),
)
OF_OUTPUT = OpCases(
    "layer_output",
    _output,
    CASES,
    _of_output,
    _none,
    lambda case, dtype: _work(case, dtype, of_output=True),
    timed=("native", "reference"),
)
