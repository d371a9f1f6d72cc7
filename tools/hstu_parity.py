# SPDX-License-Identifier: Apache-2.0
"""Parity of HSTU, in its research form and as the STU, with tests/golden/hstu, array by array (MODEL-6 to MODEL-15).

    python -m tools.hstu_parity [FOLDER]          prints the largest error of every array

`comparisons` is the one place that says how each array is reproduced; the tests assert on what it yields. Every number
comes from the functions that serve: the stacks whole, grown by an event and in parts, and the operator in its XLA form.
All sizes are those of the files; what is missing is an error, and exit codes are those of tools/golden_parity.py.

Letters: B histories, N places, D hidden, L layers, H heads, a and b width of a query and of a value.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgr.models import hstu, retrievers, stu, stu_scorer
from jgr.models.hstu import History, HstuConfig, HstuLayer, HstuParams
from jgr.models.stu import StuConfig, StuLayer
from jgr.ops.biased_attention import Bias, Causal, Places, biased_attention, spread
from jgr.ops.dense import dense
from jgr.ops.segment_attention import visibility
from jgr.prompt.layouts import CAUSAL, SINGLE_USER_MULTI_ITEM, Layout, Tokens
from tools.golden_parity import Arrays, Comparison, held_against, show
from tools.hstu_golden import (
    ATOL,
    GOLDEN,
    INPUTS,
    Array,
    golden,
    golden_config,
    golden_stack,
    int32,
    masked_by,
    next_times,
    only,
    padded,
    research_layers,
)

Named = Iterator[tuple[str, Array, Array]]

_blocks = jax.jit(hstu.blocks, static_argnames="cfg")
_encode = jax.jit(hstu.encode, static_argnames="cfg")
_encode_positions = jax.jit(stu_scorer.encode_positions, static_argnames=("contextual", "scale"))


def comparisons(file: str, folder: Path = GOLDEN) -> Iterator[Comparison]:
    """Every output array of one of FILES. Raises GoldenError."""
    z = golden(file, folder)
    return held_against(file, z, _REPRODUCED_BY[file](z), INPUTS)


def grown(z: Arrays) -> tuple[jax.Array, jax.Array, History]:
    """Grow histories event by event, each asked at a wrong time before its next event comes.

    Returns the last two answers, [B, D] of length 1 each, and the histories at the end. The authors' cached run
    replaces the last row of each history; what they cache holds a row that was computed for another time, which growing
    must repair.
    """
    cfg, at = golden_config(z, z["x"].shape[0] * z["x"].shape[1]), z["delta_positions"]
    embed = z["x"].reshape(cfg.n_items, -1) / np.sqrt(cfg.hidden)  # every place an item of its own
    weights = HstuParams(embed, np.zeros((cfg.length, cfg.hidden), np.float32), research_layers(z))
    rows, times = np.arange(cfg.n_items, dtype=np.int32).reshape(len(at), -1), next_times(z)
    users, answers, history = np.arange(len(at))[:, None], [], hstu.empty(cfg, len(at))
    for left in reversed(range(cfg.length)):
        event = at[:, None] - left  # below 0: the history has yet to begin
        new: Array = np.where(event >= 0, rows[users, event], -1)
        late = np.array([0, 12_345 if left else 0], np.int32)
        asked = None if times is None else times[users, event + np.arange(2)] + late
        answer, history = hstu.extend(weights, cfg, history, new, asked)
        answers.append(answer)
    return answers[-2], answers[-1], history


def _research(z: Arrays) -> Named:
    cfg, layers, lengths, times = golden_config(z), research_layers(z), int32(z["lengths"]), next_times(z)
    real = np.arange(cfg.length) < lengths[:, None]

    def stack(x: Array, count: int) -> Array:
        return np.asarray(_blocks(only(layers, count), cfg, x, lengths, times))

    yield "mask", _visible(Causal(jnp.array([cfg.length])), cfg.length, None, CAUSAL)[0], z["mask"]
    for array, x in (("y", "x"), ("cached_y_old", "cached_x_old")):
        yield array, stack(z[x], cfg.layers)[real], z[array][real]
    _, after, history = grown(z)
    want = z["delta_y"][np.arange(len(lengths)), z["delta_positions"]]
    yield "delta_y", after, want / np.linalg.norm(want, axis=1, keepdims=True)
    h = z["x"]
    for i in range(cfg.layers):
        k, v = np.asarray(history.k)[i], np.asarray(history.v)[i]
        found = _inside(jax.tree.map(lambda x, i=i: x[i], layers), h, k, v, lengths, times, cfg=cfg)
        h = stack(z["x"], i + 1)
        found |= {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2), "y": h}
        for name, got in found.items():
            yield f"layer{i}_{name}", np.asarray(got)[real], z[f"layer{i}_{name}"][real]


@jax.jit(static_argnames="cfg")
def _inside(
    layer: HstuLayer, h: Array, k: Array, v: Array, lengths: Array, times: Array, *, cfg: HstuConfig
) -> dict[str, jax.Array]:
    """What one layer computes over h [B, N, D] with its cached keys and values [B, H, N, a and b].

    Queries [B, N, H, a], what attention gives [B, N, H b] and, where timed, the bias [B, N, N].
    """
    x = dense(hstu.standard(h), layer.uvqk)
    q = hstu.split_uvqk(jax.nn.silu(x) if cfg.activated else x, cfg.heads, cfg.qk_dim, cfg.v_dim)[2]
    found: dict[str, jax.Array] = {"q": q}
    options: dict[str, Any] = {}
    if times is not None:
        asked, happened = times[:, 1:], times[:, :-1]
        bias, places = (
            Bias(layer.positions, layer.times),
            jnp.broadcast_to(jnp.arange(cfg.length), happened.shape),
        )
        found["rel_bias"] = spread(bias, Places(places, asked), Places(places, happened))[:, 0]
        options = {"bias": bias, "query_times": asked, "key_times": happened}
    found["attn"] = biased_attention(
        q, k, v, Causal(lengths), activation="silu", divisor=cfg.length, implementation="xla", **options
    ).reshape(*h.shape[:2], -1)
    return found


def _full_model(z: Arrays) -> Named:
    cfg, times = golden_config(z, len(z["item_embedding"]) - 1), next_times(z)
    weights = HstuParams(z["item_embedding"][1:], z["position_embedding"], research_layers(z))
    rows, real = int32(z["past_ids"]) - 1, z["past_ids"] > 0
    yield "past_lengths", real.sum(1), z["past_lengths"]
    got = np.asarray(_encode(weights, cfg, rows, times=times))
    yield "encoded", got[real], z["encoded"][real]
    yield "current", got[np.arange(len(rows)), real.sum(1) - 1], z["current"]
    yield "item_scores", retrievers.scores_after(weights, rows, times, cfg=cfg), z["item_scores"]


def _stu_stack(z: Arrays) -> Named:
    cfg, weights = golden_stack(z)
    lengths, delta, places = int32(z["lengths"]), int(z["delta_size"]), np.arange(cfg.length)
    history, before = lengths - int32(z["num_targets"]), lengths - delta
    real, cached = places < lengths[:, None], places < before[:, None]

    def begin(count: int, ends: Array) -> tuple[Array, stu.Past]:
        y, past = _stu_rows(only(weights, count), z["x"], history, ends, np.zeros_like(ends), None, cfg=cfg)
        return np.asarray(y), past

    yield "y", begin(cfg.layers, lengths)[0][real], z["y"][real]
    for i in range(cfg.layers):
        yield f"layer{i}_y", begin(i + 1, lengths)[0][real], z[f"layer{i}_y"][real]
    first, past = begin(cfg.layers, before)
    yield "prefill_y", first[cached], z["prefill_y"][cached]
    for i in range(cfg.layers):
        for array, got in ((f"layer{i}_k_cache", past.k), (f"layer{i}_v_cache", past.v)):
            yield array, np.asarray(got)[i].swapaxes(1, 2)[cached], z[array][cached]
    x = np.take_along_axis(z["x"], (before[:, None] + np.arange(delta))[..., None], axis=1)
    for array, length in (("delta_y", cfg.length), ("delta_y_tight", int(z["delta_y_tight_max_seq_len"]))):
        pinned = dataclasses.replace(cfg, length=length)
        yield array, _stu_rows(weights, x, history, lengths, before, past, cfg=pinned)[0], z[array]


@jax.jit(static_argnames="cfg")
def _stu_rows(
    weights: StuLayer, x: Any, history: Any, ends: Any, starts: Any, past: stu.Past | None, *, cfg: StuConfig
) -> tuple[jax.Array, stu.Past]:
    tokens = stu.describe(cfg, history, ends, starts, x.shape[1])
    return stu.layers(weights, cfg, x, tokens, history, past)


@jax.jit(static_argnames="divisor")
def _attend(
    q: Any, k: Any, v: Any, tokens: Tokens, keys: Tokens, window: Any, scale: Any, *, divisor: int
) -> jax.Array:
    return biased_attention(
        q, k.swapaxes(1, 2), v.swapaxes(1, 2), tokens, keys=keys, window=window, activation="silu", scale=scale,
        divisor=divisor, implementation="xla",
    )  # fmt: skip


@jax.jit(static_argnames=("rows", "layout"))
def _visible(
    tokens: Tokens | Causal, rows: int, window: Any, layout: Layout = SINGLE_USER_MULTI_ITEM
) -> jax.Array:
    """[B, rows, rows]: who sees whom."""
    q, unused = jnp.zeros((1, rows, 1, 1)), jnp.zeros((1, 1, rows, 1))
    call = visibility.Arguments(q, unused, unused, tokens, layout, window=window)
    queries, (source,) = visibility.prepare(call)
    rows_of = jax.tree.map(lambda x: x[:, :, None], queries)
    return visibility.visible(rows_of, jax.tree.map(lambda x: x[:, None], source.keys))


def _attention(z: Arrays) -> Named:
    lengths = int32(z["lengths"])
    rows = max(int(z[f"{variant}_max_seq_len"]) for variant in z["variants"])
    q, k, v = (padded(z[name], z["seq_offsets"], rows) for name in "qkv")
    real = np.arange(rows) < lengths[:, None]
    for variant in z["variants"]:
        cfg, history = masked_by(z, variant)
        tokens = stu.describe(cfg, history, lengths, 0, rows)
        window, n = stu.window(cfg, tokens, history), int(z[f"{variant}_max_seq_len"])
        out = _attend(q, k, v, tokens, tokens, window, z["alpha"], divisor=n)
        yield f"{variant}_out", np.asarray(out)[real], z[f"{variant}_out"]
        want = z[f"{variant}_mask"] & real[:, :n, None] & real[:, None, :n]
        yield f"{variant}_mask", _visible(tokens, rows, window)[:, :n, :n], want


def _cached_attention(z: Arrays) -> Named:
    lengths, delta, length = int32(z["lengths"]), int(z["delta_size"]), int(z["max_seq_len"])
    k, v = (padded(z[name], z["seq_offsets"], length) for name in "kv")
    q = z["delta_q"].reshape(len(lengths), delta, *z["delta_q"].shape[1:])
    for variant in z["variants"]:
        cfg, history = masked_by(z, variant)
        tokens = stu.describe(cfg, history, lengths, lengths - delta, delta)
        keys, window = stu.describe(cfg, history, lengths, 0, length), stu.window(cfg, tokens, history)
        out = _attend(q, k, v, tokens, keys, window, z["alpha"], divisor=length)
        yield f"{variant}_out", out.reshape(-1, *out.shape[2:]), z[f"{variant}_out"]


def _positions(z: Arrays) -> Named:
    lengths, rows = z["lengths"], int(z["max_seq_len"])
    places = np.broadcast_to(np.arange(rows), (len(lengths), rows))
    x, stamps = (padded(z[name], z["seq_offsets"], rows) for name in ("seq_embeddings", "timestamps"))
    ages = np.take_along_axis(stamps, lengths[:, None] - 1, axis=1) - stamps
    position, time = (z[f"{name}_embedding"] for name in ("position", "time"))
    for variant in z["variants"]:
        ends = lengths - {"no_targets": 0, "interleaved": 2}.get(variant, 1) * z["num_targets"]
        context = 0 if variant in ("no_context", "interleaved") else int(z["contextual_seq_len"])
        scale: Literal["sqrt", "log"] = "log" if variant == "log" else "sqrt"
        out = _encode_positions(x, position, time, places, ends, ages, contextual=context, scale=scale)
        yield f"{variant}_out", np.asarray(out)[places < lengths[:, None]], z[f"{variant}_out"]


_REPRODUCED_BY: dict[str, Callable[[Arrays], Named]] = {
    "research_stack": _research,
    "research_stack_concat_ua": _research,
    "research_stack_no_timestamps": _research,
    "research_full_model": _full_model,
    "stu_stack": _stu_stack,
    "stu_stack_contextual": _stu_stack,
    "stu_stack_window": _stu_stack,
    "attention_op": _attention,
    "cached_attention_op": _cached_attention,
    "positional_encoder": _positions,
}
FILES = tuple(_REPRODUCED_BY)


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0]) if argv else GOLDEN
    return show((("hstu", c) for file in FILES for c in comparisons(file, folder)), ATOL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
