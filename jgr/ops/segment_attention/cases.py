# SPDX-License-Identifier: Apache-2.0
"""Shapes of segment attention for tests, compile checks and timing.

prompts: for each row the prompts that are packed into it; a prompt is a list of (kind, tokens). cached: how many tokens
at the beginning of every row are cached context. tokens: room for the other tokens; default: as many as the longest row
has. causal: the prompts are plain ones, given by their lengths. window: whether windows are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.ops.segment_attention import segment_attention
from jgr.ops.segment_attention.visibility import Causal, Context
from jgr.ops.testing import Case, OpCases, Work
from jgr.prompt.layouts import EARLIER, LAYOUTS, Kind, Tokens, describe

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})
_QWEN3 = dict(heads=16, kv_heads=8, dim=128)  # of 0.6 and 1.7 billion parameters
_SMALL = dict(heads=4, kv_heads=2, dim=32)
_FIELDS = ("request", "segment", "kind", "order")

Prompt = Sequence[tuple[Kind, int]]


def causal(*lengths: int) -> dict[str, Any]:
    return dict(layout="causal", causal=True, prompts=tuple((((Kind.USER, n),),) for n in lengths))


def user_first(user: int, items: Sequence[int], instruction: int = 0) -> Prompt:
    return ((Kind.USER, user), *((Kind.ITEM, n) for n in items), (Kind.INSTRUCTION, instruction))


def items_first(user: int, items: Sequence[int], instruction: int = 0) -> Prompt:
    return (*((Kind.ITEM, n) for n in items), (Kind.USER, user), (Kind.INSTRUCTION, instruction))


def history_and_targets(contextual: int, history: int, targets: int) -> Prompt:
    return ((Kind.CONTEXT, contextual), (Kind.USER, history), *(((Kind.ITEM, 1),) * targets))


_BOOKS = (15,) * 100  # items of BAT's Books data

CASES = (
    Case("one_token", dict(**causal(1), heads=2, kv_heads=1, dim=16)),
    Case("ragged", dict(**causal(19, 12, 0, 1), **_SMALL)),
    Case("two_blocks", dict(**causal(130, 128), heads=6, kv_heads=2, dim=48)),
    Case("cached_causal", dict(**causal(60, 33), cached=25, **_SMALL)),
    Case(
        "user_prefix",
        dict(
            layout="user_prefix",
            prompts=((user_first(9, (3, 1, 4), 2),), (user_first(1, (2,), 1),)),
            **_SMALL,
        ),
    ),
    Case(
        "item_prefix_packed",
        dict(
            layout="item_prefix",
            prompts=((items_first(9, (3, 1, 4), 2), items_first(20, (5,) * 9, 3)),),
            cached=17,
            **_SMALL,
        ),
    ),
    Case(
        "targets_window",
        dict(
            layout="single_user_multi_item",
            prompts=((history_and_targets(3, 40, 9),), (history_and_targets(0, 30, 5),)),
            window=True,
            **_SMALL,
        ),
    ),
    Case("qwen3_0.6b_512_b8", dict(**causal(*[512] * 8), **_QWEN3), _BENCH),
    Case("qwen3_0.6b_1k", dict(**causal(1024), **_QWEN3), _BENCH | _COMPILE),
    Case("qwen3_0.6b_5k", dict(**causal(5000), **_QWEN3), _BENCH),
    Case("small_2k", dict(**causal(2048), heads=4, kv_heads=4, dim=64), _BENCH),
    Case("cached_4k_new_256", dict(**causal(4352), cached=4096, **_QWEN3), _BENCH | _COMPILE),
    Case(
        "books_item_prefix",
        dict(
            layout="item_prefix",
            prompts=((items_first(1586, _BOOKS, 30),),),
            heads=12,
            kv_heads=2,
            dim=128,
            window=True,
        ),
        _BENCH | _COMPILE,
    ),
    Case(
        "books_user_prefix",
        dict(layout="user_prefix", prompts=((user_first(1586, _BOOKS, 30),),), heads=12, kv_heads=2, dim=128),
        _BENCH,
    ),
    Case(
        "climber_long",
        dict(
            layout="single_user_multi_item",
            prompts=((history_and_targets(0, 1024, 512),),),
            heads=4,
            kv_heads=4,
            dim=32,
        ),
        _BENCH | _COMPILE,
    ),
    Case("short_head_64", dict(**causal(48), heads=14, kv_heads=2, dim=64), _COMPILE),
    Case("head_96_f16", dict(**causal(512), heads=8, kv_heads=8, dim=96, dtype="float16"), _COMPILE),
    Case("head_256", dict(**causal(512), heads=8, kv_heads=2, dim=256), _COMPILE),
    Case("f32", dict(**causal(512), heads=8, kv_heads=4, dim=128, dtype="float32"), _COMPILE),
    Case("f32_head_256", dict(**causal(512), heads=8, kv_heads=4, dim=256, dtype="float32"), _COMPILE),
)


def row(prompts: Sequence[Prompt], size: int = 0) -> Tokens:
    """The tokens of prompts packed into one row, filled up with padding to `size`."""
    parts = [describe(*zip(*prompt, strict=True), request=r) for r, prompt in enumerate(prompts)]
    joined = Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    extra = max(0, size - len(joined.request))
    filled = Tokens(*(np.pad(x, (0, extra)) for x in joined))
    return filled._replace(request=np.pad(joined.request, (0, extra), constant_values=-1))


def batch(case: Case) -> tuple[Tokens, int]:
    """The tokens of all rows, [B, C + T], and how many at the beginning are cached context (C)."""
    prompts, cached = case.shape["prompts"], case.shape.get("cached", 0)
    size = max(sum(n for prompt in packed for _, n in prompt) for packed in prompts)
    rows = [row(packed, max(size, cached + case.shape.get("tokens", 0))) for packed in prompts]
    return Tokens(*(np.stack(arrays) for arrays in zip(*rows, strict=True))), cached


def _lengths(case: Case) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For each plain prompt, how many tokens are in the context and how many are new."""
    whole = np.array([sum(n for _, n in packed[0]) for packed in case.shape["prompts"]], np.int32)
    known = np.minimum(whole, case.shape.get("cached", 0)).astype(np.int32)
    return known, whole - known


def _integers(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    if case.shape.get("causal"):
        known, new = _lengths(case)
        return {"lengths": new} | ({"context_lengths": known} if "cached" in case.shape else {})
    tokens, cached = batch(case)
    given = {name: getattr(tokens, name)[:, cached:] for name in _FIELDS}
    if cached:
        given |= {f"context_{name}": getattr(tokens, name)[:, :cached] for name in _FIELDS}
    shape = given["order"].shape
    if case.shape.get("window"):
        given["window"] = np.where(rng.random(shape) < 0.5, 2**30, rng.integers(0, 40, shape)).astype(
            np.int32
        )
    return given


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    s = case.shape
    tokens, cached = batch(case)
    rows, count = tokens.request.shape[0], tokens.request.shape[1] - cached

    def keys(n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, s["kv_heads"], n, s["dim"]), dtype)

    shapes = {
        "q": jax.ShapeDtypeStruct((rows, count, s["heads"], s["dim"]), dtype),
        "k": keys(count),
        "v": keys(count),
    }
    if cached:
        shapes |= {"context_k": keys(cached), "context_v": keys(cached)}
    given = _integers(case, np.random.default_rng(0))
    return shapes | {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in given.items()}


def _options(case: Case) -> dict[str, Any]:
    return {"layout": case.shape["layout"]}


def tokens_of(vectors: Mapping[str, jax.Array], prefix: str = "") -> Tokens | Causal:
    """The tokens that `integers` describes, of the new keys or, with the prefix "context_", of the context."""
    if prefix + "lengths" in vectors:
        return Causal(vectors[prefix + "lengths"])
    found = {name: vectors[prefix + name] for name in _FIELDS}
    return Tokens(**found, position=found["order"])


def flat(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: str,
    context_k: jax.Array | None = None,
    context_v: jax.Array | None = None,
    window: jax.Array | None = None,
    implementation: str = "auto",
    **vectors: jax.Array,
) -> jax.Array:
    """segment_attention with each array as an argument of its own, as OpCases calls it."""
    context = None
    if context_k is not None and context_v is not None:
        context = Context(context_k, context_v, tokens_of(vectors, "context_"))
    return segment_attention(
        q,
        k,
        v,
        tokens_of(vectors),
        LAYOUTS[layout],
        context=context,
        window=window,
        implementation=implementation,
    )


def _work(case: Case, dtype: Any) -> Work:
    """The work of the prompts; windows change little and are left out."""
    s, size = case.shape, jnp.dtype(dtype).itemsize
    layout, cached = LAYOUTS[s["layout"]], s.get("cached", 0)
    pairs = 0.0
    for packed in s["prompts"]:
        starts = np.cumsum([0, *(sum(n for _, n in prompt) for prompt in packed)])
        pairs += sum(
            _seen(prompt, layout.bits, max(0, cached - start))
            for prompt, start in zip(packed, starts, strict=False)
        )
    shapes = _shapes(case, dtype)
    moved = sum(int(np.prod(x.shape)) for x in shapes.values() if x.dtype != jnp.int32)
    queries = int(np.prod(shapes["q"].shape))
    return Work(4.0 * s["heads"] * s["dim"] * pairs, float(size * (moved + queries)))


def _seen(prompt: Prompt, bits: npt.NDArray[np.int32], cached: int) -> float:
    """How many pairs there are of a query, not among the `cached` first tokens, and a key that it sees."""
    kinds = np.array([kind for kind, _ in prompt])
    lengths = np.array([n for _, n in prompt], np.float64)
    ends = np.cumsum(lengths)
    new = np.clip(ends - cached, 0, lengths)  # queries of each segment
    table = bits[kinds][:, None] >> kinds & 1 == 1
    whole = np.diag(table).copy()  # segments of a kind that sees all of its own
    table |= np.tril(bits[kinds][:, None] >> EARLIER >> kinds & 1 == 1, -1)
    np.fill_diagonal(table, False)
    own = np.where(whole, new * lengths, new * (lengths - new) + new * (new + 1) / 2)
    return float(own.sum() + new @ (table @ lengths))


OP = OpCases(
    "segment_attention", flat, CASES, _shapes, _integers, _work, _options, timed=("pallas", "native", "xla")
)
