# SPDX-License-Identifier: Apache-2.0
"""Constrained generation on one H200: a Qwen3-1.7B in bfloat16, beam width 256, three tokens, 5 M items.

A time is that of one call of the compiled program that `jgr serve` runs for a batch, from prompts as numpy arrays to
leaves and scores as numpy arrays, with the constraint and normalize="valid"; the server around it is left out, and so
are the packages that only a server needs. Weights and catalog are random: three levels of 8192 codes, drawn evenly.
What it is measured against:

- The same search in PyTorch with the same weights, written by hand and captured in one CUDA graph, its layers as they
  are and by torch.compile (benchmarks/peers/pytorch_gpu.py), in turns with jgr's; at each point the faster of the two
  is claimed. All must find the same items, but for what 16 bits blur.
- What another engine has published for one H100 without a constraint: 17.6 and 93.2 ms for 1000 prompt tokens at batch
  1 and 8, 42.3 and 307.9 ms for 5000. An H100 has the same arithmetic and 70 % of the bandwidth.
- The floor: the multiplications and bytes that cannot be saved (benchmarks/work.py), at the rates of a large matmul and
  of a large copy, whose calls are queued, in the same rounds.

The scores that a search returns are checked against `rank` of the same items. The rows also say where the device's time
goes, by the profiler, in a call of its own, of a program without CUDA graphs: what runs in one has no name in a trace.

    python -m benchmarks.h200_serving            needs a GPU; PyTorch with CUDA for the comparison
    python -m benchmarks.h200_serving --quick    a tiny model on whatever there is; no claims

Needs jax, numpy and absl-py.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness, work
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.catalog.prefix_tree import PrefixTree
from jgr.evaluation import profiling
from jgr.models import beam, decoder, params, shapes
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.generators import compiler_options, laid_out
from jgr.ops import roofline

Int32 = npt.NDArray[np.int32]

DEPTH = shapes.LEVELS
JAX_SHARE = "0.5"
"""Of the device's memory; PyTorch in the same process needs some too."""
LEAST_SHARED = 0.9
"""Of the items that two searches in 16 bits find: the last of 256 are near each other."""
MAX_SCORE_DIFFERENCE = {"bfloat16": 0.1, "float32": 1e-4}
MAX_OVER_LEAST = 1.25
PYTORCH = ("pytorch", "compiled")
PUBLISHED_MS = {(1000, 1): 17.6, (1000, 8): 93.2, (5000, 1): 42.3, (5000, 8): 307.9}
"""Milliseconds by (prompt tokens, batch) that another engine has published for an H100, unconstrained."""


Search = Callable[[Int32], tuple[Any, Any]]
"""From prompts [B, T] to leaves and scores [B, W]."""


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
    return Setting(cfg, "bfloat16", 5_000_000, size, first, 256, tuple(PUBLISHED_MS), 7, 0.5, 8192, 1 << 31)


QUICK = Setting(TINY, "float32", 2000, 64, 300, 16, ((24, 2),), 1, 0.0, 128, 1 << 16)


def make_catalog(setting: Setting) -> tuple[PrefixTree, tuple[Int32, ...]]:
    """The tree, and per level the tokens of its codes."""
    rng = np.random.default_rng(0)
    tree = PrefixTree.build(rng.integers(0, setting.level_size, (setting.items, DEPTH), np.int32))
    starts = setting.first_token + setting.level_size * np.arange(DEPTH)
    return tree, tuple(np.arange(s, s + setting.level_size, dtype=np.int32) for s in starts)


class Engine:
    """The programs of all points, and one that ranks as many items as a search returns."""

    def __init__(
        self, setting: Setting, stacks: DecoderParams, tree: PrefixTree, tokens: Sequence[Int32]
    ) -> None:
        weights = laid_out(stacks)
        assert isinstance(weights, DecoderParams)
        self._given = weights, beam.catalog_tables(tree, tuple(tokens), weights)
        self._setting, self.tree = setting, tree
        harness.note("compiling")
        search = functools.partial(beam.recommend.lower, cfg=setting.cfg, width=setting.width)
        lowered = [
            search(*self._given, *_prompts([], *point), np.zeros(point[1], np.int32), self._filters(point[1]))
            for point in setting.points
        ]
        first, leaves = _prompts([], setting.points[0][0], 1), np.zeros((1, setting.width), np.int32)
        lowered.append(beam.rank.lower(*self._given, *first, leaves, cfg=setting.cfg))
        options: dict[str, str | bool] = {**compiler_options(weights)}
        traced = options | ({"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {})
        with ThreadPoolExecutor(len(lowered)) as pool:
            *searches, self._rank = pool.map(lambda program: program.compile(options or None), lowered)
            by_name = list(pool.map(lambda program: program.compile(traced or None), lowered[:-1]))
        self._searches = dict(zip(setting.points, searches, strict=True))
        self._by_name = dict(zip(setting.points, by_name, strict=True))

    def _filters(self, batch: int) -> beam.Filters:
        """Nothing is listed: what the server hands to a batch without filters."""
        listed, rows = jnp.zeros((batch, DEPTH, 1), jnp.int32), jnp.zeros(batch, jnp.int32)
        return beam.Filters(listed, listed, jnp.zeros((batch, DEPTH), jnp.int32), rows > 0, rows)

    def search(self, tokens: int, batch: int, by_name: bool = False) -> Search:
        """A function that searches prompts [B, T], and returns leaves and scores [B, W]. by_name: for a trace."""
        program = (self._by_name if by_name else self._searches)[tokens, batch]
        filters, widths = self._filters(batch), np.full(batch, self._setting.width, np.int32)

        def run(prompts: Int32) -> tuple[Any, Any]:
            found = program(*self._given, *_prompts(prompts, tokens, batch), widths, filters)
            return np.asarray(found.leaves), np.asarray(found.scores)

        return run

    def rank(self, prompt: Int32, leaves: Int32) -> Any:
        """The scores [W] of leaves [W] after a prompt, by the program that ranks."""
        return np.asarray(self._rank(*self._given, *_prompts([prompt], len(prompt), 1), leaves[None]))[0]

    def stages(self, tokens: int, batch: int, prompts: Int32) -> Row:
        """Milliseconds of the device by stage in one call, and how many operations it ran."""
        run = self.search(tokens, batch, by_name=True)
        run(prompts)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            with jax.profiler.trace(folder):
                run(prompts)
            events = profiling.read_events(Path(folder))
        program = profiling.read_program(self._by_name[tokens, batch].as_text())
        found = profiling.summarize(events, [program], (time.perf_counter() - start) * 1e9)
        stages = {stage: harness.rounded(ns / 1e6, 3) for stage, ns in found.stage_ns.items()}
        busy_ms = harness.rounded(found.busy_ns / 1e6)
        calls = sum(operation.calls for operation in found.operations)
        return {
            "prompt_tokens": tokens,
            "batch": batch,
            "busy_ms": busy_ms,
            "operations": calls,
            "stages_ms": stages,
        }


def pytorch(
    setting: Setting, stacks: DecoderParams, tree: PrefixTree, tokens: Sequence[Int32]
) -> dict[str, Callable[[int, int], Search]]:
    """The same search in PyTorch over the same weights, by form, for a point; empty where PyTorch has not jax's device.

    The layers are compiled on a GPU alone: on a CPU that takes a C++ compiler.
    """
    if find_spec("torch") is None:
        return {}
    import torch

    from benchmarks.peers import pytorch_gpu as peer

    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return {}
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"

    def beside(*names: str) -> list[Any]:
        """Matrices of all layers as [out, in], side by side."""
        parts = [torch.from_dlpack(getattr(stacks.layers, name)) for name in names]
        joined = torch.cat(parts, dim=2).transpose(1, 2).contiguous()
        return list(joined)

    def scales(name: str) -> list[Any]:
        return list(torch.from_dlpack(getattr(stacks.layers, name)).clone())

    weights = {
        "qkv": beside("wq", "wk", "wv"),
        "o": beside("wo"),
        "gate_up": beside("gate", "up"),
        "down": beside("down"),
    } | {name: scales(name) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")}
    layers = [{name: each[at] for name, each in weights.items()} for at in range(setting.cfg.layers)]
    rows = torch.from_dlpack(stacks.output_rows)
    levels = []
    for offsets, codes, of_level in zip(tree.offsets, tree.codes, tokens, strict=True):
        at, below, named = (
            torch.from_numpy(x.astype(np.int64)).to(device) for x in (offsets, codes, of_level)
        )
        levels.append(peer.Level(at, below, named, rows[named].contiguous(), int(np.diff(offsets).max())))
    cfg = setting.cfg
    shape = peer.Shape(cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rope_theta, cfg.norm_eps)
    embed, norm = (torch.from_dlpack(x).clone() for x in (stacks.embed, stacks.norm))
    given = shape, embed, layers, norm, levels, setting.width
    forms = {"pytorch": False, "compiled": True} if device == "cuda" else {"pytorch": False}
    return {name: peer.Search(*given, compiled=compiled).prepare for name, compiled in forms.items()}


def agreement(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> tuple[float, float]:
    """The least share of a prompt's items that both found, and the largest difference of the scores of these."""
    shares, differences = [], [0.0]
    for (a, score_a), (b, score_b) in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        both, at_a, at_b = np.intersect1d(a, b, return_indices=True)
        shares.append(len(both) / len(a))
        differences.append(float(np.abs(score_a[at_a] - score_b[at_b]).max(initial=0.0)))
    return min(shares), max(differences)


def _prompts(prompts: Sequence[Int32] | Int32, tokens: int, batch: int) -> tuple[Int32, Int32]:
    """Padded [B, T], and their lengths [B]."""
    padded, lengths = np.zeros((batch, tokens), np.int32), np.ones(batch, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return padded, lengths


def check(setting: Setting, engine: Engine, prompt: Int32) -> float:
    """The largest difference of a search's scores from those of `rank`. RuntimeError where its result is not valid."""
    tokens, batch = setting.points[0]
    leaves, scores = (rows[0] for rows in engine.search(tokens, batch)(prompt[None]))
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
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", JAX_SHARE)
    if not quick and jax.default_backend() != "gpu":
        raise Missing(f"needs a GPU; jax found {jax.default_backend()} (--quick runs a tiny model on it)")
    setting = QUICK if quick else full()
    tree, tokens = make_catalog(setting)
    stacks = params.initialize(decoder.spec(setting.cfg), jax.random.key(0), jnp.dtype(setting.dtype))
    engine, peers = Engine(setting, stacks, tree, tokens), pytorch(setting, stacks, tree, tokens)
    del stacks
    rng = np.random.default_rng(1)
    prompts = {point: rng.integers(0, setting.first_token, point[::-1], np.int32) for point in setting.points}
    difference = check(setting, engine, prompts[setting.points[0]][0])
    searches = {f"jgr {tokens} {batch}": engine.search(tokens, batch) for tokens, batch in setting.points}
    for form, peer in peers.items():
        harness.note(f"{form} PyTorch")
        searches |= {f"{form} {tokens} {batch}": peer(tokens, batch) for tokens, batch in setting.points}
    runs = {
        name: functools.partial(run, prompts[int(name.split()[1]), int(name.split()[2])])
        for name, run in searches.items()
    }
    done = harness.interleave(_variants(setting, runs), setting.rounds, quiet)
    rows = make_rows(setting, done)
    for row in rows if peers else ():
        point = f"{row['prompt_tokens']} {row['batch']}"
        ours = runs[f"jgr {point}"]()
        agreed = [agreement(ours, runs[f"{form} {point}"]()) for form in peers]
        row |= {
            "items_shared_with_pytorch": harness.rounded(min(share for share, _ in agreed)),
            "score_difference": harness.rounded(max(far for _, far in agreed), 2),
        }
    rows += [engine.stages(*point, prompts[point]) for point in setting.points]
    about = {
        "device": jax.devices()[0].device_kind,
        "items": engine.tree.n_leaves,
        "beam_width": setting.width,
        "pytorch": _version_of_pytorch() if peers else None,
    }
    rows.append({**about, "score_difference_from_rank": harness.rounded(difference, 2)})
    return Measured([] if quick else claims(rows, difference, setting), rows)


def _version_of_pytorch() -> str:
    import torch

    return str(torch.__version__)


def _variants(setting: Setting, runs: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], float]]:
    """Milliseconds of a call of each, and of "matmul" and "copy"."""

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: harness.timed(call, setting.at_least_s)[0]

    found = {name: timed(run) for name, run in runs.items()}
    keys = jax.random.split(jax.random.key(2), 2)
    a, b = (jax.random.normal(key, (setting.side, setting.side), jnp.dtype(setting.dtype)) for key in keys)
    words = jnp.zeros(setting.copied // 4, jnp.float32)
    multiply, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
    probes: dict[str, Callable[[], object]] = {"matmul": lambda: multiply(a, b), "copy": lambda: copy(words)}
    for name, probe in probes.items():
        found[name] = functools.partial(_queued_ms, probe, setting.at_least_s)
    return found


def _queued_ms(call: Callable[[], object], at_least_s: float) -> float:
    return roofline.seconds_per_call(call, at_least_s) * 1e3


def make_rows(setting: Setting, times_ms: Mapping[str, Sequence[float]]) -> list[Row]:
    flops_per_s = 2e3 * setting.side**3 / statistics.median(times_ms["matmul"])
    bytes_per_s = 2e3 * setting.copied / statistics.median(times_ms["copy"])
    rows = []
    for tokens, batch in setting.points:
        ours = times_ms[f"jgr {tokens} {batch}"]
        theirs = {name: times_ms.get(f"{name} {tokens} {batch}", ()) for name in PYTORCH}
        times = harness.spread(ours)
        least = least_work(setting, tokens, batch)
        flop_ms, byte_ms = (1e3 * x for x in (least.flops / flops_per_s, least.bytes / bytes_per_s))
        rows.append(
            {
                "prompt_tokens": tokens,
                "batch": batch,
                "time_ms": times,
                "published_ms": PUBLISHED_MS.get((tokens, batch)),
                **_against(ours, {name: ms for name, ms in theirs.items() if ms}),
                "flop_floor_ms": harness.rounded(flop_ms),
                "byte_floor_ms": harness.rounded(byte_ms),
                "share_of_least_time": harness.rounded(max(flop_ms, byte_ms) / times["median"], 3),
                "tflops_of_matmul": harness.rounded(flops_per_s / 1e12),
                "gb_per_s_of_copy": harness.rounded(bytes_per_s / 1e9),
            }
        )
    return rows


def _against(ours: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> Row:
    """The times of PyTorch's forms, and the ratios of the faster one's to jgr's in the same rounds."""
    if not theirs:
        return {}
    fastest = min(theirs, key=lambda name: statistics.median(theirs[name]))
    ratios = [their / our for our, their in zip(ours, theirs[fastest], strict=True)]
    low, high = harness.interval_of_median(ratios)
    median = harness.rounded(statistics.median(ratios))
    return {
        **{f"{name}_ms": harness.spread(ms) for name, ms in theirs.items()},
        "fastest": fastest,
        "pytorch_over_jgr": {"median": median, "interval": [low, high]},
    }


def claims(rows: Sequence[Row], difference: float, setting: Setting) -> list[Claim]:
    limit = MAX_SCORE_DIFFERENCE[setting.dtype]
    found = [Claim("h200-score-difference-from-rank", harness.rounded(difference, 2), "", "lower", limit)]
    shared = [row["items_shared_with_pytorch"] for row in rows if "items_shared_with_pytorch" in row]
    if shared:
        found.append(Claim("h200-items-shared-with-pytorch", min(shared), "", "higher", LEAST_SHARED))
    for row in rows:
        point = f"beam-256-prompt-{row.get('prompt_tokens')}-batch-{row.get('batch')}"
        if row.get("published_ms"):
            id = f"h200-constrained-{point}"
            found.append(Claim(id, row["time_ms"]["median"], "ms", "lower", row["published_ms"]))
        if row.get("published_ms") and "share_of_least_time" in row:
            over_least = harness.rounded(1 / row["share_of_least_time"], 3)
            found.append(Claim(f"h200-time-over-least-{point}", over_least, "x", "lower", MAX_OVER_LEAST))
        if "pytorch_over_jgr" in row:
            over, (low, high) = row["pytorch_over_jgr"]["median"], row["pytorch_over_jgr"]["interval"]
            id = f"h200-pytorch-time-over-jgr-{point}"
            found.append(Claim(id, over, "x", "higher", 1.0, interval=(low, high)))
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="h200_serving",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(work.__file__), Path(__file__).parent / "peers" / "pytorch_gpu.py"),
            device="h200",
        )
    )
