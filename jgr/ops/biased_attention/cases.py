# SPDX-License-Identifier: Apache-2.0
"""Shapes of biased attention for tests, compile checks and timing.

Prompts are given as in segment attention's cases. v_dim: the size of a value's head; default: `dim`. reach: N, where
the table of positions has 2N - 1 entries; default: no bias. timed: whether there is a table of times as well. tables:
1, or one a head. scales: the shape of `scale` as an array; default: the number 1 / sqrt(dim).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.ops.biased_attention import Bias, Context, biased_attention
from jgr.ops.biased_attention.bias import Activation
from jgr.ops.segment_attention import cases as segments
from jgr.ops.segment_attention.cases import causal, history_and_targets, tokens_of
from jgr.ops.testing import Case, OpCases, Work
from jgr.prompt.layouts import LAYOUTS

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})
_BUCKETS = 129
_YEAR_S = 31_536_000


def _heads(heads: int, dim: int) -> dict[str, Any]:
    return dict(heads=heads, kv_heads=heads, dim=dim)


def _targets(history: int, targets: int, contextual: int = 0) -> dict[str, Any]:
    return dict(
        layout="single_user_multi_item", prompts=((history_and_targets(contextual, history, targets),),)
    )


_STU = dict(activation="silu", **_heads(4, 128))  # DLRMv3's, MODEL-16
_CLIMBER = dict(activation="softmax", reach=1024, timed=True, tables=4, scales=(1, 4), **_heads(4, 32))

CASES = (
    Case(
        "hstu",
        dict(**causal(19, 12, 0, 1), activation="silu", reach=12, timed=True, v_dim=32, **_heads(2, 16)),
    ),
    Case("climber", dict(_CLIMBER | dict(reach=20), **_targets(40, 9))),
    Case("cached_history", dict(**causal(30, 21), cached=17, **_CLIMBER)),
    Case(
        "hstu_ml20m_b32",
        dict(**causal(*[211] * 32), activation="silu", reach=211, timed=True, **_heads(8, 32)),
        _BENCH,
    ),
    Case("stu_4k", dict(**causal(4096), **_STU), _BENCH | _COMPILE),
    Case("stu_timed_1k", dict(**causal(1024), reach=1024, timed=True, **_STU), _BENCH | _COMPILE),
    Case("stu_micro_batch_128", dict(**_targets(4096, 128), cached=4096, **_STU), _BENCH | _COMPILE),
    Case("climber_long", dict(**_targets(512, 512), **_CLIMBER), _BENCH | _COMPILE),
    Case("climber_cached", dict(**_targets(512, 128), cached=512, **_CLIMBER), _COMPILE),
    Case("stu_delta", dict(**causal(4120), cached=4096, reach=8192, timed=True, **_STU), _COMPILE),
    Case("climber_head_128", dict(**_targets(512, 128), **_CLIMBER | _heads(4, 128)), _COMPILE),
    Case("dlrm_v3_16k", dict(**_targets(16384, 2048), **_STU), _COMPILE),
    Case(
        "contextual_f16",
        dict(
            **_targets(500, 100, 6),
            reach=700,
            timed=True,
            window=True,
            dtype="float16",
            **_STU | _heads(4, 96),
        ),
        _COMPILE,
    ),
    Case(
        "softmax_head_256",
        dict(**causal(512), **_CLIMBER | _heads(4, 256)),
        _COMPILE,
    ),
    Case("silu_head_256", dict(**causal(512), reach=512, timed=True, **_STU | _heads(2, 256)), _COMPILE),
    Case("softmax_f32", dict(**causal(512), dtype="float32", **_CLIMBER | _heads(4, 128)), _COMPILE),
    Case(
        "silu_f32_head_256",
        dict(**causal(512), reach=512, timed=True, dtype="float32", **_STU | _heads(2, 256)),
        _COMPILE,
    ),
)


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    s, shapes = case.shape, segments.OP.shapes(case, dtype)
    for name in ("v", "context_v"):
        if name in shapes:
            shapes[name] = shapes[name].update(shape=(*shapes[name].shape[:3], s.get("v_dim", s["dim"])))
    tables = {"positions": 2 * s.get("reach", 0) - 1, "times": _BUCKETS if s.get("timed") else 0}
    floats = {name: (s.get("tables", 1), n) for name, n in tables.items() if n > 0}
    if "scales" in s:
        floats["scale"] = (shapes["q"].shape[0], s["scales"][1])
    shapes |= {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in floats.items()}
    times = {n: x.shape for n, x in _integers(case, np.random.default_rng(0)).items() if n.endswith("_times")}
    return shapes | {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in times.items()}


def _integers(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    given = segments.OP.integers(case, rng)
    if case.shape.get("timed"):
        rows, count = segments.OP.shapes(case, jnp.float32)["q"].shape[:2]
        keys = case.shape.get("cached", 0) + count
        events = np.sort(rng.integers(0, _YEAR_S, (rows, keys + 1)), axis=1).astype(np.int32)
        given |= {
            "query_times": events[:, -count:],
            "key_times": events[:, :-1],
        }  # a query has the next event's time
    return given


def _options(case: Case) -> dict[str, Any]:
    s = case.shape
    options = {"layout": s["layout"], "activation": s["activation"]}
    if s["activation"] == "silu":
        options["divisor"] = 256.0
    return options if "scales" in s else options | {"scale": s["dim"] ** -0.5}


def flat(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: str,
    activation: Activation,
    scale: float | jax.Array,
    divisor: float = 1.0,
    positions: jax.Array | None = None,
    times: jax.Array | None = None,
    context_k: jax.Array | None = None,
    context_v: jax.Array | None = None,
    window: jax.Array | None = None,
    query_times: jax.Array | None = None,
    key_times: jax.Array | None = None,
    implementation: str = "auto",
    **vectors: jax.Array,
) -> jax.Array:
    """biased_attention with each array as an argument of its own, as OpCases calls it."""
    context = None
    if context_k is not None and context_v is not None:
        context = Context(context_k, context_v, tokens_of(vectors, "context_"))
    return biased_attention(
        q,
        k,
        v,
        tokens_of(vectors),
        LAYOUTS[layout],
        context=context,
        window=window,
        bias=None if positions is None else Bias(positions, times),
        query_times=query_times,
        key_times=key_times,
        activation=activation,
        scale=scale,
        divisor=divisor,
        implementation=implementation,
    )


def _work(case: Case, dtype: Any) -> Work:
    """The work of two products for each pair that sees each other; biases and activations are left out."""
    s, size = case.shape, jnp.dtype(dtype).itemsize
    v_dim = s.get("v_dim", s["dim"])
    flops = segments.OP.work(case, dtype).flops * (s["dim"] + v_dim) / (2 * s["dim"])
    shapes = _shapes(case, dtype)
    moved = sum(
        int(np.prod(x.shape)) for n, x in shapes.items() if n in ("q", "k", "v", "context_k", "context_v")
    )
    out = int(np.prod(shapes["q"].shape[:3])) * v_dim
    return Work(flops, float(size * (moved + out)))


OP = OpCases("biased_attention", flat, CASES, _shapes, _integers, _work, _options)
