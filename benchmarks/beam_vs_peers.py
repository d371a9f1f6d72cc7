# SPDX-License-Identifier: Apache-2.0
"""Beam search for three tokens: jgr against `transformers`, `vllm`, and a PyTorch form that shares the prompt's KV, as
it is and through torch.compile.

All load the same random Qwen3 of 16 M parameters (benchmarks/peers/workload.py; beam_vs_peers_51m.py has a larger one),
get the same prompts as tokens, compute in float32 on two cores, and run in turns, call by call; peers run in processes
of their own. A time is that of one request on a warm process, from tokens to sequences and scores (see harness.timed).
A prompt of 700 tokens is none of jgr's profiles and runs in that of 1,024; the peers take it as it is. There are three
searches:

- unconstrained: all 25,000 tokens at each step; scores are log-likelihoods.
- full: constrained to 12,000 items; scores are log-likelihoods over the whole vocabulary, as `transformers` has them
  (it masks after its log_softmax).
- valid: constrained to the same items, and normalized over the legal continuations; vLLM by a loop over the tree.

jgr computes as it is installed; `kernels` says by what. `make native` installs jgr-native.

How each peer is used, and how it is constrained, stands in benchmarks/peers/*_peer.py. A peer that returns other beams
is reported with the number that it has in common with ours. Searches that take a peer seconds are timed once, and
`transformers` searches 512 tokens with 8 and 128 beams only.

    JGR_PEERS_TORCH=PYTHON JGR_PEERS_VLLM=PYTHON python -m benchmarks.beam_vs_peers [--quick]

Each PYTHON is that of a virtual environment with benchmarks/peers/requirements-*.txt.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.peers import client, workload
from benchmarks.peers.client import COMPILED, PYTORCH, TRANSFORMERS, VLLM, Peer, Present
from benchmarks.peers.workload import DEPTH, MODEL, PROFILES, Beams, Catalog, Int32, agreement
from jgr.evaluation import unconstrained
from jgr.models import beam, hf
from jgr.models.beam import Normalize
from jgr.models.decoder import DecoderConfig
from jgr.models.generators import laid_out
from jgr.ops import native
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.work import RecommendOutcome, RecommendWork
from jgr.serving.policies.jobs import Profile

THREADS = 2
AT_LEAST_S = 0.3
KINDS = (PYTORCH, COMPILED, TRANSFORMERS, VLLM)
SHAPES = (
    *((512, width) for width in (8, 32, 128, 256, 512)),
    *((700, width) for width in (32, 128)),
    *((1024, width) for width in (8, 32, 128, 256, 512)),
)
"""Prompt tokens and beams."""
MODES = ("unconstrained", "full", "valid")
SEARCHES: Mapping[str, Sequence[str]] = {  # of each peer
    "pytorch": MODES,
    "compiled": MODES,
    "transformers": ("unconstrained", "full"),
    "vllm": ("unconstrained", "valid"),
}
TARGETS = (
    ("transformers", "unconstrained", 40.0),
    ("transformers", "full", 40.0),
    ("vllm", "unconstrained", 8.0),
    ("vllm", "valid", 8.0),
    ("pytorch", "valid", 1.5),
    ("compiled", "valid", 1.5),
)
"""Of a prompt of 512 tokens and 128 beams."""
SLOW: Mapping[str, int] = {"transformers": 8, "vllm": 32}
"""Peers that are timed once with more beams."""


class Found(NamedTuple):
    """ms: the time of one call; beams: what it returned."""

    ms: float
    beams: Beams


class Ours:
    """jgr's programs for the shapes that are compared, compiled."""

    def __init__(
        self, folder: Path, catalog: Catalog, shapes: Sequence[tuple[int, int]], dtype: Any = np.float32
    ) -> None:
        self._cfg, loaded = hf.load(folder, dtype)
        self._weights = laid_out(loaded)
        self._sequences = catalog.sequences
        tables = beam.catalog_tables(catalog.tree, catalog.level_tokens, self._weights)
        padded = sorted({(workload.profile(tokens), width) for tokens, width in shapes})
        profiles = tuple(Profile("recommend", 1, tokens, width) for tokens, width in padded)
        self._executors = {mode: self._executor(tables, profiles, mode) for mode in ("full", "valid")}
        self._free = {shape: self._search(*shape) for shape in padded}

    def _executor(self, tables: beam.CatalogTables, profiles: tuple[Profile, ...], mode: Any) -> RowExecutor:
        normalize: Normalize = mode
        executor = RowExecutor(self._cfg, self._weights, tables, profiles, normalize)
        executor.warm_up(lambda done, total, label: harness.note(f"compiled {mode} {label}"))
        return executor

    def _search(self, tokens: int, width: int) -> jax.stages.Compiled:
        prompts = np.zeros((1, tokens), np.int32), np.ones(1, np.int32)
        lowered = unconstrained.search.lower(self._weights, *prompts, cfg=self._cfg, depth=DEPTH, width=width)
        return lowered.compile()

    def run(self, mode: str, prompt: Int32, width: int) -> Found:
        return Found(*harness.timed(functools.partial(self.search, mode, prompt, width), AT_LEAST_S))

    def search(self, mode: str, prompt: Int32, width: int) -> Beams:
        padded = workload.profile(len(prompt))
        if mode == "unconstrained":
            tokens = np.pad(prompt, (0, padded - len(prompt)))[None]
            out = self._free[padded, width](self._weights, tokens, np.array([len(prompt)], np.int32))
            sequences, scores = (np.asarray(x)[0] for x in out)
            return Beams(sequences, scores)
        profile = Profile("recommend", 1, padded, width)
        (outcome,) = self._executors[mode].run(profile, [RecommendWork(prompt, width)])
        assert isinstance(outcome, RecommendOutcome)
        return Beams(self._sequences[outcome.leaves], outcome.scores)


def ask(peer: Peer, mode: str, prompt: Int32, width: int) -> Found:
    reply = peer.ask(op="beams", mode=mode, prompts=[prompt.tolist()], width=width, at_least_s=AT_LEAST_S)
    sequences = np.array(reply["sequences"], np.int32).reshape(-1, DEPTH)
    return Found(reply["ms"], Beams(sequences, np.array(reply["scores"], np.float32)))


def measure(quick: bool, quiet: Quiet, model: DecoderConfig = MODEL, size: str = "") -> Measured:
    """size: stands behind the claims' ids."""
    rng = np.random.default_rng(0)
    catalog = workload.make_catalog(rng)
    shapes, rounds = (SHAPES[:1], 1) if quick else (SHAPES, 5)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workload.export(folder, catalog, model)
        present = client.start_all(KINDS, folder, THREADS, stack)
        ours = Ours(folder, catalog, shapes)
        rows = []
        for tokens, width in shapes:
            prompt = workload.draw_prompt(catalog, tokens, rng)
            rows += _rows(tokens, width, _variants(ours, present, prompt, width), rounds, quiet)
    rows += [{"kernels": native.describe()}, *_about_peers(present)]
    return Measured(claims(rows, size), rows)


def _variants(ours: Ours, present: Present, prompt: Int32, width: int) -> dict[str, Callable[[], Found]]:
    """The calls to compare, named "<search> <who>"."""
    found: dict[str, Callable[[], Found]] = {}
    for mode in MODES:
        found[f"{mode} jgr"] = functools.partial(ours.run, mode, prompt, width)
        for name, peer in present.peers.items():
            rare = name == "transformers" and (len(prompt), width) not in ((512, 8), (512, 128))
            if mode in SEARCHES[name] and not rare:
                found[f"{mode} {name}"] = functools.partial(ask, peer, mode, prompt, width)
    return found


def _rows(
    tokens: int, width: int, variants: Mapping[str, Callable[[], Found]], rounds: int, quiet: Quiet
) -> list[Row]:
    slow = [name for name in variants if width > SLOW.get(name.split()[1], width)]
    done = harness.interleave(variants, rounds, quiet, once=slow)
    rows = []
    for mode in MODES:
        of_mode = {name.split()[1]: found for name, found in done.items() if name.startswith(f"{mode} ")}
        rows.append({"search": mode, "prompt_tokens": tokens, "beam_width": width, **make_row(of_mode)})
    return rows


def make_row(found: Mapping[str, Sequence[Found]]) -> Row:
    """What everyone found, jgr's first; a peer's rounds are compared with jgr's of the same number."""
    times = {name: harness.spread(f.ms for f in runs) for name, runs in found.items()}
    peers = [name for name in found if name != "jgr"]
    row: Row = {"time_ms": times, "time_over_jgr": {}, "interval": {}, "agreement": {}}
    for name in peers:
        if len(found[name]) == len(found["jgr"]) > 1:
            row["interval"][name] = of_rounds([f.ms for f in found[name]], [f.ms for f in found["jgr"]])
        ratio = times[name]["median"] / times["jgr"]["median"]
        row["time_over_jgr"][name] = harness.rounded(ratio, 3)
        pairs = zip(found["jgr"], found[name], strict=False)  # a slow peer has fewer
        agreed = [agreement(ours.beams, theirs.beams) for ours, theirs in pairs]
        errors = [a.max_score_error for a in agreed if np.isfinite(a.max_score_error)]
        row["agreement"][name] = {
            "same": all(a.same for a in agreed),
            "in_common": min(a.common for a in agreed),
            "returned": min(a.returned for a in agreed),
            "max_score_error": harness.rounded(max(errors), 2) if len(errors) == len(agreed) else None,
        }
    return row


def of_rounds(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The least and the largest ratio of a round: of five, a 94 % interval of their median."""
    ratios = [harness.rounded(a / b, 3) for a, b in zip(above, below, strict=True)]
    return min(ratios), max(ratios)


def _about_peers(present: Present) -> list[Row]:
    """The versions of the peers that ran, and why the others did not run."""
    ran: list[Row] = [{"peer": name, "versions": peer.versions} for name, peer in present.peers.items()]
    return ran + [{"peer": name, "missing": why} for name, why in present.missing.items()]


def claims(rows: Sequence[Row], size: str = "") -> list[Claim]:
    points = [row for row in rows if "search" in row]
    missing = sum("missing" in row for row in rows)
    compared = [(row, name) for row in points for name in row["agreement"]]
    agreed = [row["agreement"][name] for row, name in compared]
    differ = sum(not found["same"] for found in agreed)
    errors = [found["max_score_error"] for found in agreed if found["max_score_error"] is not None]
    found = [
        Claim("beam-search-peers-missing", missing, "", "lower", 0),
        Claim("beam-searches-that-differ-from-a-peer", differ, "", "lower", 0),
        Claim("score-difference-from-a-peer", max(errors), "", "lower", workload.MAX_SCORE_ERROR),
    ]
    for profile, words in ((True, "least-time-of-any-peer-over-jgr"), (False, "least-time-between-profiles")):
        of = [(row, name) for row, name in compared if (row["prompt_tokens"] in PROFILES) == profile]
        if of:
            row, name = min(of, key=lambda at: float(at[0]["time_over_jgr"][at[1]]))
            found.append(_over(words, row, name, 1.0))
    for row in points:
        if (row["prompt_tokens"], row["beam_width"]) == (512, 128):
            for name, mode, target in TARGETS:
                if row["search"] == mode and name in row["time_over_jgr"]:
                    words = f"time-of-{name}-over-jgr-{mode}-prompt-512-beam-128"
                    found.append(_over(words, row, name, target))
    return [replace(claim, id=claim.id + size) for claim in found]


def _over(words: str, row: Row, name: str, target: float) -> Claim:
    """A peer's time over jgr's, with the interval that some rounds give."""
    interval = row["interval"].get(name)
    value = row["time_over_jgr"][name]
    return Claim(words, value, "x", "higher", target, interval=interval and (interval[0], interval[1]))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Median time over beam width; a line of panels for each search, a panel for each prompt length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    points = [row for row in rows if "search" in row]
    lengths = sorted({row["prompt_tokens"] for row in points})
    size = (4.5 * len(lengths), 3.0 * len(MODES))
    figure, axes = pyplot.subplots(len(MODES), len(lengths), figsize=size, sharey=True, squeeze=False)
    for i, mode in enumerate(MODES):
        for axis, length in zip(axes[i], lengths, strict=True):
            panel = [row for row in points if (row["search"], row["prompt_tokens"]) == (mode, length)]
            widths = [row["beam_width"] for row in panel]
            for name in dict.fromkeys(name for row in panel for name in row["time_ms"]):
                at = {r["beam_width"]: r["time_ms"][name]["median"] for r in panel if name in r["time_ms"]}
                axis.plot(list(at), list(at.values()), marker="o", label=name)
            axis.set(xscale="log", yscale="log", xticks=widths, xticklabels=widths)
            axis.set_title(f"{mode}, prompt of {length} tokens")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[i][0].set_ylabel("ms for one request")
        axes[i][0].legend()
    figure.supxlabel("beam width")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


SOURCES = (
    Path(__file__),
    *sorted(client.HERE.glob("*.py")),
    *sorted(client.HERE.glob("requirements-*.txt")),
)


def two_cores() -> None:
    """Before XLA counts the cores; peers inherit it."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_platforms", "cpu")


if __name__ == "__main__":
    two_cores()
    harness.main(
        Benchmark(
            name="beam_vs_peers",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=SOURCES,
            plot=plot,
        )
    )
