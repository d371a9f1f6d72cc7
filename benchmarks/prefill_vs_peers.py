# SPDX-License-Identifier: Apache-2.0
"""The first output token of a prompt: jgr against OpenVINO GenAI, `transformers` and PyTorch's own attention, by hand
and through torch.compile.

All load the same random Qwen3 of 16 M parameters (benchmarks/peers/workload.py; prefill_vs_peers_51m.py has a larger
one), get the same prompts as tokens, compute in float32 on two cores, keep the prompt's keys and values, and run in
turns, call by call; peers run in processes of their own. A time is that of one call on a warm process: from tokens to
the most likely next token of each prompt. A prompt of 700 tokens is none of jgr's profiles: jgr pads it to 1024, the
peers do not.

jgr computes twice: with the kernels of jgr-native, as it serves where these are installed, and without them ("jgr by
xla"). Beside it: what share of the machine's float32 matmul rate that is, which jgr and PyTorch measure in the same
rounds (2048 rows; the faster one counts), and where jgr's time goes, from a profile.

    JGR_PEERS_TORCH=PYTHON JGR_PEERS_OPENVINO=PYTHON python -m benchmarks.prefill_vs_peers [--quick]

Each PYTHON is that of a virtual environment with benchmarks/peers/requirements-*.txt. `make native` installs the
kernels.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import beam_vs_peers, harness, work
from benchmarks.beam_vs_peers import of_rounds, two_cores
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.peers import client, workload
from benchmarks.peers.client import COMPILED, OPENVINO, PYTORCH, TRANSFORMERS, Peer, Present
from benchmarks.peers.workload import MODEL, Int32
from jgr.evaluation import profiling
from jgr.models import decoder, hf
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.kv import ContextKV
from jgr.ops import native

THREADS = 2
AT_LEAST_S = 0.3
MATMUL_ROWS = 2048
KINDS = (OPENVINO, PYTORCH, COMPILED, TRANSFORMERS)
LIMIT = 1.0
"""The most that jgr's time may be over the best peer's."""
BY_XLA = "jgr by xla"
PROFILED_CALLS, PROFILED_OPERATIONS = 10, 8


class Found(NamedTuple):
    """ms: the time of one call; tokens: [B], the first output token of each prompt."""

    ms: float
    tokens: tuple[int, ...]


@functools.partial(jax.jit, static_argnames=("cfg", "kernels"))
def first_tokens(
    params: DecoderParams, prompts: jax.Array, lengths: jax.Array, *, cfg: DecoderConfig, kernels: str
) -> tuple[jax.Array, ContextKV]:
    """The most likely next token [B] of prompts [B, T], and their keys and values; read as the engine reads them.

    kernels: what computes, so that each has a program of its own.
    """
    last, state = decoder.begin(params, cfg, prompts, lengths)
    with jax.named_scope("head"):
        return jnp.argmax(decoder.logits(params, last[:, 0]), axis=-1), state.context


class Ours:
    """jgr's program for one shape, compiled."""

    def __init__(
        self, cfg: DecoderConfig, weights: DecoderParams, prompts: Int32, by_kernels: bool = True
    ) -> None:
        count, length = prompts.shape
        padded = np.pad(prompts, ((0, 0), (0, workload.profile(length) - length)))
        self._arguments = weights, padded, np.full(count, length, np.int32)
        native.use(by_kernels)
        self._program = first_tokens.lower(*self._arguments, cfg=cfg, kernels=native.describe()).compile()
        native.use(True)

    def first(self) -> tuple[int, ...]:
        tokens, _ = jax.block_until_ready(self._program(*self._arguments))
        return tuple(np.asarray(tokens).tolist())

    def profile(self) -> Row:
        """The milliseconds of a call by stage, and those of the operations that take most."""
        self.first()
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            with jax.profiler.trace(folder):
                for _ in range(PROFILED_CALLS):
                    self.first()
            window_ns = (time.perf_counter() - start) * 1e9
            events = profiling.read_events(Path(folder))
        program = profiling.read_program(self._program.as_text() or "")
        summary = profiling.summarize(events, [program], window_ns)

        def per_call(ns: float) -> float:
            return harness.rounded(ns / PROFILED_CALLS / 1e6, 3)

        return {
            "stages_ms": {stage: per_call(ns) for stage, ns in summary.stage_ns.items()},
            "operations_ms": [
                {"name": op.name, "source": "/".join(op.source.split("/")[-3:]), "ms": per_call(op.total_ns)}
                for op in summary.operations[:PROFILED_OPERATIONS]
            ],
        }


def ask(peer: Peer, prompts: Int32) -> Found:
    reply = peer.ask(op="first", prompts=prompts.tolist(), at_least_s=AT_LEAST_S)
    return Found(reply["ms"], tuple(reply["tokens"]))


def measure(quick: bool, quiet: Quiet, model: DecoderConfig = MODEL, size: str = "") -> Measured:
    """size: stands behind the claims' ids."""
    rng = np.random.default_rng(0)
    catalog = workload.make_catalog(rng)
    lengths, batches, rounds = ((512,), (1, 8), 1) if quick else ((512, 700, 1024, 2048), (1, 8), 7)
    matrix = jnp.ones((MATMUL_ROWS, MATMUL_ROWS))
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workload.export(folder, catalog, model)
        present = client.start_all(KINDS, folder, THREADS, stack)
        cfg, weights = hf.load(folder)
        for tokens in lengths:
            for batch in batches:
                prompts = np.stack([workload.draw_prompt(catalog, tokens, rng) for _ in range(batch)])
                ours, by_xla = (Ours(cfg, weights, prompts, by_kernels) for by_kernels in (True, False))
                done = harness.interleave(_variants(ours, by_xla, present, prompts, matrix), rounds, quiet)
                profiles = {"profile": ours.profile(), "profile_by_xla": by_xla.profile()}
                rows.append(make_row(tokens, batch, done, model) | profiles)
    rows.append({"kernels": native.describe()})
    rows += [{"peer": name, "versions": peer.versions} for name, peer in present.peers.items()]
    rows += [{"peer": name, "missing": why} for name, why in present.missing.items()]
    return Measured(claims(rows, size), rows)


def _variants(
    ours: Ours, by_xla: Ours, present: Present, prompts: Int32, matrix: jax.Array
) -> dict[str, Callable[[], Found]]:
    def jgr(program: Ours) -> Found:
        return Found(*harness.timed(program.first, AT_LEAST_S))

    multiply = jax.jit(jnp.matmul)

    def jgr_matmul() -> Found:
        ms, _ = harness.timed(lambda: jax.block_until_ready(multiply(matrix, matrix)), AT_LEAST_S)
        return Found(ms, ())

    def pytorch_matmul() -> Found:
        reply = present.peers["pytorch"].ask(op="matmul", side=MATMUL_ROWS, at_least_s=AT_LEAST_S)
        return Found(reply["ms"], ())

    found: dict[str, Callable[[], Found]] = {
        "jgr": functools.partial(jgr, ours),
        BY_XLA: functools.partial(jgr, by_xla),
        "matmul jgr": jgr_matmul,
    }
    if "pytorch" in present.peers:
        found["matmul pytorch"] = pytorch_matmul
    return found | {name: functools.partial(ask, peer, prompts) for name, peer in present.peers.items()}


def make_row(
    tokens: int, batch: int, found: Mapping[str, Sequence[Found]], model: DecoderConfig = MODEL
) -> Row:
    """One point's row. Entries "matmul ..." are of the square matmul, which only gives the machine's rate."""
    times = {name: harness.spread(f.ms for f in runs) for name, runs in found.items()}
    matmul_ms = min(times.pop(name)["median"] for name in list(times) if name.startswith("matmul "))
    rate = 2 * MATMUL_ROWS**3 / matmul_ms * 1e3
    least = work.total(work.prefill(model, batch, tokens, 4), work.head(model, batch, model.vocab_size, 4))
    peers = [name for name in times if name not in ("jgr", BY_XLA)]
    best = min(peers, key=lambda name: times[name]["median"])
    ours = times["jgr"]["median"]
    return {
        "prompt_tokens": tokens,
        "batch": batch,
        "time_ms": times,
        "best_peer": best,
        "time_over_best_peer": harness.rounded(ours / times[best]["median"], 3),
        "interval": of_rounds([f.ms for f in found["jgr"]], [f.ms for f in found[best]]),
        "time_over_xla": harness.rounded(ours / times[BY_XLA]["median"], 3),
        "same_tokens": {
            name: all(f.tokens == found["jgr"][0].tokens for f in found[name]) for name in (*peers, BY_XLA)
        },
        "gflop": harness.rounded(least.flops / 1e9),
        "matmul_gflops": harness.rounded(rate / 1e9),
        "share_of_matmul_rate": {
            name: harness.rounded(least.flops / rate / t["median"] * 1e3, 3) for name, t in times.items()
        },
    }


def claims(rows: Sequence[Row], size: str = "") -> list[Claim]:
    points = [row for row in rows if "prompt_tokens" in row]
    missing = sum("missing" in row for row in rows)
    differ = sum(not same for row in points for same in row["same_tokens"].values())
    found = [
        Claim("prefill-peers-missing", missing, "", "lower", 0),
        Claim("first-tokens-that-differ-from-a-peer", differ, "", "lower", 0),
    ]
    for row in points:
        name = f"prefill-time-over-best-peer-prompt-{row['prompt_tokens']}-batch-{row['batch']}"
        value, (low, high) = row["time_over_best_peer"], row["interval"]
        found.append(Claim(name, value, "x", "lower", LIMIT, interval=(low, high)))
    return [replace(claim, id=claim.id + size) for claim in found]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Median time over prompt length, a panel for each batch size."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    points = [row for row in rows if "prompt_tokens" in row]
    batches = sorted({row["batch"] for row in points})
    figure, axes = pyplot.subplots(1, len(batches), figsize=(4.5 * len(batches), 3.6), squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        panel = [row for row in points if row["batch"] == batch]
        lengths = [row["prompt_tokens"] for row in panel]
        for name in panel[0]["time_ms"]:
            axis.plot(lengths, [row["time_ms"][name]["median"] for row in panel], marker="o", label=name)
        floor = [row["gflop"] / row["matmul_gflops"] * 1e3 for row in panel]
        axis.plot(lengths, floor, "k--", label="FLOP floor")
        axis.set(xscale="log", yscale="log", xticks=lengths, xticklabels=lengths)
        axis.set(title=f"batch of {batch}", xlabel="prompt tokens")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms for the first tokens")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


SOURCES = (Path(__file__), Path(work.__file__), *beam_vs_peers.SOURCES)

if __name__ == "__main__":
    two_cores()
    harness.main(
        Benchmark(
            name="prefill_vs_peers",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=SOURCES,
            plot=plot,
        )
    )
