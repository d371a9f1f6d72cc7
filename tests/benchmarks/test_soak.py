# SPDX-License-Identifier: Apache-2.0
"""What the long runs compute: slopes of known lines, rows that are left, schemas that values miss, damage."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hostile_requests import Document, mutated
from benchmarks.hostile_world import apart, damaged
from benchmarks.soak import slope, thinned

PART = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
DOCUMENT = Document({"paths": {}, "components": {"schemas": {"Part": PART}}})
SCHEMA = {
    "type": "object",
    "required": ["parts"],
    "properties": {
        "parts": {"type": "array", "maxItems": 2, "items": {"$ref": "#/components/schemas/Part"}},
        "name": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "kind": {"enum": ["a", "b"]},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    },
}


def test_the_slope_is_that_of_the_line_after_the_warm_up() -> None:
    rng = np.random.default_rng(0)
    times = np.arange(0.0, 3600.0, 10.0)
    sizes = 1000 * (1 + 0.02 * (times - 600) / 3600) + rng.normal(0, 0.5, len(times))
    sizes[times < 600] *= 0.5
    series = [{"at_s": at, "rss": size} for at, size in zip(times, sizes, strict=True)]
    found = slope(series, "rss")
    assert found is not None and found.per_hour == pytest.approx(2.0, abs=0.1)
    assert found.low < 2.0 < found.high and found.high - found.low < 0.2
    assert slope(series[:70], "rss") is None


def test_thinned_rows_are_as_many_as_wanted_with_both_ends() -> None:
    series = [{"at_s": float(at)} for at in range(1000)]
    few = thinned(series, 7)
    assert (len(few), few[0], few[-1]) == (7, series[0], series[-1])
    assert thinned(series[:5], 7) == series[:5]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"parts": []}, 0),
        ({"parts": [{"n": 1}], "name": None, "kind": "b", "share": 1}, 0),
        ({}, 1),
        ({"parts": [{"n": 1}] * 3}, 1),
        ({"parts": [{"n": 1.5}, {}]}, 2),
        ({"parts": [{"n": True}]}, 1),
        ({"parts": [], "name": "long"}, 1),
        ({"parts": [], "kind": "c", "share": 0}, 2),
        ({"parts": [], "other": 1}, 1),
        ([], 1),
    ],
)
def test_misfits_are_found(value: object, wrong: int) -> None:
    assert len(DOCUMENT.misfits(value, SCHEMA)) == wrong


def test_drawn_values_meet_their_schema_and_most_mutated_ones_do_not() -> None:
    rng = random.Random(0)
    drawn = [DOCUMENT.drawn(SCHEMA, rng) for _ in range(200)]
    assert all(DOCUMENT.misfits(value, SCHEMA) == [] for value in drawn)
    assert sum(DOCUMENT.misfits(mutated(value, rng), SCHEMA) != [] for value in drawn) > 100


def test_scores_are_apart_by_their_largest_difference_or_by_their_items() -> None:
    assert apart({"a": 1.0, "b": 2.0}, {"b": 2.5, "a": 1.0}) == 0.5
    assert apart({"a": 1.0}, {"b": 1.0}) == float("inf")
    assert apart({}, {}) == 0.0


def test_damage_changes_one_file_and_a_seed_always_the_same(tmp_path: Path) -> None:
    def after(seed: int) -> dict[str, bytes]:
        folder = tmp_path / f"{seed} {len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        whole = {
            "config.json": b'{"a": 1, "b": [1, 2]}',
            "catalog.jsonl": b'{"item_id": "x"}\n{"item_id": "y"}',
        }
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        (folder / "weights.bin").write_bytes(b"w")
        path = damaged(folder, random.Random(seed))
        left = {p.name: p.read_bytes() for p in folder.iterdir()}
        assert left.pop("weights.bin") == b"w"
        assert all(left[name] == data for name, data in whole.items() if name != path.name)
        return left

    assert after(3) == after(3)
    assert len({str(after(seed)) for seed in range(20)}) > 8
