# SPDX-License-Identifier: Apache-2.0
"""How long a server takes from the start of its process to ready, and to its first answer; and what serving installs.

`jgr serve` is a process of its own, asked by jgr.Client: for the demo shop's generator a recommend, for an HSTU over
the same shop a rank. Both have the sizes of configs/shop.py and were trained for one step, since weights do not change
times. Cold: the folder of compiled programs (model.compilation_cache) is empty, as on a new machine. Warm: it is that
of the start before. The files themselves are in the system's memory in both cases.

The targets. Warm within 5 s: deploy/kubernetes asks every 5 s whether a pod is ready, so a rollout would not see a
shorter start. Cold within 60 s, for which a person waits who has just installed jgr. Ready means that nothing is
left to compile: the first answer comes within 100 ms of it, the default limit of `jgr bench serve`. The install is
counted without jax and what jax itself needs: 150 MB, which tests/test_install.py holds too; jgr's own files are in it,
and what pip compiles of them.

    python -m benchmarks.first_answer [--quick]
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jgr
from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from tools.packages import closure, own_mb, size_mb

JGR = (sys.executable, "-c", "import sys; from jgr.cli.main import run; sys.exit(run())")
MODELS = {"generator": "generator", "scorer": "hstu"}
HISTORY, CANDIDATES = ["S0003", "S0025"], [f"S{item:04}" for item in range(1, 51)]
PATIENCE_S = 300.0

Ask = Callable[[jgr.Client], object]
ASK: Mapping[str, Ask] = {
    "generator": lambda client: client.recommend(HISTORY, top_k=10),
    "scorer": lambda client: client.rank(HISTORY, CANDIDATES),
}


class Start(NamedTuple):
    """One start. Seconds from the start of the process to ready, and to the first answer."""

    ready_s: float
    answer_s: float


def train(model: str, out: Path) -> Path:
    """A folder of the shop's model, after one step."""
    settings = (f"train.model={MODELS[model]}", f"train.out={out}", "train.steps=1", f"model.name={model}")
    command = [*JGR, "train", "--config=shop", *(f"--set={setting}" for setting in settings)]
    if subprocess.run(command, cwd=out.parent, env=environment(), stdout=subprocess.DEVNULL).returncode:
        raise Missing(f"jgr train failed for the {model}; its own words are above")
    return out


def environment() -> dict[str, str]:
    """Without what would change where programs are kept, or how they are compiled."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("JAX_", "XLA_", "JGR_"))}
    return {**kept, "PYTHONPATH": str(harness.ROOT), "JAX_PLATFORMS": "cpu"}


def start(arguments: Sequence[str], ask: Ask) -> Start:
    """Start `jgr serve`, ask it once, and stop it. Raises Missing where it does not start."""
    begun = time.perf_counter()
    with subprocess.Popen(
        [*JGR, "serve", *arguments, "--port=0"], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            ready_s = time.perf_counter() - begun
            if not url:
                raise Missing("the server did not start; its own words are above")
            with jgr.Client(url, timeout_s=PATIENCE_S) as client:
                ask(client)
            return Start(ready_s, time.perf_counter() - begun)
        finally:
            process.terminate()


def cold(folder: Path, ask: Ask, settings: Sequence[str]) -> Start:
    with tempfile.TemporaryDirectory() as cache:
        return warm(folder, ask, settings, Path(cache))


def warm(folder: Path, ask: Ask, settings: Sequence[str], cache: Path) -> Start:
    """A start with the programs that an earlier one has left in `cache`, if there was one."""
    fields = (*settings, f"model.compilation_cache={cache}")
    return start([str(folder), *(f"--set={field}" for field in fields)], ask)


def installed() -> Row:
    """The size of the install beside jax, in units of 1e6 bytes: other packages, and jgr's own files."""
    with (harness.ROOT / "pyproject.toml").open("rb") as file:
        asked = tomllib.load(file)["project"]["dependencies"]
    with_jax, jax = closure(*asked), closure("jax")
    others = {name: dist for name, dist in with_jax.items() if name not in jax}
    largest = sorted(others, key=lambda name: size_mb({name: others[name]}), reverse=True)[:8]
    return {
        "packages_mb": harness.rounded(size_mb(others)),
        "jgr_mb": harness.rounded(own_mb()),
        "jax_mb": harness.rounded(size_mb({name: with_jax[name] for name in with_jax.keys() & jax.keys()})),
        "packages": len(others),
        "largest_mb": {name: harness.rounded(size_mb({name: others[name]}), 3) for name in largest},
    }


def measure(quick: bool, quiet: Quiet) -> Measured:
    # One program of each kind in place of two, and one round that is kept.
    settings, rounds = (("profiles.batch=1",), 1) if quick else ((), 5)
    with tempfile.TemporaryDirectory(prefix="jgr-first-answer-") as made:
        variants = {}
        for model, ask in ASK.items():
            folder = train(model, Path(made) / model)
            variants[f"{model} cold"] = functools.partial(cold, folder, ask, settings)
            # The first round, which is not kept, fills this folder.
            variants[f"{model} warm"] = functools.partial(
                warm, folder, ask, settings, Path(made) / f"{model}-cache"
            )
        runs = harness.interleave(variants, rounds, quiet)
    rows = [row(name, starts) for name, starts in runs.items()]
    return Measured(claims(rows, size := installed()), [*rows, {"installed": size}])


def row(name: str, starts: Sequence[Start]) -> Row:
    model, cache = name.split()
    return {
        "model": model,
        "cache": cache,
        "ready_s": harness.spread(one.ready_s for one in starts),
        "first_answer_s": harness.spread(one.answer_s for one in starts),
        "answer_after_ready_ms": harness.spread((one.answer_s - one.ready_s) * 1e3 for one in starts),
    }


def claims(rows: Sequence[Row], size: Row) -> list[Claim]:
    found = []
    for of in rows:
        name, target = f"{of['cache']}-{of['model']}", 5.0 if of["cache"] == "warm" else 60.0
        median = of["first_answer_s"]["median"]
        found.append(Claim(f"seconds-to-the-first-answer-{name}", median, "s", "lower", target))
    late = max(of["answer_after_ready_ms"]["median"] for of in rows)
    found.append(Claim("first-answer-after-ready", late, "ms", "lower", 100.0))
    megabytes = harness.rounded(size["packages_mb"] + size["jgr_mb"])
    found.append(Claim("serving-install-beside-jax", megabytes, "MB", "lower", 150.0))
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="first_answer",
            measure=measure,
            packages=("numpy", "jax", "jaxlib", "urllib3", "uvicorn"),
            sources=(
                Path(__file__),
                harness.ROOT / "tools" / "packages.py",
                harness.ROOT / "configs" / "shop.py",
            ),
        )
    )
