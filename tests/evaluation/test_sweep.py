# SPDX-License-Identifier: Apache-2.0
"""What a sweep measures for each value, and which fields it takes; no engine is needed for either."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jgr.config import Config, ConfigError, UserError, override
from jgr.data.interactions import Examples, Ragged
from jgr.evaluation.plots import plot_sweep
from jgr.evaluation.served import EvaluationError, Query
from jgr.evaluation.sweep import check_remote, measure, parse_sweep

CONFIG = override(Config(), "beam.width=16", "profiles.widths=16,64")


def test_beam_widths_share_an_engine_with_a_profile_each() -> None:
    sweep = parse_sweep(" beam.width = 64,8, 16,8", CONFIG)
    ((config, widths),) = sweep.engines
    assert sweep.field == "beam.width"
    assert widths == {"64": 64, "8": 8, "16": 16}
    assert (config.beam.width, config.profiles.widths) == (64, (8, 16, 64))
    assert config.profiles.candidates == (1,)


def test_any_other_field_has_an_engine_for_each_value() -> None:
    sweep = parse_sweep("profiles.batch=1;1,8", CONFIG)
    assert [(config.profiles.batch, widths) for config, widths in sweep.engines] == [
        ((1,), {"1": 16}),
        ((1, 8), {"1,8": 16}),
    ]
    sweep = parse_sweep("beam.normalize=valid,full", CONFIG)
    assert [config.beam.normalize for config, _ in sweep.engines] == ["valid", "full"]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (
            "beam.with=8",
            ConfigError,
            "no field 'beam.with' in the configuration; the nearest is 'beam.width'",
        ),
        ("width", ConfigError, "no field 'width'"),
        ("beam.width", ConfigError, "beam.width must be an integer, not ''"),
        ("beam.width=8,x", ConfigError, "beam.width must be an integer, not 'x'"),
        ("beam.width=0", ConfigError, "beam.width must be at least 1"),
        ("train.steps=1", EvaluationError, "train.steps cannot be swept"),
        ("profiles.candidates=1", EvaluationError, "profiles.candidates cannot be swept"),
    ],
)
def test_what_cannot_be_swept_is_named(text: str, error: type[UserError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        parse_sweep(text, CONFIG)


class Recorder:
    """Answers every query with rows that tell its beam width; notes who asked for what."""

    in_flight = 1
    info: Any = SimpleNamespace(max_beam_width=8)

    def __init__(self) -> None:
        self.timed: list[tuple[int, int]] = []

    def recommend_all(
        self, examples: Examples, query: Query, on_answer: Callable[[], None] = lambda: None
    ) -> np.ndarray:
        for _ in range(len(examples)):
            on_answer()
        return np.full((len(examples), query.top_k), query.beam_width, np.int32)

    def latencies_s(self, examples: Examples, queries: Sequence[Query]) -> list[list[float]]:
        self.timed += [(int(row), query.beam_width or 0) for row in examples.targets for query in queries]
        return [[(query.beam_width or 0) / 1e3] * len(examples) for query in queries]


def test_every_value_meets_the_same_requests() -> None:
    examples = Examples(Ragged.of([[0]] * 3), np.arange(3, dtype=np.int32), np.zeros(3, np.int32))
    recorder, answers = Recorder(), []
    queries = {"two": Query(2, 2), "four": Query(3, 4)}
    found = measure(recorder, examples, queries, requests=25, on_answer=lambda: answers.append(1))
    assert {name: point.beam_width for name, point in found.items()} == {"two": 2, "four": 4}
    assert found["four"].ranked.tolist() == [[4, 4, 4]] * 3
    assert found["two"].latency_ms == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    assert found["two"].requests_per_s > 0
    assert len(answers) == 6
    assert len(recorder.timed) == 2 * (10 + 25)  # those that warm up, and those that count
    rows = {width: [row for row, asked in recorder.timed if asked == width] for width in (2, 4)}
    assert rows[2] == rows[4]


def test_a_server_must_hold_the_widths() -> None:
    check_remote(parse_sweep("beam.width=4,8", CONFIG), Recorder())
    with pytest.raises(EvaluationError, match=r"largest beam width is 8, not 16; .*profiles\.widths"):
        check_remote(parse_sweep("beam.width=4,16", CONFIG), Recorder())
    with pytest.raises(EvaluationError, match=r"profiles\.batch is fixed; with --url, sweep beam\.width"):
        check_remote(parse_sweep("profiles.batch=4", CONFIG), Recorder())


@pytest.mark.parametrize("intervals", [{}, {"hr@5": (0.4, 0.6), "ndcg@5": (0.2, 0.3)}])
def test_the_curve_is_a_png(tmp_path: Path, intervals: dict[str, tuple[float, float]]) -> None:
    points = [
        {
            "value": str(width),
            "metrics": {"hr@5": 0.5, "ndcg@5": 0.25},
            "intervals": intervals,
            "latency_ms": {"p50": width / 10, "p99": width / 5},
        }
        for width in (8, 16)
    ]
    plot_sweep("beam.width", points, 5, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(EvaluationError, match=r"nowhere/curve\.png: cannot be written"):
        plot_sweep("beam.width", points, 5, tmp_path / "nowhere" / "curve.png")
