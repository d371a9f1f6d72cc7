# SPDX-License-Identifier: Apache-2.0
"""Constrained generation on one H200: a Qwen3-1.7B in bfloat16, beam width 256, three tokens, 5 M items.

The bar is what another engine has published for one H100 without a constraint: 17.6 and 93.2 ms for 1000 prompt tokens
at batch 1 and 8, 42.3 and 307.9 ms for 5000. A time here is that of one call of the compiled program that `jgr serve`
runs for a batch, from prompts as numpy arrays to leaves and scores as numpy arrays, with the constraint and
normalize="valid"; the server around it is left out, and so are the packages that only a server needs. Weights and
catalog are random: three levels of 8192 codes, drawn evenly.

Beside it the floor: the multiplications and bytes that cannot be saved (benchmarks/work.py), at the rates of a large
matmul and of a large copy that are timed in the same rounds. The scores that a search returns are checked against
`rank` of the same items.

    python -m benchmarks.h200_serving            needs a GPU
    python -m benchmarks.h200_serving --quick    a tiny model on whatever there is; no claims

Needs jax, numpy and absl-py.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness, work
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import beam, decoder, params, shapes
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.generators import laid_out

Int32 = npt.NDArray[np.int32]

DEPTH = shapes.LEVELS
MAX_SCORE_DIFFERENCE = {"bfloat16": 0.1, "float32": 1e-4}
PUBLISHED_MS = {(1000, 1): 17.6, (1000, 8): 93.2, (5000, 1): 42.3, (5000, 8): 307.9}
"""Milliseconds by (prompt tokens, batch) that another engine has published for an H100, unconstrained."""


class Setting(NamedTuple):
    """What is measured: a model, a catalog, the points, and the probes of the device's rates.

    The tokens of level l of the ids begin at first_token + l * level_size. points: (prompt tokens, batch). side: of the
    square matmul that gives the FLOP rate. copied: bytes of the copy that gives the bandwidth.
    """

    cfg: DecoderConfig
    dtype: str
    items: int
    level_size: int
    first_token: int
    width: int
    points: Sequence[tuple[int, int]]
    rounds: int
    at_least_s: float
    side: int
    copied: int


TINY = DecoderConfig(
    family="qwen3",
    vocab_size=512,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=64,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=True,
    max_position=128,
)


def full() -> Setting:
    cfg = shapes.named("qwen3-1.7b")
    assert isinstance(cfg, DecoderConfig)
    size, first = shapes.LEVEL_SIZE, shapes.QWEN3_FIRST
    return Setting(cfg, "bfloat16", 5_000_000, size, first, 256, tuple(PUBLISHED_MS), 7, 1.0, 8192, 1 << 31)


QUICK = Setting(TINY, "float32", 2000, 64, 300, 16, ((24, 2),), 1, 0.0, 128, 1 << 16)


def make_catalog(setting: Setting) -> tuple[PrefixTree, tuple[Int32, ...]]:
    """The tree, and per level the tokens of its codes."""
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(rng.integers(0, setting.level_size, (setting.items, DEPTH), np.int32))
    starts = setting.first_token + setting.level_size * np.arange(DEPTH)
    return tree, tuple(np.arange(s, s + setting.level_size, dtype=np.int32) for s in starts)


class Engine:
    """The programs of all points, and one that ranks as many items as a search returns."""

    def __init__(self, setting: Setting) -> None:
        self.tree, level_tokens = make_catalog(setting)
        stacks = params.initialize(decoder.spec(setting.cfg), jax.random.key(0), jnp.dtype(setting.dtype))
        weights = laid_out(stacks)
        assert isinstance(weights, DecoderParams)
        self._given = weights, beam.catalog_tables(self.tree, level_tokens, weights)
        self._setting = setting
        harness.note("compiling")
        search = functools.partial(beam.recommend.lower, cfg=setting.cfg, width=setting.width)
        self._searches = {
            (tokens, batch): search(
                *self._given, *_prompts([], tokens, batch), np.zeros(batch, np.int32), self._filters(batch)
            ).compile()
            for tokens, batch in setting.points
        }
        first, leaves = _prompts([], setting.points[0][0], 1), np.zeros((1, setting.width), np.int32)
        self._rank = beam.rank.lower(*self._given, *first, leaves, cfg=setting.cfg).compile()

    def _filters(self, batch: int) -> beam.Filters:
        """Nothing is listed: what the server hands to a batch without filters."""
        listed, rows = jnp.zeros((batch, DEPTH, 1), jnp.int32), jnp.zeros(batch, jnp.int32)
        return beam.Filters(listed, listed, jnp.zeros((batch, DEPTH), jnp.int32), rows > 0, rows)

    def search(self, tokens: int, batch: int) -> Callable[[Sequence[Int32]], tuple[Any, Any]]:
        """A function that searches prompts, and returns leaves and scores [B, W]."""
        filters, widths = self._filters(batch), np.full(batch, self._setting.width, np.int32)

        def run(prompts: Sequence[Int32]) -> tuple[Any, Any]:
            found = self._searches[tokens, batch](
                *self._given, *_prompts(prompts, tokens, batch), widths, filters
            )
            return np.asarray(found.leaves), np.asarray(found.scores)

        return run

    def rank(self, prompt: Int32, leaves: Int32) -> Any:
        """The scores [W] of leaves [W] after a prompt, by the program that ranks."""
        return np.asarray(self._rank(*self._given, *_prompts([prompt], len(prompt), 1), leaves[None]))[0]


def _prompts(prompts: Sequence[Int32], tokens: int, batch: int) -> tuple[Int32, Int32]:
    """Padded [B, T], and their lengths [B]."""
    padded, lengths = np.zeros((batch, tokens), np.int32), np.ones(batch, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return padded, lengths


def check(setting: Setting, engine: Engine, prompt: Int32) -> float:
    """The largest difference of a search's scores from those of `rank`. RuntimeError where its result is not valid."""
    tokens, batch = setting.points[0]
    leaves, scores = (rows[0] for rows in engine.search(tokens, batch)([prompt]))
    if len(np.unique(leaves)) != setting.width or leaves.min() < 0 or leaves.max() >= engine.tree.n_leaves:
        raise RuntimeError("a search returned what is no list of different items")
    if not np.isfinite(scores).all() or (np.diff(scores) > 0).any():
        raise RuntimeError("a search returned scores that do not descend")
    return float(np.abs(engine.rank(prompt, leaves) - scores).max())


def least_work(setting: Setting, tokens: int, batch: int) -> work.Work:
    """The least work of one batch for all its beams: prefill, decode steps, and each level's output columns."""
    size, width = jnp.dtype(setting.dtype).itemsize, setting.width
    parts = [work.prefill(setting.cfg, batch, tokens, size)]
    parts += [work.decode(setting.cfg, batch, width, tokens, step, size) for step in range(1, DEPTH)]
    rows = [batch, *(batch * width for _ in range(1, DEPTH))]
    parts += [work.head(setting.cfg, n, setting.level_size, size) for n in rows]
    return work.total(*parts)


def measure(quick: bool, quiet: Quiet) -> Measured:
    if not quick and jax.default_backend() != "gpu":
        raise Missing(f"needs a GPU; jax found {jax.default_backend()} (--quick runs a tiny model on it)")
    setting = QUICK if quick else full()
    engine = Engine(setting)
    rng = np.random.default_rng(1)
    longest, most = (max(point[i] for point in setting.points) for i in (0, 1))
    prompts = [rng.integers(0, setting.first_token, longest, np.int32) for _ in range(most)]
    difference = check(setting, engine, prompts[0][: setting.points[0][0]])
    done = harness.interleave(_variants(setting, engine, prompts), setting.rounds, quiet)
    rows = make_rows(setting, done)
    about = {
        "device": jax.devices()[0].device_kind,
        "items": engine.tree.n_leaves,
        "beam_width": setting.width,
    }
    rows.append({**about, "score_difference_from_rank": harness.rounded(difference, 2)})
    return Measured([] if quick else claims(rows, difference, setting), rows)


def _variants(setting: Setting, engine: Engine, prompts: Sequence[Int32]) -> dict[str, Callable[[], float]]:
    """Milliseconds of a call, by "<prompt tokens> <batch>", and of "matmul" and "copy"."""

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: harness.timed(call, setting.at_least_s)[0]

    found = {}
    for tokens, batch in setting.points:
        cut = [prompt[:tokens] for prompt in prompts[:batch]]
        found[f"{tokens} {batch}"] = timed(functools.partial(engine.search(tokens, batch), cut))
    matrix = jnp.ones((setting.side, setting.side), jnp.dtype(setting.dtype))
    words = jnp.zeros(setting.copied // 4, jnp.float32)
    multiply, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
    found["matmul"] = timed(lambda: jax.block_until_ready(multiply(matrix, matrix)))
    found["copy"] = timed(lambda: jax.block_until_ready(copy(words)))
    return found


def make_rows(setting: Setting, times_ms: Mapping[str, Sequence[float]]) -> list[Row]:
    flops_per_s = 2e3 * setting.side**3 / statistics.median(times_ms["matmul"])
    bytes_per_s = 2e3 * setting.copied / statistics.median(times_ms["copy"])
    rows = []
    for tokens, batch in setting.points:
        times = harness.spread(times_ms[f"{tokens} {batch}"])
        least = least_work(setting, tokens, batch)
        flop_ms, byte_ms = (1e3 * x for x in (least.flops / flops_per_s, least.bytes / bytes_per_s))
        rows.append(
            {
                "prompt_tokens": tokens,
                "batch": batch,
                "time_ms": times,
                "published_ms": PUBLISHED_MS.get((tokens, batch)),
                "flop_floor_ms": harness.rounded(flop_ms),
                "byte_floor_ms": harness.rounded(byte_ms),
                "share_of_floor": harness.rounded(max(flop_ms, byte_ms) / times["median"], 3),
                "tflops_of_matmul": harness.rounded(flops_per_s / 1e12),
                "gb_per_s_of_copy": harness.rounded(bytes_per_s / 1e9),
            }
        )
    return rows


def claims(rows: Sequence[Row], difference: float, setting: Setting) -> list[Claim]:
    limit = MAX_SCORE_DIFFERENCE[setting.dtype]
    found = [Claim("h200-score-difference-from-rank", harness.rounded(difference, 2), "", "lower", limit)]
    for row in rows:
        if row.get("published_ms"):
            name = f"h200-constrained-beam-256-prompt-{row['prompt_tokens']}-batch-{row['batch']}"
            found.append(Claim(name, row["time_ms"]["median"], "ms", "lower", row["published_ms"]))
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="h200_serving",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(work.__file__)),
            device="gpu",
        )
    )
