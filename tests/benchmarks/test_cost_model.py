# SPDX-License-Identifier: Apache-2.0
"""The benchmark of cost models: what it claims of times that are known, and that its shapes can be compiled."""

from __future__ import annotations

import itertools
from typing import Any, cast

import jax
import numpy as np
import pytest

from benchmarks import cost_model
from benchmarks.bat_nodes import BOOKS, ITEM_TOKENS, speed_row
from benchmarks.cost_model import LAZY
from jgr.catalog.prefix_tree import PrefixTree
from jgr.evaluation.machine import CpuTimes, Quiet
from jgr.models import params
from jgr.models.beam import catalog_tables
from jgr.models.costs import Cost
from jgr.models.generator_costs import Level
from jgr.models.generators import generator
from jgr.serving.decoders import cost_grid
from jgr.serving.engine.cost_profile import Timed


class Still:
    """A machine that was disturbed a number of times."""

    def __init__(self, disturbed: int) -> None:
        self.disturbed, self.waits = disturbed, 0

    def wait(self) -> CpuTimes:
        self.waits += 1
        return CpuTimes(0, 0, 0)

    def was_quiet_since(self, start: CpuTimes) -> bool:
        self.disturbed -= 1
        return self.disturbed < 0


def timed(kind: str, error: float) -> list[Timed]:
    sizes = itertools.product((1, 2, 4, 8), (1, 3, 9))
    return [
        Timed(
            kind, f"{x}x{y}", Cost(x * 10**9, y * 10**9), 1, (x + 2 * y) * (1 + error * (-1) ** n), 0.01, 1e-4
        )
        for n, (x, y) in enumerate(sizes)
    ]


def test_what_is_claimed_is_the_worst_kinds_error() -> None:
    row = cost_model.row("hstu", [*timed("user", 0.0), *timed("part", 0.2)])
    (claim,) = cost_model.claims([row])
    assert row["kinds"]["user"]["held_out"]["mean"] < 1e-6
    assert claim.id == "cost-model-hstu-held-out-error" and not claim.holds
    assert claim.value == pytest.approx(100 * row["kinds"]["part"]["held_out"]["mean"], rel=1e-2)
    assert 15 < claim.value < 40
    assert cost_model.claims([cost_model.row("stu", timed("user", 0.05))])[0].holds


def test_times_of_a_disturbed_machine_are_taken_again() -> None:
    quiet = Still(disturbed=2)
    assert cost_model.time_quietly([], cast(Quiet, quiet), rounds=1) == []
    assert quiet.waits == 3


def test_the_grids_shapes_are_within_the_largest_and_bounded() -> None:
    for profiles in (cost_model.ROWS, cost_model.PACKED):
        found = cost_grid.grid(profiles, cost_model.PROGRAMS)
        for largest in profiles:
            own = [profile for profile in found if profile.kind == largest.kind]
            assert largest in own and 4 <= len(own) <= cost_model.PROGRAMS
            for size in ("batch", "tokens", "width", "context"):
                assert max(getattr(profile, size) for profile in own) == getattr(largest, size)


def test_a_catalogs_levels_count_its_nodes() -> None:
    weights: Any = params.initialize(generator(LAZY).spec(LAZY), jax.random.key(0))
    codes = np.array([[0, 1, 2], [0, 1, 3], [0, 2, 0], [5, 1, 1]], np.int32)
    tokens = tuple(np.arange(256, dtype=np.int32) + 256 * level for level in range(3))
    tables = catalog_tables(PrefixTree.build(codes), tokens, weights, growing=True)
    assert cost_grid.levels(tables) == (Level(256, 1, 2, 2), Level(256, 2, 3, 2), Level(256, 3, 4, 2))


def test_the_nodes_speed_is_that_of_the_fitted_polynomial() -> None:
    def seconds(new: float, cached: float) -> float:
        return 2e-3 + 1e-5 * new + 3e-9 * new**2 + 2e-9 * new * cached

    grid = itertools.product((1, 64, 256, 1024, 4096), (0, 128, 1500))
    row = speed_row([(new, cached, seconds(new, cached)) for new, cached in grid])
    assert row["prefill_cost"]["coefficients"] == pytest.approx([2e-3, 1e-5, 3e-9, 2e-9], rel=1e-3)
    assert row["prefill_cost"]["points"] == 15
    tokens = BOOKS.user_tokens
    assert row["tokens_per_s"] == pytest.approx(tokens / seconds(tokens, ITEM_TOKENS), rel=1e-3)
