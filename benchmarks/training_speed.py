# SPDX-License-Identifier: Apache-2.0
"""Steps of training a second: `jgr train` against plain PyTorch (eager and compiled) and RecBole, on two cores.

One recipe on Amazon Beauty: hidden 128, 2 layers, histories of 50, 128 users a step, the softmax over all 12,101 items,
dropout .5, AdamW, float32. All run in turns, in processes of their own; in a round each takes the same number of steps,
jgr and PyTorch on the same batches. jgr is the whole loop of `jgr train`: it reads its batches and writes down each
loss. PyTorch's batches lie in memory, cut to jgr's widths, with the scores of no position that has no target.

PyTorch's work is checked: without dropout, from jgr's initial weights, its first losses are jgr's, so its gradients and
its AdamW are too. RecBole's is another: an example is a prefix of a history with one target, so that a step of 128
examples learns 128 targets, where jgr's learns every target of 128 users. Steps and targets a second are both compared.
RecBole has SASRec and no HSTU.

Each is measured with the C library's memory as it is, and kept between steps, as `jgr train` keeps it (peers by
MALLOC_* in their environment). A peer's better one counts, and jgr's as it trains.

    JGR_PEERS_TORCH=PYTHON JGR_PEERS_RECBOLE=PYTHON python -m benchmarks.training_speed [--quick]

Each PYTHON is that of a virtual environment with benchmarks/peers/requirements-*.txt; torch.compile needs a C++
compiler.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness, quality, training_world
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.peers import client
from benchmarks.peers.client import Kind, Peer
from benchmarks.training_world import CHECKED_STEPS, DATA, KEPT, MODELS, WARM_STEPS, Model
from jgr.data.datasets import Dataset, load_dataset
from jgr.training.run import LAG

THREADS = 2
RAW = "amazon-beauty"
PYTORCH = Kind("pytorch", "training_pytorch", "JGR_PEERS_TORCH", "requirements-torch.txt")
RECBOLE = Kind("recbole", "training_recbole", "JGR_PEERS_RECBOLE", "requirements-recbole.txt")
MEMORY: Mapping[str, Mapping[str, str]] = {
    "default": {},
    KEPT: {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)},
}
"""What a peer's environment says of the C library's memory: as it is, or kept, as `jgr train` keeps its own."""
MOST_DIFFERENCE = 1e-4
OURS = "jgr"


class Taken(NamedTuple):
    """So many steps in a row. targets: what they learnt. loss: of the last step, or their mean; None: not told."""

    steps: int
    seconds: float
    targets: int
    loss: float | None

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


class System:
    """A training that is asked for steps, round by round. targets: of each of jgr's steps."""

    def __init__(
        self, peer: Peer, counts: Sequence[int], asked: Callable[[int, int], dict[str, Any]]
    ) -> None:
        self.peer, self._counts, self._asked = peer, counts, asked
        self._round = 0

    def steps(self, count: int) -> Taken:
        first = self._round * (WARM_STEPS + count) + WARM_STEPS - LAG  # as jgr does
        self._round += 1
        reply = self._asked(first, count)
        if reply.get("first", first) != first:
            raise RuntimeError(f"{self.peer.kind.name} timed steps from {reply['first']}, not {first}")
        targets = reply.get("targets", sum(self._counts[first : first + count]))
        return Taken(count, reply["seconds"], targets, reply.get("loss"))


def prepared(raw: Path) -> Dataset:
    """The dataset as `jgr prepare` makes it, made once. Raises Missing."""
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {RAW} in the folder that JGR_DATA names")
    if not (harness.ROOT / DATA / "catalog.jsonl").exists():
        quality.run("prepare", f"--source={RAW}", f"--raw={raw}", f"--out={DATA}")
        quality.run("ids", f"--data={DATA}", "--method=item")
    return load_dataset(training_world.recipe("hstu").data)


def start(kind: Kind, folder: Path, environment: Mapping[str, str]) -> Peer:
    """As client.start, which says what is missing, with settings of its own."""
    python = os.environ.get(kind.variable, "")
    if not os.access(python, os.X_OK):
        raise Missing(
            f"{kind.name}: set {kind.variable} to the Python of a virtual environment with "
            f"benchmarks/peers/{kind.requirements}"
        )
    return Peer(kind, [python, "-m", f"benchmarks.peers.{kind.module}", str(folder)], environment, THREADS)


def start_ours(folder: Path, model: str, data: str, memory: str) -> Peer:
    command = [sys.executable, "-m", "benchmarks.training_world", str(folder), model, data, memory]
    return Peer(Kind(OURS, "", "", ""), command, {}, THREADS)


def measure(quick: bool, quiet: Quiet) -> Measured:
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / RAW
    dataset = prepared(raw)
    rounds, count = (1, 2) if quick else (7, 8)
    rows = [
        row
        for model in (MODELS[:1] if quick else MODELS)
        for row in of_model(model, dataset, DATA, rounds, count, quick, quiet)
    ]
    return Measured(claims(rows), rows)


def of_model(
    model: Model, dataset: Dataset, data: str, rounds: int, count: int, quick: bool, quiet: Quiet
) -> list[Row]:
    """The rows of one model. Rounds that others disturb are taken again, on later batches.

    quick: peers eagerly and with memory as it is, alone.
    """
    config = training_world.recipe(model, data)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        steps = 4 * (rounds + 1) * (count + WARM_STEPS)
        ours = training_world.export(folder / model, config, dataset, steps)
        systems, missing = started(folder, model, data, dataset, quick, stack)
        found: list[Row] = [{"model": model, "peer": name, "missing": why} for name, why in missing.items()]
        for name in sorted({system.peer.kind.name: name for name, system in systems.items()}.values()):
            peer = systems[name].peer
            found.append({"model": model, "peer": peer.kind.name, "versions": peer.versions})
        for name, system in systems.items():
            if system.peer.kind is PYTORCH:
                its = system.peer.ask(op="losses", compiled="compiled" in name, count=CHECKED_STEPS)["losses"]
                found.append(difference(model, name, ours, its))
        done = harness.interleave(
            {name: partial(system.steps, count) for name, system in systems.items()}, rounds, quiet
        )
    return [*found, *make_rows(model, done)]


def started(
    folder: Path, model: str, data: str, dataset: Dataset, quick: bool, stack: ExitStack
) -> tuple[dict[str, System], dict[str, str]]:
    """The trainings by name, which end with the stack, and why peers are missing."""
    with np.load(folder / model / "windows.npz") as windows:
        counts = (windows["rows"][:, :, 1:] >= 0).sum(axis=(1, 2)).tolist()
        widths = windows["widths"].tolist()
    if set(widths) != set(widths[:WARM_STEPS]):
        raise RuntimeError(f"widths {set(widths)}: jgr would compile one of them while it is timed")
    systems, missing = {}, dict[str, str]()

    def ask(peer: Peer, first: int, count: int, **more: Any) -> dict[str, Any]:
        return peer.ask(op="steps", first=first, count=count, **more)

    for memory in MEMORY:
        peer = stack.enter_context(start_ours(folder, model, data, memory))
        systems[f"{OURS}, {memory}"] = System(peer, counts, partial(ask, peer))
    kinds = [PYTORCH]
    if model == "sasrec":
        training_world.export_histories(folder / model / "histories", dataset)
        kinds.append(RECBOLE)
    for kind in kinds:
        for memory, environment in list(MEMORY.items())[: 1 if quick else None]:
            try:
                peer = stack.enter_context(start(kind, folder / model, environment))
            except Missing as error:
                missing[kind.name] = str(error)
                continue
            if kind is RECBOLE:
                systems[f"{kind.name}, {memory}"] = System(peer, counts, partial(ask, peer))
                continue
            for form in ("eager",) if quick else ("eager", "compiled"):
                asked = partial(ask, peer, compiled=form == "compiled")
                systems[f"{kind.name} {form}, {memory}"] = System(peer, counts, asked)
    return systems, missing


def difference(model: str, name: str, ours: Sequence[float], its: Sequence[float]) -> Row:
    """How far a peer's first losses are from jgr's, with the same weights and batches and no dropout."""
    largest = max(abs(a - b) for a, b in zip(ours, its, strict=True))
    return {
        "model": model,
        "system": name,
        "losses_without_dropout": [harness.rounded(x, 7) for x in its],
        "largest_difference": harness.rounded(largest),
    }


def make_rows(model: str, done: Mapping[str, Sequence[Taken]]) -> list[Row]:
    """A row for each system, and one for each comparison, by the ratio of each round."""
    rows: list[Row] = []
    for name, taken in done.items():
        row: Row = {
            "model": model,
            "system": name,
            "steps_per_s": harness.spread(t.rate for t in taken),
            "targets_per_s": harness.spread(t.targets / t.seconds for t in taken),
        }
        losses = [t.loss for t in taken if t.loss is not None]
        rows.append(row | ({"losses": [harness.rounded(x) for x in losses]} if losses else {}))

    def best(word: str) -> str | None:
        names = [name for name in done if name.startswith(word)]
        return max(names, key=lambda name: float(np.median([t.rate for t in done[name]])), default=None)

    mine = f"{OURS}, {KEPT}"
    for over, targets in ((best("pytorch"), False), (best("recbole"), False), (best("recbole"), True)):
        if over is not None:
            rows.append(compare(model, mine, over, done, targets))
    rows.append(compare(model, mine, f"{OURS}, default", done, False))
    return rows


def compare(model: str, of: str, over: str, done: Mapping[str, Sequence[Taken]], targets: bool) -> Row:
    def rate(taken: Taken) -> float:
        return (taken.targets if targets else taken.steps) / taken.seconds

    ratios = [rate(a) / rate(b) for a, b in zip(done[of], done[over], strict=True)]
    return {
        "model": model,
        "of": of,
        "over": over,
        "by": "targets" if targets else "steps",
        "ratio": harness.rounded(float(np.median(ratios))),
        "interval_95": list(harness.interval_of_median(ratios)),
        "ratios": [harness.rounded(x) for x in ratios],
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = [Claim("training-peers-missing", sum("missing" in row for row in rows), "", "lower", 0)]
    for model in MODELS:
        differences = [
            row["largest_difference"] for row in rows if row["model"] == model and "largest_difference" in row
        ]
        if differences:
            name = f"training-loss-of-{model}-less-that-of-pytorch"
            found.append(Claim(name, max(differences), "nats", "lower", MOST_DIFFERENCE))
    for row in rows:
        if row.get("losses") and row["system"].startswith("recbole, default"):
            fell = harness.rounded(row["losses"][0] - row["losses"][-1])
            found.append(Claim("training-loss-of-recbole-falls-by", fell, "nats", "higher", 0))
        if "ratio" in row:
            over = "defaults" if row["over"].startswith(OURS) else row["over"].split(",")[0].split()[0]
            name = f"training-{row['by']}-per-s-of-{row['model']}-over-{over}"
            low, high = row["interval_95"]
            found.append(Claim(name, row["ratio"], "x", "higher", 1.0, interval=(low, high)))
    return found


if __name__ == "__main__":
    # Before XLA counts the cores; peers inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_platforms", "cpu")
    peers = [client.HERE / f"{name}.py" for name in ("lines", "client", PYTORCH.module, RECBOLE.module)]
    harness.main(
        Benchmark(
            name="training_speed",
            measure=measure,
            packages=("jax", "jaxlib", "numpy", "optax", "grain"),
            sources=(Path(__file__), Path(training_world.__file__), *peers),
        )
    )
