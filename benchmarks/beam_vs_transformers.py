# SPDX-License-Identifier: Apache-2.0
"""jgr's `recommend` against `transformers.generate`: same weights, prompt and catalog, same sequences and scores.

A random Qwen3 of 16 M parameters (4 layers, hidden 256, vocabulary 25,000, untied) is exported to a Hugging Face
folder and loaded by both; 12,000 items with three codes of 256 each are legal. Both compute in float32 on two cores,
in one process, in turns. A time is that of one request on a warm process (see harness.timed).

- jgr: JaxExecutor.run with normalize="full", from the prompt as a numpy array to leaves and scores as numpy arrays.
- transformers: generate with num_beams = num_return_sequences = beam width and length_penalty=0, constrained by
  prefix_allowed_tokens_fn: a dict from the generated prefix to its legal tokens. (A LogitsProcessor of our own that
  fills one mask for all beams was no faster.)
- torch_shared: benchmarks/baselines/torch_shared.py, PyTorch by hand with the prompt's keys and values shared.

Needs what jgr does not: pip install torch==2.13.0 transformers==5.23.0 (a CPU build of torch is enough).

    python -m benchmarks.beam_vs_transformers [--quick]
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.baselines import torch_shared
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.data.prefix_tree import PrefixTree
from jgr.models import beam, decoder, hf, params
from jgr.models.decoder import DecoderConfig
from jgr.serving.executors import JaxExecutor
from jgr.serving.policies.batching import Profile
from jgr.serving.work import RecommendOutcome, RecommendWork

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

MODEL = DecoderConfig(
    family="qwen3",
    vocab_size=25_000,
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=64,
    mlp=704,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
    max_position=2048,
)
N_ITEMS, DEPTH, LEVEL_SIZE = 12_000, 3, 256
FIRST_TOKEN = 24_000  # of the first level; text would come before
THREADS = 2
LOGIT_SCALE = 8.0  # makes the spread of logits about that of a trained model, 2.6, instead of 0.3

MAX_SCORE_ERROR = 1e-4
TIE = 2e-4
"""Beams whose scores are closer than this may change places."""


class Beams(NamedTuple):
    """leaves: [m] int32, best first; scores: [m] float32."""

    leaves: Int32
    scores: Float32


class Agreement(NamedTuple):
    """max_score_error: over the beams in order. moved: positions that hold another leaf. same: the same sequences
    in the same order, apart from ties."""

    max_score_error: float
    moved: int
    same: bool


def agreement(ours: Beams, theirs: Beams) -> Agreement:
    """Compare two beam searches; positions may differ only within a run of scores that are closer than TIE.

    Of the last run a part may lie beyond the beam width, so there scores alone must agree.
    """
    if len(ours.leaves) != len(theirs.leaves):
        return Agreement(float("inf"), max(len(ours.leaves), len(theirs.leaves)), False)
    error = float(np.abs(ours.scores - theirs.scores).max())
    moved = int((ours.leaves != theirs.leaves).sum())
    ends = np.flatnonzero(-np.diff(theirs.scores) >= TIE) + 1
    runs = zip(np.split(ours.leaves, ends)[:-1], np.split(theirs.leaves, ends)[:-1], strict=True)
    same = error <= MAX_SCORE_ERROR and all(set(a.tolist()) == set(b.tolist()) for a, b in runs)
    return Agreement(error, moved, same)


class Catalog(NamedTuple):
    """tree; level_tokens: per level [256] int32; sequences: [leaves, depth] int32, the tokens of each leaf."""

    tree: PrefixTree
    level_tokens: tuple[Int32, ...]
    sequences: Int32


def make_catalog(rng: np.random.Generator) -> Catalog:
    flat = rng.choice(LEVEL_SIZE**DEPTH, N_ITEMS, replace=False)
    codes = np.stack(np.unravel_index(flat, (LEVEL_SIZE,) * DEPTH), axis=1).astype(np.int32)
    tree = PrefixTree.build(codes)
    starts = FIRST_TOKEN + LEVEL_SIZE * np.arange(DEPTH)
    level_tokens = tuple(np.arange(start, start + LEVEL_SIZE, dtype=np.int32) for start in starts)
    columns = [level_tokens[lv][tree.codes[lv][tree.paths[:, lv]]] for lv in range(DEPTH)]
    return Catalog(tree, level_tokens, np.stack(columns, axis=1))


def make_model(folder: Path) -> None:
    """Write a random model to a Hugging Face folder."""
    drawn: decoder.DecoderParams = params.initialize(decoder.spec(MODEL), jax.random.key(0))
    scaled = decoder.DecoderParams(drawn.embed, drawn.layers, drawn.norm, LOGIT_SCALE * drawn.head)
    hf.export(folder, MODEL, scaled)


class Ours:
    def __init__(self, folder: Path, catalog: Catalog, profiles: tuple[Profile, ...]) -> None:
        cfg, weights = hf.load(folder)
        tables = beam.catalog_tables(catalog.tree, catalog.level_tokens, weights)
        self._executor = JaxExecutor(cfg, weights, tables, profiles, "full")
        self._executor.warm_up(lambda done, total, label: None)

    def recommend(self, prompt: Int32, width: int) -> Beams:
        work = RecommendWork(prompt, width)
        (outcome,) = self._executor.run(Profile("recommend", 1, len(prompt), width), [work])
        assert isinstance(outcome, RecommendOutcome)
        return Beams(outcome.leaves, outcome.scores)


class Transformers:
    """`generate` constrained to the catalog."""

    def __init__(self, torch: Any, transformers: Any, folder: Path, catalog: Catalog) -> None:
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self.weights: dict[str, Any] = self._model.state_dict()
        self._depth = catalog.sequences.shape[1]
        self._leaf_of = {tuple(path): leaf for leaf, path in enumerate(catalog.sequences.tolist())}
        legal: dict[tuple[int, ...], set[int]] = {}
        for path in self._leaf_of:
            for level in range(self._depth):
                legal.setdefault(path[:level], set()).add(path[level])
        self._legal = {prefix: sorted(tokens) for prefix, tokens in legal.items()}

    def recommend(self, prompt: Int32, width: int) -> Beams:
        torch, length = self._torch, len(prompt)
        ids = torch.from_numpy(prompt).long()[None]
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            prefix_allowed_tokens_fn=functools.partial(self._allowed, length),
            max_new_tokens=self._depth,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=0.0,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        paths = out.sequences[:, length:].tolist()
        leaves = np.array([self._leaf_of[tuple(path)] for path in paths], np.int32)
        return Beams(leaves, out.sequences_scores.numpy())

    def _allowed(self, length: int, batch: int, ids: Any) -> list[int]:
        return self._legal[tuple(ids[length:].tolist())]


def measure(quick: bool, quiet: Quiet) -> Measured:
    torch, transformers = harness.require("torch", "2.13.0"), harness.require("transformers", "5.23.0")
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rng = np.random.default_rng(0)
    catalog = make_catalog(rng)
    lengths, widths, rounds = ((512,), (8, 32), 2) if quick else ((512, 1024), (8, 32, 128), 5)
    profiles = tuple(Profile("recommend", 1, length, width) for length in lengths for width in widths)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        ours = Ours(folder, catalog, profiles)
        theirs = Transformers(torch, transformers, folder, catalog)
        by_hand = torch_shared.TorchShared(torch, MODEL, theirs.weights, catalog.tree, catalog.level_tokens)
    recommenders: dict[str, Callable[[Int32, int], Beams]] = {
        "jgr": ours.recommend,
        "transformers": theirs.recommend,
        "torch_shared": lambda prompt, width: Beams(*by_hand.recommend(prompt, width)),
    }
    rows = []
    for profile in profiles:
        items = catalog.sequences[rng.integers(0, N_ITEMS, -(-profile.tokens // DEPTH))]
        prompt = items.ravel()[: profile.tokens]
        variants = {name: functools.partial(run, prompt, profile.width) for name, run in recommenders.items()}
        rows.append(_row(profile, variants, rounds, quiet))
    return Measured(_claims(rows), rows)


def _row(profile: Profile, variants: Mapping[str, Callable[[], Beams]], rounds: int, quiet: Quiet) -> Row:
    runs = {name: functools.partial(harness.timed, run) for name, run in variants.items()}
    done = harness.interleave(runs, rounds, quiet)
    times = {name: harness.spread(ms for ms, _ in pairs) for name, pairs in done.items()}
    peers = [name for name in variants if name != "jgr"]
    found = {
        name: [
            agreement(ours, theirs) for (_, ours), (_, theirs) in zip(done["jgr"], done[name], strict=True)
        ]
        for name in peers
    }
    return {
        "prompt_tokens": profile.tokens,
        "beam_width": profile.width,
        "time_ms": times,
        "time_over_jgr": {
            name: harness.rounded(times[name]["median"] / times["jgr"]["median"], 3) for name in peers
        },
        "agreement": {
            name: {
                "same_sequences": all(agreed.same for agreed in runs_found),
                "max_score_error": harness.rounded(max(a.max_score_error for a in runs_found), 2),
                "positions_moved_within_ties": max(a.moved for a in runs_found),
            }
            for name, runs_found in found.items()
        },
    }


def _claims(rows: Sequence[Row]) -> list[Claim]:
    worst = max(row["agreement"]["transformers"]["max_score_error"] for row in rows)
    differ = sum(not row["agreement"]["transformers"]["same_sequences"] for row in rows)
    claims = [
        Claim("searches-that-differ-from-transformers", differ, "", "lower", 0),
        Claim("score-difference-from-transformers", worst, "", "lower", MAX_SCORE_ERROR),
    ]
    for width, target in ((8, 4.0), (128, 40.0)):
        for row in rows:
            if (row["prompt_tokens"], row["beam_width"]) == (512, width):
                ratio = row["time_over_jgr"]["transformers"]
                name = f"time-of-transformers-over-jgr-prompt-512-beam-{width}"
                claims.append(Claim(name, ratio, "x", "higher", target))
    return claims


def plot(rows: Sequence[Row], path: Path) -> None:
    """Median time over beam width, a panel for each prompt length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lengths = sorted({row["prompt_tokens"] for row in rows})
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(4.5 * len(lengths), 3.6), sharey=True, squeeze=False
    )
    for axis, length in zip(axes[0], lengths, strict=True):
        panel = [row for row in rows if row["prompt_tokens"] == length]
        widths = [row["beam_width"] for row in panel]
        for name in ("transformers", "torch_shared", "jgr"):
            times = [row["time_ms"][name] for row in panel]
            axis.plot(widths, [t["median"] for t in times], marker="o", label=name)
            axis.fill_between(widths, [t["q1"] for t in times], [t["q3"] for t in times], alpha=0.2)
        axis.set(xscale="log", yscale="log", xticks=widths, xticklabels=widths)
        axis.set(title=f"prompt of {length} tokens", xlabel="beam width")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms for one request")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    # Before XLA and OpenMP count the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_platforms", "cpu")
    harness.main(
        Benchmark(
            name="beam_vs_transformers",
            measure=measure,
            packages=("jax", "jaxlib", "numpy", "torch", "transformers"),
            sources=(Path(__file__), Path(torch_shared.__file__)),
            plot=plot,
        )
    )
