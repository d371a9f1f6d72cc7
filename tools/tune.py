# SPDX-License-Identifier: Apache-2.0
"""Makes the decision trees by which ops choose their configuration (XGR-6; see jgr.ops.tuning).

    python -m tools.tune sweep segment_attention sweep.json    on the device; needs jax only
    python -m tools.tune fit sweep.json                        anywhere; needs scikit-learn

A sweep draws shapes from a seed, log-spaced, and times every candidate of each shape in two rounds. The tree is fitted
on three quarters of the shapes. The other shapes show what it costs to trust the tree: its regret is the time of the
candidate that it chooses, over the time of the fastest candidate, minus one. The first round says which candidate is
the fastest, the second how long both take; one round for both would count noise as regret. The tree, its regret and the
heuristic's go to jgr/ops/tuned. A tree that does not beat the heuristic there is not worth keeping.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.ops import segment_attention, tuning
from jgr.ops.beam_attention import config as beam_config
from jgr.ops.beam_attention import pallas_triton as beam_kernel
from jgr.ops.beam_attention.arguments import Arguments as BeamArguments
from jgr.ops.beam_attention.cases import OP as BEAM_ATTENTION
from jgr.ops.roofline import seconds_per_call
from jgr.ops.segment_attention import xla as segment_xla
from jgr.ops.segment_attention.cases import OP as SEGMENT_ATTENTION
from jgr.ops.segment_attention.cases import causal
from jgr.ops.testing import Case

SHAPES = 120
HELD_OUT = 4
"""One of this many shapes is held out: the tree is not fitted on it."""
DEPTH = 8
SEED = 20
ROUNDS = 2
AT_LEAST_S = 0.03
FAR = 0.7
"""The most log(seconds) above the best that the tree is fitted on."""


class Tunable(NamedTuple):
    """An op to tune. draw: draws a shape and its case. call: the op with a configuration, as a function of arrays."""

    shape: type[Any]
    draw: Callable[[np.random.Generator], tuple[Any, Case]]
    op: Any
    candidates: Callable[[Any], Sequence[Any]]
    heuristic: Callable[[Any], Any]
    call: Callable[[Any], Callable[..., jax.Array]]
    features: Callable[[Any, Any], Sequence[float]] = tuning.plain_features


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _draw_segment_attention(rng: np.random.Generator) -> tuple[segment_xla.Shape, Case]:
    batch, tokens = int(rng.choice([1, 2, 4, 8])), _between(rng, 32, 2048)
    kv_heads, rows, dim = (
        int(rng.choice([2, 4, 8])),
        int(rng.choice([1, 2, 4])),
        int(rng.choice([32, 64, 128])),
    )
    case = Case("drawn", dict(**causal(*[tokens] * batch), heads=kv_heads * rows, kv_heads=kv_heads, dim=dim))
    return segment_xla.Shape(batch, kv_heads, rows, tokens, tokens, dim, 4, 1), case


def _draw_beam_attention(rng: np.random.Generator) -> tuple[beam_config.Shape, Case]:
    batch, tokens, width = int(rng.choice([1, 2, 4, 8])), _between(rng, 128, 6000), _between(rng, 32, 512)
    kv_heads, groups = int(rng.choice([2, 4, 8])), int(rng.choice([1, 2, 4]))
    dim = int(rng.choice([64, 128]))
    case = Case(
        "drawn",
        dict(
            tokens=tokens,
            lengths=(tokens,) * batch,
            width=width,
            slots=2,
            heads=kv_heads * groups,
            kv_heads=kv_heads,
            dim=dim,
        ),
    )
    return beam_config.Shape(batch, kv_heads, width * groups, tokens, dim, 2), case


def _segment_call(blocks: segment_xla.Blocks) -> Callable[..., jax.Array]:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        tokens = segment_attention.Causal(lengths)
        return segment_xla.run(segment_attention.Arguments(q, k, v, tokens), blocks)

    return call


def _beam_call(config: beam_config.Config) -> Callable[..., jax.Array]:
    return lambda **arrays: beam_kernel.run(BeamArguments(**arrays), config)


TUNABLES: Mapping[str, Tunable] = {
    "segment_attention": Tunable(
        segment_xla.Shape,
        _draw_segment_attention,
        SEGMENT_ATTENTION,
        segment_xla.candidates,
        segment_xla.heuristic,
        _segment_call,
        segment_xla.features,
    ),
    "beam_attention": Tunable(
        beam_config.Shape,
        _draw_beam_attention,
        BEAM_ATTENTION,
        beam_config.candidates,
        beam_config.heuristic,
        _beam_call,
    ),
}
DTYPES = {"segment_attention": jnp.float32, "beam_attention": jnp.bfloat16}


def sweep(name: str, shapes: int = SHAPES) -> dict[str, Any]:
    """The seconds of every candidate for each of `shapes` shapes; can be written as JSON."""
    tunable, rng, rows = TUNABLES[name], np.random.default_rng(SEED), []
    for number in range(shapes):
        shape, case = tunable.draw(rng)
        arrays = tunable.op.draw(case, DTYPES[name])
        candidates = tunable.candidates(shape)
        runs = [functools.partial(jax.jit(tunable.call(candidate)), **arrays) for candidate in candidates]
        rounds = [[seconds_per_call(run, AT_LEAST_S) for run in runs] for _ in range(ROUNDS)]
        seconds = [
            [list(astuple(candidate)), times] for candidate, *times in zip(candidates, *rounds, strict=True)
        ]
        rows.append({"shape": list(shape), "seconds": seconds})
        print(f"{number + 1} of {shapes}: {shape}", file=sys.stderr)
    return {"op": name, "device": tuning.target_device(), "jax": jax.__version__, "seed": SEED, "rows": rows}


@dataclass(frozen=True)
class Regret:
    """The mean and the largest time lost over the held-out shapes, as shares of the fastest candidate's time."""

    mean: float
    largest: float


def split(rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split a sweep into the shapes to fit on and those held out."""
    return [r for i, r in enumerate(rows) if i % HELD_OUT], list(rows[::HELD_OUT])


def regret(rows: Sequence[Any], pick: Callable[[Sequence[int]], tuple[Any, ...]]) -> Regret:
    """The regret of a choice. pick: chooses a candidate for a shape; both are tuples."""
    lost = []
    for row in rows:
        seconds = {tuple(candidate): times for candidate, times in row["seconds"]}
        fastest = min(seconds, key=lambda candidate: seconds[candidate][0])
        lost.append(seconds[pick(row["shape"])][1] / seconds[fastest][1] - 1)
    return Regret(sum(lost) / len(lost), max(lost))


def regrets(found: Mapping[str, Any], tree: tuning.Tree) -> dict[str, Regret]:
    """The regrets of the tree and of the heuristic over the held-out shapes of a sweep."""
    tunable = TUNABLES[found["op"]]
    _, held_out = split(found["rows"])

    def heuristics(row: Sequence[int]) -> tuple[Any, ...]:
        return astuple(tunable.heuristic(tunable.shape(*row)))

    def trees(row: Sequence[int]) -> tuple[Any, ...]:
        shape = tunable.shape(*row)
        return astuple(
            tuning.best(tree, shape, tunable.candidates(shape), tunable.heuristic(shape), tunable.features)
        )

    return {"tree": regret(held_out, trees), "heuristic": regret(held_out, heuristics)}


def fit(found: Mapping[str, Any]) -> tuning.Tree:
    """Fit a tree that predicts log(seconds) above the shape's best candidate; what all of them share decides nothing.

    What is above `FAR` counts as `FAR`: that a candidate is bad matters, not how bad it is.
    """
    from sklearn.tree import DecisionTreeRegressor

    rows, _ = split(found["rows"])
    tunable = TUNABLES[found["op"]]
    features, target = [], []
    for row in rows:
        shape, logs = tunable.shape(*row["shape"]), [math.log(sum(times)) for _, times in row["seconds"]]
        by_key = {astuple(candidate): candidate for candidate in tunable.candidates(shape)}
        features += [list(tunable.features(shape, by_key[tuple(key)])) for key, _ in row["seconds"]]
        target += [min(x - min(logs), FAR) for x in logs]
    tree = (
        DecisionTreeRegressor(max_depth=DEPTH, min_samples_leaf=3, random_state=0).fit(features, target).tree_
    )
    shapes = np.array([row["shape"] for row in rows])
    return tuning.Tree(
        low=tuple(shapes.min(axis=0).tolist()),
        high=tuple(shapes.max(axis=0).tolist()),
        feature=tuple(max(-1, f) for f in tree.feature.tolist()),
        threshold=tuple(tree.threshold.tolist()),
        left=tuple(tree.children_left.tolist()),
        right=tuple(tree.children_right.tolist()),
        value=tuple(round(v, 4) for v in tree.value.ravel().tolist()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Decision trees for kernel configurations.")
    commands = parser.add_subparsers(dest="command", required=True)
    sweeping = commands.add_parser("sweep", help="time every candidate of an op on this device")
    sweeping.add_argument("op", choices=sorted(TUNABLES))
    sweeping.add_argument("--shapes", type=int, default=SHAPES)
    sweeping.add_argument("file", type=Path)
    fitting = commands.add_parser("fit", help="fit a tree to a sweep and store it")
    fitting.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "sweep":
        given.file.write_text(json.dumps(sweep(given.op, given.shapes)))
        return 0
    found = json.loads(given.file.read_text())
    tree = fit(found)
    lost = regrets(found, tree)
    path = tuning.FOLDER / f"{found['op']}.{found['device']}.json"
    report = {name: vars(value) for name, value in lost.items()}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"regret_on_held_out_shapes": report, "tree": vars(tree)}) + "\n")
    print(json.dumps({"tree": str(path), **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
