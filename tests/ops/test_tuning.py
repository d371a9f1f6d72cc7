# SPDX-License-Identifier: Apache-2.0
"""Decision trees for configurations: what they choose, when they do not, and what trusting one costs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.ops import tuning
from jgr.ops.beam_attention import config as beam_config
from jgr.ops.segment_attention import Causal, segment_attention, xla
from jgr.ops.tuning import Tree
from tools import tune

# Small blocks win up to 100 tokens, large ones above. Features: tokens, then the block.
TREE = Tree(
    low=(10.0,),
    high=(1000.0,),
    feature=(0, 1, 1, -1, -1, -1, -1),
    threshold=(100.0, 64.0, 64.0, 0.0, 0.0, 0.0, 0.0),
    left=(1, 3, 5, 0, 0, 0, 0),
    right=(2, 4, 6, 0, 0, 0, 0),
    value=(0.0, 0.0, 0.0, -1.0, 1.0, 1.0, -1.0),
)
BLOCKS = [xla.Blocks(n) for n in (32, 64, 128, 256)]


@pytest.mark.parametrize(("tokens", "best"), [(10, 32), (100, 32), (101, 128), (1000, 128)])
def test_the_least_prediction_wins_and_the_first_of_equals(tokens: int, best: int) -> None:
    assert tuning.best(TREE, (tokens,), BLOCKS, xla.Blocks(1)) == xla.Blocks(best)


@pytest.mark.parametrize("shape", [(9,), (1001,), (50, 50)])
def test_outside_of_what_was_measured_the_heuristic_decides(shape: tuple[int, ...]) -> None:
    assert tuning.best(TREE, shape, BLOCKS, xla.Blocks(1)) == xla.Blocks(1)


@pytest.mark.parametrize(
    "bad",
    [{"left": (0, 3, 5, 0, 0, 0, 0)}, {"right": (2, 4, 7, 0, 0, 0, 0)}, {"value": (1.0,)}, {"high": ()}],
)
def test_a_tree_that_does_not_end_is_refused(bad: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"of a tree|in length"):
        Tree(**{**vars(TREE), **bad})  # type: ignore[arg-type]


def test_an_op_runs_with_what_the_file_of_its_device_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, block = len(xla.Shape._fields), 1  # which of xla.features are the tokens of a block
    text = {"low": [0] * numbers, "high": [9999] * numbers, "feature": [block, -1, -1]}
    text |= {"threshold": [40, 0, 0], "left": [1, 0, 0], "right": [2, 0, 0], "value": [0, 1, -1]}
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "target_device", lambda: "some-device")
    chosen: list[int] = []
    causal_pairs = xla.causal_pairs

    def noted(blocks: int) -> xla.Pairs:
        chosen.append(blocks)
        return causal_pairs(blocks)

    monkeypatch.setattr(xla, "causal_pairs", noted)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 256, 2, 16), np.float32))
    k = jnp.swapaxes(q, 1, 2)

    def attended() -> jax.Array:
        """By a program that is traced anew."""
        found: jax.Array = jax.jit(lambda *x: segment_attention(*x, Causal(jnp.array([256]))))(q, k, k)
        return found

    tuning.load.cache_clear()
    without = attended()
    (tmp_path / "segment_attention.some-device.json").write_text(json.dumps({"tree": text}))
    tuning.load.cache_clear()
    with_file = attended()
    tuning.load.cache_clear()
    assert chosen == [1, 4]  # the heuristic's block of 256, then the first above the threshold: 64
    np.testing.assert_allclose(with_file, without, atol=1e-5)


def test_the_heuristic_keeps_a_turns_scores_in_the_caches() -> None:
    shape = xla.Shape(8, 4, 2, 459, 459, 32, 4, 1)
    assert xla.features(shape, xla.Blocks(256)) == (64 * 230 * 230 * 4, 230, 2)
    assert xla.heuristic(shape) == xla.Blocks(192)
    assert xla.heuristic(shape._replace(batch=1)) == xla.Blocks(512)


def test_every_candidate_is_possible_and_the_heuristics_is_one() -> None:
    rng = np.random.default_rng(1)
    for tunable in tune.TUNABLES.values():
        for _ in range(20):
            shape, _ = tunable.draw(rng)
            candidates = tunable.candidates(shape)
            assert tunable.heuristic(shape) in candidates
            assert len(set(candidates)) == len(candidates)
    tiny = xla.Shape(1, 1, 1, 3, 3, 16, 4, 1)
    assert xla.heuristic(tiny) == xla.candidates(tiny)[-1] == xla.Blocks(32)
    assert beam_config.Config() in beam_config.candidates(beam_config.Shape(1, 8, 256, 1024, 128, 2))


def test_a_sweep_times_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "seconds_per_call", lambda run, at_least_s: float(run().size))
    found = tune.sweep("segment_attention", shapes=1)
    (row,) = found["rows"]
    shape = xla.Shape(*row["shape"])
    assert [xla.Blocks(*c) for c, _ in row["seconds"]] == xla.candidates(shape)
    queries = shape.batch * shape.queries * shape.kv_heads * shape.rows * shape.dim
    assert all(times == [queries] * 2 for _, times in row["seconds"])  # every call gave its answer


def test_regret_is_the_time_lost_against_the_fastest_candidate() -> None:
    shape = xla.Shape(1, 2, 1, 100, 100, 32, 4, 1)
    # Of 100 tokens: the heuristic takes 128, this tree always 32. Only the first round says that 64 is the fastest.
    times = {32: [9.0, 3.0], 64: [1.0, 2.0], 96: [4.0, 1.9], 128: [9.0, 2.5]}
    rows = [{"shape": list(shape), "seconds": [[[size], both] for size, both in times.items()]}]
    leaf = Tree(tuple(shape), tuple(shape), (-1,), (0.0,), (0,), (0,), (0.0,))
    lost = tune.regrets({"op": "segment_attention", "rows": rows}, leaf)
    assert lost == {"tree": tune.Regret(0.5, 0.5), "heuristic": tune.Regret(0.25, 0.25)}
