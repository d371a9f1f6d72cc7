# SPDX-License-Identifier: Apache-2.0
"""Whether another load client sees what ours sees: `jgr bench serve` and NVIDIA AIPerf against one server, in turns.

The server is `jgr serve` of the demo's shop model after one step of training, whose times are those of the whole. Both
clients send recommend requests for histories of 10 items of its catalog, at Poisson arrivals of the same mean rate, as
many requests as the rate times the seconds, over kept connections. AIPerf uses its template endpoint; it wants a
tokenizer, and gets one of a single token, since it counts tokens that nobody asks for.

A difference remains by definition: we count from the time at which a request was scheduled, AIPerf from the time at
which it was sent. Below the server's capacity both are the same but for a client's own lateness, which is in the rows.

    JGR_PEERS_AIPERF=PYTHON python -m benchmarks.aiperf_check [--quick]

PYTHON is that of a virtual environment with benchmarks/peers/requirements-aiperf.txt.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Benchmark, Claim, Measured, Missing, Quiet, Row
from jgr.catalog.catalog import load_catalog
from jgr.config import load_config, override
from jgr.data.datasets import load_dataset

VARIABLE = "JGR_PEERS_AIPERF"
REQUIREMENTS = "benchmarks/peers/requirements-aiperf.txt"
HISTORY, TOP_K, INPUTS, WARM_UP = 10, 10, 500, 20
RUN_JGR = "import sys; from jgr.cli.main import run; sys.exit(run())"
TEMPLATE = f'{{"history": {{{{ text.split(" ")|tojson }}}}, "top_k": {TOP_K}}}'
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
}
QUICK, FULL = {80.0: 8.0}, {10.0: 50.0, 40.0: 20.0}
"""Requests a second, and for how many seconds: enough for a P99."""
TOLERANCE = 0.1
"""The relative difference of two clients' medians that is still agreement."""


class Seen(NamedTuple):
    """The figures of one run of a client. lateness_ms: its own, at P99."""

    answered: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    lateness_ms: float


def measure(quick: bool, quiet: Quiet) -> Measured:
    python = _python()
    rounds = 1 if quick else 3
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _train(folder / "shop")
        _write_inputs(folder)
        url = stack.enter_context(server(folder / "shop"))
        for rate, seconds in (QUICK if quick else FULL).items():
            variants = {
                "jgr": functools.partial(ours, url, folder, rate, seconds),
                "aiperf": functools.partial(aiperf, python, url, folder, rate, seconds),
            }
            runs = harness.interleave(variants, rounds, quiet)
            rows += [_row(client, rate, seen) for client, seen in runs.items()]
    return Measured(claims(rows), rows)


def _python() -> str:
    """The Python that has AIPerf; Missing says what to install and to set."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        raise Missing(f"set {VARIABLE} to the Python of a virtual environment with {REQUIREMENTS}")
    if not os.access(python, os.X_OK):
        raise Missing(f"{VARIABLE}={python} is no program")
    return python


def _train(out: Path) -> None:
    from jgr.training.generator import train_generator

    config = override(load_config(ROOT / "configs" / "shop.py"), f"train.out={out}", "train.steps=1")
    train_generator(config, load_dataset(config.data))


def _write_inputs(folder: Path) -> None:
    """AIPerf's files: the histories, the template of a body, the tokenizer."""
    items = load_catalog(folder / "shop" / "catalog.jsonl").item_ids
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(items), (INPUTS, HISTORY)).tolist()
    lines = [json.dumps({"text": " ".join(items[row] for row in rows)}) for rows in drawn]
    (folder / "inputs.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "template.json").write_text(TEMPLATE)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Run `jgr serve` of a folder on a free port: its URL. RuntimeError where it does not start or end well."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_JGR, "serve", str(model), "--port=0", "--log_level=warning"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if url:
                yield url
        finally:
            process.terminate()
    if process.returncode != 0:
        raise RuntimeError(f"the server ended with exit code {process.returncode}")


def ours(url: str, folder: Path, rate: float, seconds: float) -> Seen:
    """One run of `jgr bench serve`."""
    flags = [f"--url={url}", f"--rate={rate}", f"--duration={seconds}", f"--history_length={HISTORY}"]
    flags += [f"--top_k={TOP_K}", "--set", f"catalog.path={folder / 'shop' / 'catalog.jsonl'}"]
    out = _run([sys.executable, "-c", RUN_JGR, "bench", "serve", *flags], {"PYTHONPATH": str(ROOT)})
    return read_ours(json.loads(out.splitlines()[-1]))


def read_ours(report: Mapping[str, Any]) -> Seen:
    """The figures of our report."""
    latency_ms = report["latency_ms"]
    if latency_ms is None or latency_ms["p99"] is None:
        raise RuntimeError(f"{report['sent']} requests are not enough for a P99: {report['answered']}")
    return Seen(
        report["answered"]["200"],
        report["achieved_per_s"],
        latency_ms["p50"],
        latency_ms["p99"],
        report["lateness_ms"]["p99"],
    )


def aiperf(python: str, url: str, folder: Path, rate: float, seconds: float) -> Seen:
    """One run of AIPerf."""
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [
        python, "-m", "aiperf", "profile", "--url", url, "--endpoint-type", "template", "--endpoint", "/v1/recommend",
        "--model", "shop", "--tokenizer", str(folder / "tokenizer"),
        "--extra-inputs", f"payload_template:{folder / 'template.json'}",
        "--extra-inputs", "response_field:items[0].item_id",
        "--input-file", str(folder / "inputs.jsonl"), "--custom-dataset-type", "single_turn",
        "--request-rate", str(rate), "--arrival-pattern", "poisson", "--request-count", str(round(rate * seconds)),
        "--warmup-request-count", str(WARM_UP), "--random-seed", "1", "--output-artifact-dir", str(out),
        "--no-server-metrics", "--no-gpu-telemetry", "--ui", "none",
    ]  # fmt: skip
    _run(command, {})
    return read_aiperf(json.loads((out / "profile_export_aiperf.json").read_text()))


def read_aiperf(report: Mapping[str, Any]) -> Seen:
    """The figures of AIPerf's report."""
    latency_ms = report["request_latency"]
    return Seen(
        round(report["request_count"]["avg"]),
        report["request_throughput"]["avg"],
        latency_ms["p50"],
        latency_ms["p99"],
        report["credit_to_start_latency"]["p99"],
    )


def _run(command: Sequence[str], settings: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command[:4])} ended with code {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def _row(client: str, rate: float, runs: Sequence[Seen]) -> Row:
    row: Row = {"client": client, "rate": rate, "answered": [seen.answered for seen in runs]}
    for name in ("requests_per_s", "p50_ms", "p99_ms", "lateness_ms"):
        row[name] = harness.spread(getattr(seen, name) for seen in runs)
    return row


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The relative distance of our medians from AIPerf's, at each rate."""
    of = {(row["client"], row["rate"]): row for row in rows}
    found = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        for name, words in (("p50_ms", "p50"), ("p99_ms", "p99"), ("requests_per_s", "rate")):
            theirs = of["aiperf", rate][name]["median"]
            apart = abs(of["jgr", rate][name]["median"] / theirs - 1)
            what = f"difference-of-{words}-from-aiperf-at-{rate:g}-per-s"
            found.append(Claim(what, harness.rounded(apart), "", "lower", TOLERANCE))
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="aiperf_check",
            measure=measure,
            packages=("numpy", "jax", "httptools"),
            sources=(Path(__file__),),
        )
    )
