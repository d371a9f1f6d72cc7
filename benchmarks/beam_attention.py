# SPDX-License-Identifier: Apache-2.0
"""Staged beam attention against the forms that do without it (XGR-5), and both variants of the beams' KV (XGR-4).

What is timed is one decode step of one request in one layer, for the second generated token, so there are two own
slots. All forms run in one process, in turns:

- staged: jgr.ops.beam_attention with a table of ancestors, as the engine runs it.
- staged_in_place: the same after moving the first slot's rows in place (reorder_beam_kv), without a table.
- copied: every beam is a sequence of its own with its own copy of the prompt's keys and values, batched einsums.
- broadcast: the same with the copy left to the compiler.
- sdpa: PyTorch's scaled_dot_product_attention over such sequences, whose copies hold their own slots already, where
  PyTorch is installed (CPU). beams_as_sequences is the fastest of the three.
- tree_mask: all beams' slots behind the prompt as one sequence, each beam masked to its own (TreeAttention).

The floor is the time of the multiplications at the rate of a matmul of 2048 (GPU: 8192) rows, timed in the same rounds.
On a CPU the shape is that of a small generator (4 heads, 2 of keys, 64 wide, float32); on a GPU Qwen3-0.6B's, bfloat16.

    python -m benchmarks.beam_attention [--quick]
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.ops.beam_attention import beam_attention, reorder_beam_kv
from jgr.ops.beam_attention.cases import OP
from jgr.ops.roofline import seconds_per_call
from jgr.ops.testing import Case

THREADS = 2
SHAPES: Mapping[str, dict[str, Any]] = {
    "cpu": dict(heads=4, kv_heads=2, dim=64, dtype="float32"),
    "gpu": dict(heads=16, kv_heads=8, dim=128, dtype="bfloat16"),
}
MATMUL_ROWS = {"cpu": 2048, "gpu": 8192}
MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 3e-2}
PAPER_RATIO = 6.6

Arrays = dict[str, jax.Array]


def staged(a: Arrays) -> jax.Array:
    own = a["beam_k"], a["beam_v"], a["ancestors"]
    return beam_attention(a["q"], a["context_k"], a["context_v"], a["lengths"], *own)


def staged_in_place(a: Arrays) -> jax.Array:
    """The same without a table: the first slot's rows are moved first. a["beam_k"], a["beam_v"]: slots that were not
    moved yet; a["ancestors"][:, 0]: the parent of each row, ascending."""
    parents = a["ancestors"][:, 0]

    def moved(kv: jax.Array) -> jax.Array:
        return jnp.concatenate([reorder_beam_kv(kv[:, :1], parents), kv[:, 1:]], axis=1)

    own = moved(a["beam_k"]), moved(a["beam_v"]), None
    return beam_attention(a["q"], a["context_k"], a["context_v"], a["lengths"], *own)


def _sequences(a: Arrays, prompt_k: jax.Array, prompt_v: jax.Array) -> jax.Array:
    """Attention of beams as sequences. prompt_k, prompt_v: [B, W, K, T, d], a full prompt for each beam."""
    batch, width, heads, dim = a["q"].shape
    kv_heads = prompt_k.shape[2]
    q = a["q"].reshape(batch, width, kv_heads, heads // kv_heads, dim) * jnp.asarray(dim**-0.5, a["q"].dtype)
    own_k, own_v = (
        jnp.take_along_axis(a[name], a["ancestors"][..., None, None], axis=2).transpose(0, 2, 3, 1, 4)
        for name in ("beam_k", "beam_v")
    )
    tokens = prompt_k.shape[3]
    scores = jnp.concatenate(
        [
            jnp.einsum("bwkgd,bwktd->bwkgt", q, k, preferred_element_type=jnp.float32)
            for k in (prompt_k, own_k)
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(prompt_v.dtype)
    out = jnp.einsum(
        "bwkgt,bwktd->bwkgd", weights[..., :tokens], prompt_v, preferred_element_type=jnp.float32
    )
    out += jnp.einsum("bwkgt,bwktd->bwkgd", weights[..., tokens:], own_v, preferred_element_type=jnp.float32)
    return out.reshape(a["q"].shape).astype(a["q"].dtype)


def copied(a: Arrays) -> jax.Array:
    return _sequences(a, a["copied_k"], a["copied_v"])


def broadcast(a: Arrays) -> jax.Array:
    batch, width = a["q"].shape[:2]
    shape = (batch, width, *a["context_k"].shape[1:])
    return _sequences(a, *(jnp.broadcast_to(a[n][:, None], shape) for n in ("context_k", "context_v")))


def tree_mask(a: Arrays) -> jax.Array:
    batch, width, heads, dim = a["q"].shape
    kv_heads, tokens = a["context_k"].shape[1:3]
    slots, groups = a["beam_k"].shape[1], heads // kv_heads
    k, v = (
        jnp.concatenate(
            [a[context], a[own].transpose(0, 3, 1, 2, 4).reshape(batch, kv_heads, slots * width, dim)], axis=2
        )
        for context, own in (("context_k", "beam_k"), ("context_v", "beam_v"))
    )
    q = a["q"].reshape(batch, width, kv_heads, groups, dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, width * groups, dim) * jnp.asarray(dim**-0.5, a["q"].dtype)
    scores = jnp.einsum("bkrd,bktd->bkrt", q, k, preferred_element_type=jnp.float32)
    own_slot = (a["ancestors"][..., None] == jnp.arange(width)).transpose(0, 2, 1, 3)  # [B, W, S, W]
    seen = jnp.concatenate(
        [jnp.ones((batch, width, tokens), bool), own_slot.reshape(batch, width, slots * width)], axis=-1
    )
    scores = jnp.where(jnp.repeat(seen, groups, axis=1)[:, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkrt,bktd->bkrd", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, width, groups, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(a["q"].shape).astype(a["q"].dtype)


def sdpa(a: Arrays) -> Callable[[], Any] | None:
    """The call of PyTorch's attention, which gives [B * W, H, 1, d]; None where it is not installed, or on a GPU."""
    if find_spec("torch") is None or jax.default_backend() != "cpu":
        return None
    import torch

    torch.set_num_threads(THREADS)
    batch, width, heads, dim = a["q"].shape

    def sequences(name: str) -> Any:
        """The prompt's copy and each beam's own slots behind it, [B * W, K, T + S, d]."""
        own = jnp.take_along_axis(a[f"beam_{name}"], a["ancestors"][..., None, None], axis=2)
        own = own.transpose(0, 2, 3, 1, 4)
        whole = np.concatenate([np.asarray(a[f"copied_{name}"]), np.asarray(own)], axis=3)
        return torch.from_numpy(whole.reshape(batch * width, *whole.shape[2:]))

    q = torch.from_numpy(np.array(a["q"]).reshape(batch * width, heads, 1, dim))
    k, v = sequences("k"), sequences("v")
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)


VARIANTS: Mapping[str, Callable[[Arrays], jax.Array]] = {
    "staged": staged,
    "staged_in_place": staged_in_place,
    "copied": copied,
    "broadcast": broadcast,
    "tree_mask": tree_mask,
}


def make_case(tokens: int, width: int, shape: Mapping[str, Any]) -> Case:
    return Case("step", dict(tokens=tokens, lengths=(tokens,), width=width, slots=2, **shape))


def make_arrays(case: Case) -> Arrays:
    """The op's arguments, with the parents of rows ascending, and a copy of the prompt for every beam."""
    arrays = OP.draw(case, jnp.dtype(case.shape["dtype"]))
    arrays["ancestors"] = jnp.sort(arrays["ancestors"], axis=-1)
    for name in ("k", "v"):
        context = arrays[f"context_{name}"]
        shape = (context.shape[0], case.shape["width"], *context.shape[1:])
        arrays[f"copied_{name}"] = jnp.array(jnp.broadcast_to(context[:, None], shape))
    return arrays


def measure(quick: bool, quiet: Quiet) -> Measured:
    device = jax.default_backend()
    lengths, widths, rounds = ((512,), (128,), 1) if quick else ((512, 1024, 3072), (128, 256, 512), 5)
    side = MATMUL_ROWS[device]
    shape = SHAPES[device]
    matrix = jnp.ones((side, side), jnp.dtype(shape["dtype"]))
    rows = []
    for tokens in lengths:
        for width in widths:
            case = make_case(tokens, width, shape)
            arrays = make_arrays(case)
            calls = {name: functools.partial(jax.jit(run), arrays) for name, run in VARIANTS.items()}
            wanted = np.asarray(calls["staged"](), np.float32)
            difference = max(
                float(np.abs(np.asarray(c(), np.float32) - wanted).max()) for c in calls.values()
            )
            timed: dict[str, Callable[[], Any]] = dict(calls)
            if (other := sdpa(arrays)) is not None:
                timed["sdpa"] = other
                found = np.asarray(other()).reshape(wanted.shape)
                difference = max(difference, float(np.abs(found - wanted).max()))
            timed["matmul"] = functools.partial(jax.jit(jnp.matmul), matrix, matrix)
            runs = {name: functools.partial(seconds_per_call, call) for name, call in timed.items()}
            seconds = harness.interleave(runs, rounds, quiet)
            flops = OP.work(case, jnp.dtype(shape["dtype"])).flops
            rows.append(make_row(tokens, width, seconds, flops / (2 * side**3), difference))
    return Measured(claims(rows, MAX_DIFFERENCE[shape["dtype"]]), rows)


def make_row(
    tokens: int, width: int, seconds: Mapping[str, Sequence[float]], matmuls: float, difference: float
) -> Row:
    """One point's row. matmuls: the step's multiplications over those of the matmul that was timed."""
    times = {name: harness.spread(s * 1e3 for s in runs) for name, runs in seconds.items()}
    matmul = times.pop("matmul")["median"]
    median = {name: t["median"] for name, t in times.items()}
    sequences = min({"copied", "broadcast", "sdpa"} & median.keys(), key=lambda name: (median[name], name))
    return {
        "prompt_tokens": tokens,
        "beam_width": width,
        "time_ms": times,
        "flop_floor_ms": harness.rounded(matmul * matmuls),
        "beams_as_sequences": sequences,
        "over_staged": {
            "beams_as_sequences": harness.rounded(median[sequences] / median["staged"], 3),
            "tree_mask": harness.rounded(median["tree_mask"] / median["staged"], 3),
            "staged_in_place": harness.rounded(median["staged_in_place"] / median["staged"], 3),
        },
        "max_difference": harness.rounded(difference, 2),
    }


def claims(rows: Sequence[Row], max_difference: float) -> list[Claim]:
    """Claims on the paper's point, where it was measured, and on the agreement of all forms at every point."""
    worst = max(row["max_difference"] for row in rows)
    found = [Claim("beam-attention-forms-differ-by", worst, "", "lower", max_difference)]
    for row in rows:
        if (row["prompt_tokens"], row["beam_width"]) == (1024, 512):
            for name, target in (("beams_as_sequences", PAPER_RATIO), ("tree_mask", 1.0)):
                words = name.replace("_", "-")
                ratio = row["over_staged"][name]
                found.append(
                    Claim(f"time-of-{words}-over-staged-beam-512-prompt-1024", ratio, "x", "higher", target)
                )
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Median time over beam width, a panel for each prompt length, with the floor."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lengths = sorted({row["prompt_tokens"] for row in rows})
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(4.5 * len(lengths), 3.6), sharey=True, squeeze=False
    )
    for axis, length in zip(axes[0], lengths, strict=True):
        panel = [row for row in rows if row["prompt_tokens"] == length]
        widths = [row["beam_width"] for row in panel]
        for name in VARIANTS:
            axis.plot(widths, [row["time_ms"][name]["median"] for row in panel], marker="o", label=name)
        axis.plot(widths, [row["flop_floor_ms"] for row in panel], "k--", label="FLOP floor")
        axis.set(xscale="log", yscale="log", xticks=widths, xticklabels=widths)
        axis.set(title=f"prompt of {length} tokens", xlabel="beam width")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms for one layer of one step")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="beam_attention",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
            plot=plot,
            device=jax.default_backend(),
        )
    )
