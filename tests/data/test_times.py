# SPDX-License-Identifier: Apache-2.0
"""Times of a prepared dataset: seconds whatever the source counts, beside histories, targets and what is learnt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jgr.config import ConfigError, TrainConfig
from jgr.data.interactions import DataError, Examples, Ragged, leave_one_out
from jgr.data.prepared import Arrays
from jgr.data.sources.movielens import SOURCES
from jgr.data.sources.records import Raw
from jgr.training.retriever import training_sequences

ROWS = [[4, 2, 0, 1], [3, 0, 2]]
SECONDS = [[978300019, 978300055, 978300060, 978390000], [978300001, 978300001, 978400000]]


def arrays(unit: int) -> Arrays:
    made = Arrays.of(leave_one_out(ROWS))
    return dataclasses.replace(made, times=np.concatenate(SECONDS) * unit)


@pytest.mark.parametrize("unit", [1, 1000])
def test_histories_and_targets_have_seconds(unit: int) -> None:
    found = arrays(unit).interactions(("a", "b"))
    for user, seconds in enumerate(SECONDS):
        assert found.sequences.times_of(user).tolist() == seconds[:-2]
        for split, held in ((found.valid, 2), (found.test, 1)):
            assert split.histories.times_of(user).tolist() == seconds[:-held]
            assert split.target_times is not None and split.target_times[user] == seconds[-held]
    chosen = found.test.select(np.array([1]))
    assert chosen.target_times is not None and chosen.target_times.tolist() == [978400000]
    assert chosen.histories.times_of(0).tolist() == SECONDS[1][:-1]
    with pytest.raises(DataError, match="has no times"):
        Ragged.of(ROWS).times_of(0)


def test_validation_targets_are_learnt_from_where_asked() -> None:
    found = arrays(1).interactions(("a", "b"))
    for learn_valid, held in ((False, 2), (True, 1)):
        sequences = training_sequences(found, learn_valid)
        assert [sequence.tolist() for sequence in sequences] == [rows[:-held] for rows in ROWS]
        assert sequences.times_of(0).tolist() == SECONDS[0][:-held]
    with pytest.raises(ConfigError, match="leaves nothing to validate on"):
        TrainConfig(learn_valid=True, evaluate_every=10)


def test_all_validation_targets_of_a_set_without_an_order_are_learnt() -> None:
    """Of 4 and 2 training events, 3 and 1 validation targets, 1 and 2 test targets."""
    learnt, held = np.array([4, 2]), np.array([3, 1])
    offsets = np.array([0, 8, 13])
    rows, starts, stops = np.arange(13, dtype=np.int32), offsets[:-1], offsets[:-1] + learnt
    users = np.repeat([0, 1], held)
    targets = np.concatenate([rows[stop : stop + n] for stop, n in zip(stops, held, strict=True)])
    valid = Examples(Ragged(rows, starts[users], stops[users]), targets, users)
    sequences = Ragged(rows, starts, stops)
    found = dataclasses.replace(leave_one_out(ROWS), sequences=sequences, valid=valid)
    assert [len(sequence) for sequence in training_sequences(found, True)] == [7, 3]


def test_the_half_of_movielens_that_has_times(tmp_path: Path) -> None:
    (tmp_path / "ratings_users_1-2999.dat").write_text("1::7::5::978300760\n")
    (tmp_path / "movies.dat").write_text("7::Se (1995)::Drama\n", encoding="latin-1")
    raw = SOURCES["movielens-1m-half"].open(tmp_path)
    assert isinstance(raw, Raw)
    ((path, read),) = raw.events
    assert [tuple(event[:4]) for _, event in read(path)] == [("1", "7", 978300760, 0)]
