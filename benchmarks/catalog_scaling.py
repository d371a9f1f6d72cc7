# SPDX-License-Identifier: Apache-2.0
"""What the constraint costs as a catalog grows: `recommend` with the prefix tree and without, 10 K to 10 M items.

The model is a random Qwen3 of 16 M parameters (benchmarks/peers/workload.py); prompts have 512 tokens, ids three levels
of 8192 codes, normalize is "valid". One request at a time is timed, from tokens on the host to answers on the host, by
three searches in turns:

- on: the engine's executor, its tables padded as the server's are; the answer is the items' ids.
- off: the same model, vocabulary (8192 tokens at each step, the same rows of the output head) and exact choice of the
  best beams, without a tree: every token may follow. The answer is sequences of tokens.
- all_tokens: as off, over the whole vocabulary at each step, as language models are searched; not in the claims.

Catalogs: `zipf` draws distinct semantic ids whose codes have probability 1 / rank at each level; `one_prefix` puts all
items below one first code, which has all 8192 children, one of which has all 8192 in turn.

The rows about the largest catalog say what its file takes (jgr.catalog.columns) and what a process of its own
needs to load it and build the tree (`jgr catalog inspect`), and how many bytes lie on the host and on the device.

    python -m benchmarks.catalog_scaling [--quick]
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.peers.workload import LOGIT_SCALE, MODEL
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.catalog.text_table import ItemIds, TextTable
from jgr.evaluation import unconstrained
from jgr.models import beam, decoder, params
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.ops.constrained_topk import select
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.work import RecommendOutcome, RecommendWork
from jgr.serving.policies.jobs import Profile

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

THREADS = 2
AT_LEAST_S = 0.3
DEPTH, LEVEL_SIZE, FIRST_TOKEN = 3, 8192, 400
PROMPT = 512
SIZES, WIDTHS, ROUNDS = (10_000, 100_000, 1_000_000, 5_000_000, 10_000_000), (128, 256, 512), 5
QUICK_SIZES, QUICK_WIDTHS, QUICK_ROUNDS = (10_000, 100_000), (128,), 1
TARGET = 1.05
INSPECT = "import sys; from jgr.cli.main import run; sys.exit(run(['catalog', 'inspect', *sys.argv[1:]]))"


class Items(NamedTuple):
    """n items. ids: their ids; codes: [n, depth] int32, their semantic ids, all distinct."""

    ids: ItemIds
    codes: Int32


def make_items(kind: str, n: int, seed: int = 0) -> Items:
    """n items with distinct semantic ids; see above for the kinds."""
    codes = {"zipf": _zipf, "one_prefix": _one_prefix}[kind](n, np.random.default_rng(seed))
    digits = len(str(n - 1))
    texts = np.char.zfill(np.arange(n).astype(f"S{digits}"), digits)
    return Items(ItemIds(TextTable(texts.view(np.uint8), np.arange(n + 1, dtype=np.int64) * digits)), codes)


def _zipf(n: int, rng: np.random.Generator) -> Int32:
    weights = 1 / np.arange(1, LEVEL_SIZE + 1)
    edges = np.cumsum(weights / weights.sum())
    ranked = [rng.permutation(LEVEL_SIZE) for _ in range(DEPTH)]  # frequent codes stand anywhere
    flat = np.zeros(0, np.int64)
    while len(flat) < n:
        drawn = [ranks[np.minimum(np.searchsorted(edges, rng.random(n)), LEVEL_SIZE - 1)] for ranks in ranked]
        flat = np.union1d(flat, np.ravel_multi_index(drawn, (LEVEL_SIZE,) * DEPTH))
    return _codes(rng.permutation(flat)[:n])


def _one_prefix(n: int, rng: np.random.Generator) -> Int32:
    every = np.arange(min(n, LEVEL_SIZE), dtype=np.int64)
    rest = np.arange(n - len(every), dtype=np.int64)
    others = LEVEL_SIZE * (1 + rest % (LEVEL_SIZE - 1)) + rest // (LEVEL_SIZE - 1)
    return _codes(rng.permutation(np.concatenate([every, others])))


def _codes(flat: Int64) -> Int32:
    return np.stack(np.unravel_index(flat, (LEVEL_SIZE,) * DEPTH), axis=1).astype(np.int32)


def level_tokens() -> tuple[Int32, ...]:
    starts = range(FIRST_TOKEN, FIRST_TOKEN + DEPTH * LEVEL_SIZE, LEVEL_SIZE)
    return tuple(np.arange(start, start + LEVEL_SIZE, dtype=np.int32) for start in starts)


@functools.partial(jax.jit, static_argnames=("cfg", "width"))
def search_without_tree(
    weights: DecoderParams,
    tokens_of: tuple[jax.Array, ...],
    heads: tuple[jax.Array, ...],
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    cfg: DecoderConfig,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """Beam search in which every token of a level may follow: sequences [B, W, depth] int32, best first, and scores.

    tokens_of: the tokens of each level [V]; heads: for each level its rows of the output head [V, D].
    """
    batch = tokens.shape[0]
    hidden, state = decoder.begin(weights, cfg, tokens, lengths)
    scores = jnp.zeros((batch, 1), jnp.float32)
    sequences = jnp.zeros((batch, 0, 1), jnp.int32)
    ancestors = jnp.zeros((batch, 0, 1), jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    for level, (names, head) in enumerate(zip(tokens_of, heads, strict=True)):
        if level > 0:
            ancestors = jnp.concatenate([ancestors, rows[:, None]], axis=1)
            hidden, state = decoder.advance(weights, cfg, sequences[:, -1], state, ancestors)
        logits = jnp.einsum("bwd,vd->bwv", hidden, head, preferred_element_type=jnp.float32)
        scores, at = select.best_tokens(logits, scores, width)
        parents, chosen = at // len(names), names[at % len(names)]
        sequences = jnp.take_along_axis(sequences, parents[:, None], axis=2)
        sequences = jnp.concatenate([sequences, chosen[:, None]], axis=1)
        ancestors = jnp.take_along_axis(ancestors, parents[:, None], axis=2)
    return sequences.transpose(0, 2, 1), scores


class Free:
    """The searches without a tree, compiled for each width; they know of no catalog."""

    def __init__(self, weights: DecoderParams, widths: Sequence[int]) -> None:
        self._weights = weights
        self._tokens = tuple(map(jnp.asarray, level_tokens()))
        self._heads = tuple(weights.output_rows[tokens] for tokens in self._tokens)
        prompt = np.zeros((1, PROMPT), np.int32), np.ones(1, np.int32)
        self._level = {
            width: search_without_tree.lower(
                weights, self._tokens, self._heads, *prompt, cfg=MODEL, width=width
            ).compile()
            for width in widths
        }
        self._whole = {
            width: unconstrained.search.lower(weights, *prompt, cfg=MODEL, depth=DEPTH, width=width).compile()
            for width in widths
        }

    def off(self, prompt: Int32, width: int) -> list[list[int]]:
        lengths = np.array([PROMPT], np.int32)
        out = self._level[width](self._weights, self._tokens, self._heads, prompt[None], lengths)
        return _listed(out)

    def all_tokens(self, prompt: Int32, width: int) -> list[list[int]]:
        return _listed(self._whole[width](self._weights, prompt[None], np.array([PROMPT], np.int32)))


def _listed(out: tuple[jax.Array, jax.Array]) -> list[list[int]]:
    sequences, scores = (np.asarray(x) for x in out)
    assert np.isfinite(scores).all()
    found: list[list[int]] = sequences[0].tolist()
    return found


class Constrained:
    """The engine's executor over one catalog, warm."""

    def __init__(self, weights: DecoderParams, items: Items, widths: Sequence[int]) -> None:
        self._ids = items.ids
        self.tree = PrefixTree.build(items.codes)
        start = time.perf_counter()
        self.tables = beam.catalog_tables(self.tree, level_tokens(), weights, growing=True)
        jax.block_until_ready(self.tables)
        self.place_s = time.perf_counter() - start
        profiles = tuple(Profile("recommend", 1, PROMPT, width) for width in widths)
        self._executor = RowExecutor(MODEL, weights, self.tables, profiles, "valid")
        self._executor.warm_up(lambda done, total, label: harness.note(f"compiled {label}"))

    def on(self, prompt: Int32, width: int) -> list[str]:
        profile = Profile("recommend", 1, PROMPT, width)
        (outcome,) = self._executor.run(profile, [RecommendWork(prompt, width)])
        assert isinstance(outcome, RecommendOutcome)
        rows = self.tree.leaf_rows[self.tree.leaf_offsets[outcome.leaves]]
        return [self._ids[row] for row in rows.tolist()]

    @property
    def device_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.tables))

    @property
    def host_bytes(self) -> int:
        tree = self.tree
        arrays = (*tree.offsets, *tree.codes, tree.paths, tree.leaf_of_row, tree.leaf_offsets, tree.leaf_rows)
        return sum(x.nbytes for x in arrays)


def measure(quick: bool, quiet: Quiet) -> Measured:
    sizes, widths, rounds = (QUICK_SIZES, QUICK_WIDTHS, QUICK_ROUNDS) if quick else (SIZES, WIDTHS, ROUNDS)
    drawn: DecoderParams = params.initialize(decoder.spec(MODEL), jax.random.key(0))
    weights = DecoderParams(drawn.embed, drawn.layers, drawn.norm, LOGIT_SCALE * drawn.head)
    free = Free(weights, widths)
    prompt = np.random.default_rng(1).integers(FIRST_TOKEN, FIRST_TOKEN + DEPTH * LEVEL_SIZE, PROMPT)
    rows: list[Row] = []
    for kind, n in [("zipf", n) for n in sizes] + [("one_prefix", sizes[-1])]:
        items = make_items(kind, n)
        constrained = Constrained(weights, items, widths)
        about = {
            "catalog": kind,
            "items": n,
            "max_degrees": list(constrained.tree.max_degrees),
            "device_bytes": constrained.device_bytes,
            "host_bytes_of_the_tree": constrained.host_bytes,
            "place_s": harness.rounded(constrained.place_s, 3),
        }
        runs = variants(constrained, free, prompt.astype(np.int32), widths)
        times = harness.interleave(runs, rounds, quiet)
        rows += [{**about, "beam_width": width, **make_row(times, width)} for width in widths]
        if (kind, n) == ("zipf", sizes[-1]):
            del constrained
            rows.append(build_row(items))
    return Measured(claims(rows), rows)


def variants(
    constrained: Constrained, free: Free, prompt: Int32, widths: Sequence[int]
) -> dict[str, Callable[[], float]]:
    """The calls to compare, named "<side> <width>"; each gives the ms of a request."""
    sides = {"on": constrained.on, "off": free.off, "all_tokens": free.all_tokens}

    def ms(search: Callable[[Int32, int], Any], width: int) -> float:
        took, answers = harness.timed(functools.partial(search, prompt, width), AT_LEAST_S)
        assert len(answers) == width
        return took

    return {
        f"{side} {width}": functools.partial(ms, search, width)
        for width in widths
        for side, search in sides.items()
    }


def make_row(times: Mapping[str, Sequence[float]], width: int) -> Row:
    spreads = {
        name.split()[0]: harness.spread(ms) for name, ms in times.items() if name.split()[1] == str(width)
    }
    ratio = spreads["on"]["median"] / spreads["off"]["median"]
    return {"time_ms": spreads, "on_over_off": harness.rounded(ratio, 3)}


def build_row(items: Items) -> Row:
    """The catalog as a file, and what a process of its own needs to load it and to build its tree."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.catalog"
        start = time.perf_counter()
        tokens, levels = level_tokens(), []
        codes = np.empty_like(items.codes)
        for level in range(DEPTH):
            used, codes[:, level] = np.unique(items.codes[:, level], return_inverse=True)
            levels.append(tokens[level][used].tolist())
        save_catalog(Catalog.of_arrays(items.ids.table, codes, levels), path)
        write_s = time.perf_counter() - start
        file_bytes = sum(file.stat().st_size for file in path.iterdir())
        command = [sys.executable, "-c", INSPECT, f"--catalog={path}"]
        done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=True)
    return {
        "build": json.loads(done.stdout.splitlines()[-1]),
        "write_s": harness.rounded(write_s, 3),
        "file_bytes": file_bytes,
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Claims, each on the worst row."""
    timed = [row for row in rows if "on_over_off" in row]
    (built,) = (row["build"] for row in rows if "build" in row)
    found = []
    for kind, words in (("zipf", "at-every-catalog-size"), ("one_prefix", "one-prefix-with-all-children")):
        worst = max(row["on_over_off"] for row in timed if row["catalog"] == kind)
        found.append(Claim(f"time-constrained-over-unconstrained-{words}", worst, "x", "lower", TARGET))
    million = built["items"] / 1e6
    seconds = harness.rounded(built["load_s"] + built["tree_s"], 3)
    return [*found, Claim(f"load-and-tree-of-{million:g}-million-items", seconds, "s", "lower", 30.0)]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time with and without the tree over the catalog's size, a line each for every beam width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    points = [row for row in rows if row.get("catalog") == "zipf"]
    for width in sorted({row["beam_width"] for row in points}):
        line = [row for row in points if row["beam_width"] == width]
        sizes = [row["items"] for row in line]
        for side, style in (("on", "o-"), ("off", "x:")):
            times = [row["time_ms"][side]["median"] for row in line]
            axes.plot(sizes, times, style, label=f"beam {width}, constraint {side}")
    axes.set(xscale="log", xlabel="items in the catalog", ylabel="ms for one request", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="catalog_scaling",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), harness.ROOT / "benchmarks" / "peers" / "workload.py"),
            plot=plot,
            device=jax.default_backend(),
        )
    )
