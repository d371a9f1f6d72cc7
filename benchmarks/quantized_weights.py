# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 bits (model.quantize) beside float32: memory, what a load takes, answers, and time, in one run.

Quality: the generator of configs/industrial.py, trained, asked for every test target by the engine that serves: how
many of the ten best items are float32's ten best, and NDCG@10. runs/industrial is used as it is, or trained where it is
not.

Memory and time: random Qwen3 models of 16 M and 104 M parameters, in folders of Hugging Face. Weights are those of the
serving process; the peak of a load is that of a process of its own, over what it had before it, by its anonymous memory
(pages of the mapped file are not counted: the system takes them back). Time is that of a compiled program, in turns: a
prompt of 512 tokens, and a step of a search with 128 beams after it, which is one token for each beam and its logits of
the next level's 256 codes. `kernels` says what computes; without jgr-native all is XLA's.

    JGR_DATA=FOLDER python -m benchmarks.quantized_weights [--quick]      FOLDER holds amazon-industrial-minionerec
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness, quality
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.peers.workload import FIRST_TOKEN, LEVEL_SIZE, LOGIT_SCALE, MODEL
from benchmarks.quality_industrial import INDUSTRIAL
from jgr.cache.memory import tree_bytes
from jgr.config import Config, override
from jgr.data.datasets import load_dataset
from jgr.evaluation.metrics import Hits, mean_all
from jgr.evaluation.recommendations import LocalEngine
from jgr.evaluation.served import Query
from jgr.models import decoder, hf, params
from jgr.models.decoder import DecoderConfig, DecoderParams, State
from jgr.models.quantize import Quantization
from jgr.ops import native

Int32 = npt.NDArray[np.int32]

THREADS = 2
AT_LEAST_S = 0.3
PROMPT, BEAMS, TOP_K = 512, 128, 10
POLL_S = 0.001
KINDS: Mapping[str, Quantization] = {"float32": "", "int8": "int8", "fp8": "fp8"}
LARGE = "104m"
"""The model whose memory is claimed: four fifths of it are matrices. Of the small one a fifth is, and the rest is a
vocabulary, which stays as it is."""
MODELS: Mapping[str, DecoderConfig] = {
    "16m": MODEL,
    LARGE: dataclasses.replace(MODEL, hidden=768, layers=12, heads=12, kv_heads=6, mlp=2304, tied=True),
}
METRICS = ("hr@10", "ndcg@10")
# What is asked of each kind: the least share of common items, of NDCG, and the most of float32's bytes and times.
OVERLAP = {"int8": 0.95, "fp8": 0.85}
NDCG, BYTES, PEAK, TIME = 0.99, 0.5, 0.75, 1.0


# ---- quality -----------------------------------------------------------------------------------------------------


def trained() -> Config:
    """The configuration of the trained generator. Missing where the dataset is not there, or no training succeeds."""
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / INDUSTRIAL.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {INDUSTRIAL.raw} in the folder that JGR_DATA names")
    config = INDUSTRIAL.loaded(raw)
    folder = harness.ROOT / config.train.out
    if not folder.is_dir():
        quality.run("train", f"--config=configs/{INDUSTRIAL.config}", f"--set=data.path={raw}")
    return override(config, f"model.path={folder}", "model.compilation_cache=", "profiles.batch=32")


def rankings(config: Config, few: int | None) -> tuple[Int32, Int32, int]:
    """The ten best items for every test history [n, 10], the targets [n], and the bytes of the weights."""
    from jgr.serving.versions.loading import load_any

    dataset = load_dataset(config.data)
    examples = dataset.interactions.test if few is None else dataset.interactions.test.select(slice(few))
    engine = load_any(config)
    with LocalEngine(engine, dataset.catalog, config.server.drain_timeout_s) as served:
        found = served.recommend_all(examples, Query(TOP_K, exclude_history=INDUSTRIAL.exclude_history))
    return found, examples.targets, engine.memory["weights"]


def overlap(one: Int32, other: Int32) -> float:
    """The mean share of the items of one list that are in the other's, of lists [n, k]."""
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in zip(one, other, strict=True)]))


def quality_rows(changes: Mapping[str, str], few: int | None) -> list[Row]:
    """A row for each change to the trained generator's configuration; overlaps are with the first one's items."""
    config, rows, plain = trained(), list[Row](), None
    for name, change in changes.items():
        ranked, targets, weights = rankings(override(config, change), few)
        plain = ranked if plain is None else plain
        metrics = mean_all(Hits.of_targets(ranked, targets), METRICS)
        rows.append(
            {
                "quality": name,
                "examples": len(targets),
                "overlap@10": harness.rounded(overlap(plain, ranked)),
                "same_first_item": harness.rounded(float((plain[:, 0] == ranked[:, 0]).mean())),
                **{metric: harness.rounded(value) for metric, value in metrics.items()},
                "weights_bytes": weights,
            }
        )
    return rows


# ---- memory ------------------------------------------------------------------------------------------------------


def export(folder: Path, cfg: DecoderConfig) -> None:
    drawn: DecoderParams = params.initialize(decoder.spec(cfg), jax.random.key(0))
    if drawn.head is not None:
        drawn = dataclasses.replace(drawn, head=LOGIT_SCALE * drawn.head)
    hf.export(folder, cfg, drawn)


def _load(folder: Path, kind: Quantization, told: Connection) -> None:
    """Run in a process of its own: load, once it is told to."""
    jax.config.update("jax_platforms", "cpu")
    jnp.zeros(1).block_until_ready()
    told.send(os.getpid())
    told.recv()
    start = time.perf_counter()
    _, found = hf.load(folder, jnp.float32, kind=kind)
    jax.block_until_ready(found)
    told.send((time.perf_counter() - start, tree_bytes(found)))
    told.recv()


def _anonymous_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


def load_row(folder: Path, kind: Quantization) -> Row:
    """The seconds of a load, the bytes of its weights, and by how much the process grew at most."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_load, args=(folder, kind, theirs))
    process.start()
    before = peak = _anonymous_bytes(ours.recv())
    ours.send(None)
    assert process.pid is not None
    while not ours.poll(POLL_S):
        peak = max(peak, _anonymous_bytes(process.pid))
    seconds, weights = ours.recv()
    peak = max(peak, _anonymous_bytes(process.pid))
    ours.send(None)
    process.join()
    return {"load_s": harness.rounded(seconds, 3), "weights_bytes": weights, "load_peak_bytes": peak - before}


# ---- time --------------------------------------------------------------------------------------------------------


class Programs:
    """The compiled programs of one model and kind: a prompt, and a step of the search after it."""

    def __init__(self, cfg: DecoderConfig, weights: DecoderParams, prompt: Int32) -> None:
        lengths = np.array([PROMPT], np.int32)

        def read(weights: DecoderParams, prompt: Any, lengths: Any) -> tuple[jax.Array, State]:
            last, state = decoder.begin(weights, cfg, prompt, lengths)
            return decoder.logits(weights, last[:, 0]), state

        def step(weights: DecoderParams, tokens: Any, state: State, ancestors: Any) -> tuple[jax.Array, Any]:
            hidden, after = decoder.advance(weights, cfg, tokens, state, ancestors)
            rows = weights.output_rows[FIRST_TOKEN : FIRST_TOKEN + LEVEL_SIZE]
            return hidden @ rows.T, after.beams

        given = (weights, prompt, lengths)
        self._read = functools.partial(jax.jit(read).lower(*given).compile(), *given)
        _, state = self._read()
        tokens = np.arange(FIRST_TOKEN, FIRST_TOKEN + BEAMS, dtype=np.int32)[None]
        given_step = (weights, tokens, state, np.arange(BEAMS, dtype=np.int32)[None, None])
        self._step = functools.partial(jax.jit(step).lower(*given_step).compile(), *given_step)

    def prompt(self) -> Any:
        return jax.block_until_ready(self._read())[0]

    def step(self) -> Any:
        return jax.block_until_ready(self._step())[0]


def model_rows(name: str, cfg: DecoderConfig, rounds: int, quiet: Quiet) -> list[Row]:
    prompt = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, PROMPT), np.int32)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        export(folder, cfg)
        loads = {kind: load_row(folder, KINDS[kind]) for kind in KINDS}
        variants: dict[str, Callable[[], float]] = {}
        for kind in KINDS:
            programs = Programs(cfg, hf.load(folder, jnp.float32, kind=KINDS[kind])[1], prompt)
            for what, call in (("prompt", programs.prompt), ("step", programs.step)):
                variants[f"{kind} {what}"] = functools.partial(_ms, call)
        times = harness.interleave(variants, rounds, quiet)
    return [
        {
            "model": name,
            "kind": kind,
            "parameters": params.count(decoder.spec(cfg)),
            **loads[kind],
            "prompt_ms": harness.spread(times[f"{kind} prompt"]),
            "step_ms": harness.spread(times[f"{kind} step"]),
        }
        for kind in KINDS
    ]


def _ms(call: Callable[[], Any]) -> float:
    return harness.timed(call, AT_LEAST_S)[0]


# ---- all of it ---------------------------------------------------------------------------------------------------


def measure(quick: bool, quiet: Quiet) -> Measured:
    rows = quality_rows(
        {name: f"model.quantize={kind}" for name, kind in KINDS.items()}, 100 if quick else None
    )
    for name, cfg in list(MODELS.items())[: 1 if quick else None]:
        rows += model_rows(name, cfg, 1 if quick else 5, quiet)
    rows.append({"kernels": native.describe(), "prompt_tokens": PROMPT, "beams": BEAMS})
    return Measured(claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    answers = {row["quality"]: row for row in rows if "quality" in row}
    found = []
    for kind in ("int8", "fp8"):
        row, plain = answers[kind], answers["float32"]
        found.append(
            Claim(f"overlap@10-of-{kind}-with-float32", row["overlap@10"], "", "higher", OVERLAP[kind])
        )
        share = harness.rounded(row["ndcg@10"] / plain["ndcg@10"])
        found.append(Claim(f"ndcg@10-of-{kind}-over-float32", share, "x", "higher", NDCG))
    sized = {(row["model"], row["kind"]): row for row in rows if "model" in row}
    for model in dict.fromkeys(model for model, _ in sized):
        plain = sized[model, "float32"]
        for kind in ("int8", "fp8"):
            row, end = sized[model, kind], f"of-{kind}-over-float32-{model}"
            memory = (("weights", "weights_bytes", BYTES), ("load-peak", "load_peak_bytes", PEAK))
            for what, field, target in memory if model == LARGE else ():
                ratio = harness.rounded(row[field] / plain[field], 3)
                found.append(Claim(f"{what}-{end}", ratio, "x", "lower", target))
            for what in ("prompt", "step"):
                ratio = harness.rounded(row[f"{what}_ms"]["median"] / plain[f"{what}_ms"]["median"], 3)
                found.append(Claim(f"{what}-time-{end}", ratio, "x", "lower", TIME))
    return found


if __name__ == "__main__":
    # Before XLA counts the cores; processes inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_platforms", "cpu")
    harness.main(
        Benchmark(
            name="quantized_weights",
            measure=measure,
            packages=("jax", "jaxlib", "numpy", "safetensors"),
            sources=(Path(__file__), harness.ROOT / "benchmarks" / "peers" / "workload.py"),
        )
    )
