# SPDX-License-Identifier: Apache-2.0
"""The device memory of `recommend` for a Qwen3-4B in bfloat16, by beam width and prompt length, explained (XGR-3).

Nothing runs: the whole program, with weights as `jgr serve` holds them on a GPU, is compiled for an H200, as
tools/compile_gpu.py does with the CUDA plugin and no GPU. (A CPU's program would tell nothing: there XLA computes
bfloat16 in float32 and copies the weights.) The compiler's buffer assignment says where each value lies. All places of
values that have the shape of the keys or values of a prompt in one layer must together be as large as the formula says,
to the byte. So the prompt is stored once, whatever the beam width. Those of the beams are told, but no more: of the
last step's slot one layer lives at a time, in places that other values had before.

    prompt KV = 2 x layers x KV heads x head size x 2 bytes x tokens
    beam KV   = the same x beam width x (phases - 2)
    the rest  = hidden states and the widest intermediate of the larger of prefill and decode; see `activations`

The paper's figures are of a server under load (RPS 4) on one NPU of 64 GB; ours are of one request's program.

    PYTHONPATH=build/gpu-compile-.venv python -m benchmarks.beam_memory [--quick]      after make compile-gpu
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, work
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import beam, decoder, params, shapes
from jgr.models.decoder import DecoderConfig
from jgr.models.generators import with_layers_joined
from tools import compile_gpu
from tools.compile_gpu import Program

MODEL = "qwen3-4b"
DEPTH, N_ITEMS = shapes.LEVELS, 20_000
ITEMSIZE = 2
PAPER_GB = {(1024, 512): (10.6, 46.3), (3072, 256): (12.0, 30.0)}
"""By (prompt tokens, beam width): the peak of xGR, and that of the engine that the paper compares it with."""

_ALLOCATION = re.compile(r"allocation (\d+): ")
_VALUE = re.compile(r" value: <\d+ (\S+) .*?@\d+> \(size=(\d+),offset=(\d+)\): (\S+)")


class Value(NamedTuple):
    """An array of the compiled program: where it lies, and its type, such as "bf16[36,1,8,1024,128]"."""

    allocation: int
    name: str
    size: int
    offset: int
    type: str


def read_values(text: str) -> list[Value]:
    """The values of XLA's dump of a buffer assignment."""
    found, allocation = [], -1
    for line in text.splitlines():
        if opened := _ALLOCATION.match(line):
            allocation = int(opened[1])
        elif value := _VALUE.match(line):
            shape = value[4].partition("{")[0]
            found.append(Value(allocation, value[1], int(value[2]), int(value[3]), shape))
        elif line.startswith("Total bytes used"):
            break
    return found


def occupied(values: Iterable[Value]) -> int:
    """The bytes of all places that the values have at any time."""
    total, end, last = 0, 0, -1
    for value in sorted(values, key=lambda v: (v.allocation, v.offset)):
        end = end if value.allocation == last else 0
        total += max(0, value.offset + value.size - max(end, value.offset))
        end, last = max(end, value.offset + value.size), value.allocation
    return total


def qwen3() -> DecoderConfig:
    """The model that is measured."""
    cfg = shapes.named(MODEL)
    assert isinstance(cfg, DecoderConfig)
    return cfg


def activations(cfg: DecoderConfig, tokens: int, width: int) -> int:
    """About the bytes that a step needs besides keys and values: hidden states, and the gate and up of the MLP.

    The step is prefill, or a decode step with its level's logits in float32, whichever needs more.
    """
    row = ITEMSIZE * (2 * cfg.hidden + 2 * cfg.mlp)
    return max(tokens * row, width * (row + 4 * shapes.LEVEL_SIZE))


def program(cfg: DecoderConfig, tokens: int, width: int) -> Program:
    """`recommend` for one prompt, without weights."""
    codes = np.random.default_rng(0).integers(0, shapes.LEVEL_SIZE, (N_ITEMS, DEPTH), np.int32)
    tree, level_tokens = PrefixTree.build(codes), shapes.level_tokens(cfg)
    stacks = params.abstract(decoder.spec(cfg), jnp.bfloat16)
    weights = jax.eval_shape(with_layers_joined, stacks)
    tables = jax.eval_shape(lambda w: beam.catalog_tables(tree, level_tokens, w), weights)
    prompt, number = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    call = functools.partial(beam.recommend, cfg=cfg, width=width)
    return Program("recommend", "", call, (weights, tables, prompt, number, number), weights=weights)


def make_row(cfg: DecoderConfig, tokens: int, width: int, analysis: Any, values: Sequence[Value]) -> Row:
    """One point's row. analysis: the program's memory analysis."""
    arrays = [v for v in values if not v.type.startswith("(")]  # a tuple is a table of addresses
    # What a kernel gives first or alone, queries and what attention gives, is as large as a prompt's keys where beams
    # times heads are as many as tokens times key heads.
    stored = [v for v in arrays if not re.fullmatch(r"pallas_call[.\d]*(\{0\})?", v.name)]
    prompt, beams = (
        [v for v in stored if v.type == f"bf16[1,{count * cfg.kv_heads},{cfg.head_dim}]"]
        for count in (tokens, width)
    )
    weights = ITEMSIZE * params.count(decoder.spec(cfg))
    explained = {
        "weights": weights,
        "catalog_and_inputs": analysis.argument_size_in_bytes - weights,
        "prompt_kv": work.kv_bytes(cfg, tokens, ITEMSIZE),
        "beam_kv": work.kv_bytes(cfg, width * (DEPTH - 2), ITEMSIZE),
        "activations": activations(cfg, tokens, width),
    }
    kv = {v.name for v in (*prompt, *beams)}
    temporary = [v for v in arrays if v.name not in kv]
    scratch = {v.allocation for v in (*prompt, *beams)}
    largest = sorted({(v.size, v.type) for v in temporary if v.allocation in scratch}, reverse=True)[:5]
    peak = analysis.peak_memory_in_bytes
    return {
        "prompt_tokens": tokens,
        "beam_width": width,
        "peak_bytes": peak,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "explained_bytes": explained,
        "found_kv_bytes": {"prompt_kv": occupied(prompt), "beam_kv": occupied(beams)},
        "unexplained": harness.rounded(abs(peak - sum(explained.values())) / peak, 3),
        "largest_others": [f"{kind}: {size} bytes" for size, kind in largest],
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    wrong = sum(abs(row["found_kv_bytes"]["prompt_kv"] - row["explained_bytes"]["prompt_kv"]) for row in rows)
    found = [
        Claim("prompt-kv-bytes-beside-the-formula", wrong, "bytes", "lower", 0),
        Claim("memory-unexplained", 100 * max(row["unexplained"] for row in rows), "%", "lower", 5.0),
    ]
    for row in rows:
        point = (row["prompt_tokens"], row["beam_width"])
        if point in PAPER_GB:
            gb = harness.rounded(row["peak_bytes"] / 1e9)
            name = f"memory-of-a-4b-model-prompt-{point[0]}-beam-{point[1]}"
            found.append(Claim(name, gb, "GB", "lower", PAPER_GB[point][0]))
    return found


def measure_point(
    cfg: DecoderConfig, tokens: int, width: int, compile_: Callable[[Program], Any], dump: Path
) -> Row:
    """Compile one point. dump: the folder that XLA dumps to."""
    before = set(dump.glob("*"))
    analysis = compile_(program(cfg, tokens, width)).memory_analysis()
    written = set(dump.glob("*buffer-assignment.txt")) - before
    (path,) = [path for path in written if "recommend" in path.name]
    return make_row(cfg, tokens, width, analysis, read_values(path.read_text()))


def measure(quick: bool, quiet: Quiet) -> Measured:
    del quiet  # nothing is timed
    cfg = qwen3()
    lengths, widths = ((1024,), (512,)) if quick else ((1024, 2048, 3072), (128, 256, 512))
    with tempfile.TemporaryDirectory() as folder:
        given = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{given} --xla_dump_to={folder}"  # read when XLA's first backend starts
        try:
            compile_ = compile_gpu.compiler()
        except RuntimeError as e:
            raise Missing(f"needs the CUDA plugin: make compile-gpu, then see the docstring ({e})") from None
        rows = [measure_point(cfg, t, w, compile_, Path(folder)) for t in lengths for w in widths]
    paper = [
        {"prompt_tokens": t, "beam_width": w, "paper_gb": ours, "paper_baseline_gb": other}
        for (t, w), (ours, other) in PAPER_GB.items()
    ]
    return Measured(claims(rows), [*rows, *paper])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    harness.main(
        Benchmark(
            name="beam_memory",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(work.__file__), Path(compile_gpu.__file__)),
            device="compiled",
        )
    )
