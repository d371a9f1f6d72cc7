# SPDX-License-Identifier: Apache-2.0
"""HSTU's attention with its relative bias over long histories: time and memory of our forms and of plain jax.numpy.

One layer's attention of one history: SiLU, causal, tables of positions and of times (MODEL-6, 7). In one process, in
turns:

- plain: the formula in jax.numpy, jitted as it stands: all logits, their biases and the mask are arrays.
- xla: jgr.ops.biased_attention block by block; on a GPU also pallas, the kernel (FLAME-8).

Temporary memory is the compiler's own figure for the compiled program, also of its gradient, which is not timed. An
array of all pairs of tokens would take tokens x tokens bytes if it held one byte each. The floor is the products' time,
half of the square's, at the rate of a matmul of 2048 (GPU: 8192) rows, timed in the same rounds.

    python -m benchmarks.hstu_attention [--quick]
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.ops.biased_attention.cases import OP
from jgr.ops.roofline import seconds_per_call
from jgr.ops.segment_attention.cases import causal
from jgr.ops.testing import Case

THREADS = 2
TOKENS = (1024, 2048, 4096, 8192, 16384)
MAX_PLAIN_TOKENS = 8192
SHAPES: Mapping[str, dict[str, Any]] = {
    "cpu": dict(heads=2, kv_heads=2, dim=64, dtype="float32"),
    "gpu": dict(heads=4, kv_heads=4, dim=128, dtype="bfloat16"),
}
FORMS: Mapping[str, tuple[str, ...]] = {"cpu": ("xla",), "gpu": ("xla", "pallas")}
MATMUL_ROWS = {"cpu": 2048, "gpu": 8192}
MAX_DIFFERENCE = {"float32": 1e-4, "bfloat16": 3e-2}
GRADIENTS_OF = ("q", "k", "v", "positions", "times")

Arrays = dict[str, jax.Array]


def plain(a: Arrays, scale: float, divisor: float) -> jax.Array:
    """The formula, for a history without padding."""
    tokens = a["q"].shape[1]
    place = jnp.arange(tokens)
    away = jnp.abs(a["query_times"][:, :, None] - a["key_times"][:, None])
    bucket = jnp.log(jnp.maximum(away, 1).astype(jnp.float32)) / 0.301
    bias = a["positions"][0][tokens - 1 + place[None, :] - place[:, None]]
    bias = bias + a["times"][0][jnp.clip(bucket.astype(jnp.int32), 0, a["times"].shape[1] - 1)]
    logits = jnp.einsum("bthd,bhsd->bhts", a["q"], a["k"], preferred_element_type=jnp.float32)
    weights = jax.nn.silu(logits * scale + bias[:, None]) / divisor
    weights = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), weights, 0.0).astype(a["v"].dtype)
    out = jnp.einsum("bhts,bhsd->bthd", weights, a["v"], preferred_element_type=jnp.float32)
    return out.astype(a["q"].dtype)


def make_case(tokens: int, shape: Mapping[str, Any]) -> Case:
    return Case("layer", dict(**causal(tokens), activation="silu", reach=tokens, timed=True, **shape))


def _op(a: Arrays, options: Mapping[str, Any]) -> jax.Array:
    out: jax.Array = OP.call(**a, **options)
    return out


def calls(case: Case, forms: Sequence[str]) -> dict[str, Callable[[Arrays], jax.Array]]:
    options = OP.options(case)
    found: dict[str, Callable[[Arrays], jax.Array]] = {
        "plain": functools.partial(plain, scale=options["scale"], divisor=options["divisor"])
    }
    for form in forms:
        found[form] = functools.partial(_op, options=options | {"implementation": form})
    return found


def gradient(call: Callable[[Arrays], jax.Array]) -> Callable[[Arrays], Any]:
    """The gradient of the sum of squares of a result, so that the result itself is needed too."""

    def loss(of: Arrays, others: Arrays) -> jax.Array:
        out = call(of | others).astype(jnp.float32)
        return (out * out).sum()

    def run(a: Arrays) -> Any:
        of = {name: a[name] for name in GRADIENTS_OF}
        return jax.grad(loss)(of, {name: x for name, x in a.items() if name not in of})

    return run


def temporary_bytes(call: Callable[[Arrays], Any], arrays: Any) -> int:
    """arrays: or their shapes."""
    analysis = jax.jit(call).lower(arrays).compile().memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def measure(quick: bool, quiet: Quiet) -> Measured:
    device = jax.default_backend()
    shape, side = SHAPES[device], MATMUL_ROWS[device]
    dtype = jnp.dtype(shape["dtype"])
    matrix = jnp.ones((side, side), dtype)
    lengths, rounds = ((512,), 1) if quick else (TOKENS, 5)
    rows = []
    for tokens in lengths:
        case = make_case(tokens, shape)
        arrays = OP.draw(case, dtype)
        forms = calls(case, FORMS[device])
        if tokens > MAX_PLAIN_TOKENS:
            del forms["plain"]
        memory = {name: temporary_bytes(call, arrays) for name, call in forms.items()}
        backwards = {
            name: temporary_bytes(gradient(call), arrays) for name, call in forms.items() if name != "pallas"
        }
        runs: dict[str, Callable[[], Any]] = {
            name: functools.partial(jax.jit(call), arrays) for name, call in forms.items()
        }
        wanted = np.asarray(runs["xla"](), np.float32)
        difference = max(float(np.abs(np.asarray(run(), np.float32) - wanted).max()) for run in runs.values())
        runs["matmul"] = functools.partial(jax.jit(jnp.matmul), matrix, matrix)
        timers = {name: functools.partial(seconds_per_call, run) for name, run in runs.items()}
        seconds = harness.interleave(timers, rounds, quiet)
        matmuls = OP.work(case, dtype).flops / (2 * side**3)
        rows.append(make_row(tokens, seconds, matmuls, memory, backwards, difference))
    return Measured(claims(rows, MAX_DIFFERENCE[shape["dtype"]]), rows)


def make_row(
    tokens: int,
    seconds: Mapping[str, Sequence[float]],
    matmuls: float,
    memory: Mapping[str, int],
    backwards: Mapping[str, int],
    difference: float,
) -> Row:
    """matmuls: the products, in those of the matmul that was timed. memory, backwards: temporary bytes."""
    times = {name: harness.spread(s * 1e3 for s in runs) for name, runs in seconds.items()}
    floor = times.pop("matmul")["median"] * matmuls
    best = min(time["median"] for name, time in times.items() if name != "plain")
    row: Row = {
        "tokens": tokens,
        "time_ms": times,
        "flop_floor_ms": harness.rounded(floor),
        "share_of_floor": harness.rounded(floor / best, 3),
        "temporary_bytes": dict(memory),
        "temporary_bytes_of_gradient": dict(backwards),
        "pairs": tokens * tokens,
        "max_difference": harness.rounded(difference, 2),
    }
    if "plain" in times:
        row["plain_over_best"] = harness.rounded(times["plain"]["median"] / best, 3)
    return row


def claims(rows: Sequence[Row], max_difference: float) -> list[Claim]:
    """The agreement of the forms; time at the longest history that the plain form was given; memory at the longest."""
    worst, longest = max(row["max_difference"] for row in rows), rows[-1]
    found = [Claim("hstu-attention-forms-differ-by", worst, "", "lower", max_difference)]
    for row in rows:
        if row["tokens"] == MAX_PLAIN_TOKENS:
            name = f"time-of-plain-attention-over-ours-{row['tokens']}-tokens"
            found.append(Claim(name, row["plain_over_best"], "x", "higher", 1.0))
    if longest["tokens"] == max(TOKENS):
        for name, words in (
            ("temporary_bytes", "temporary"),
            ("temporary_bytes_of_gradient", "gradient-temporary"),
        ):
            share = max(longest[name].values()) / longest["pairs"]
            claim = f"{words}-bytes-a-pair-{longest['tokens']}-tokens"
            found.append(Claim(claim, harness.rounded(share, 3), "", "lower", 1.0))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time and temporary memory over tokens."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    lengths = [row["tokens"] for row in rows]
    for name in sorted({name for row in rows for name in row["time_ms"]}):
        there = [row for row in rows if name in row["time_ms"]]
        at = [row["tokens"] for row in there]
        time.plot(at, [row["time_ms"][name]["median"] for row in there], marker="o", label=name)
        used = [row["temporary_bytes"][name] / 2**20 for row in there]
        memory.plot(at, used, marker="o", label=name)
    time.plot(lengths, [row["flop_floor_ms"] for row in rows], "k--", label="FLOP floor")
    memory.plot(lengths, [row["pairs"] / 2**20 for row in rows], "k--", label="one byte a pair")
    for axis, label in ((time, "ms for one layer"), (memory, "temporary MiB")):
        axis.set(xscale="log", yscale="log", xticks=lengths, xticklabels=lengths)
        axis.set(xlabel="tokens of history", ylabel=label)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="hstu_attention",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
            plot=plot,
            device=jax.default_backend(),
        )
    )
