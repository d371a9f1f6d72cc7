# SPDX-License-Identifier: Apache-2.0
"""The picture of the house is drawn from the imports as they are, and says what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.draw_house import House, arrange, committed, draw, longest_only, read_house, room_of, rows_of

HOUSE = House(
    (
        {"plain": 10, "data": 20},
        {"ops": 5},
        {},
        {},
        {},
        {"serving/http": 3, "serving/engine": 4, "evaluation": 1},
        {},
    ),
    (("data", "plain"), ("ops", "plain"), ("serving/engine", "ops"), ("serving/http", "serving/engine")),
    {"rank": ((("serving/engine", "serving/http"), 2), (("serving/http", "serving/engine"), 3))},
)


@pytest.fixture(scope="module")
def own() -> House:
    """jgr's own house, as its files are now."""
    return read_house({})


def test_the_committed_picture_is_up_to_date_with_the_imports(own: House) -> None:
    drawn, now = json.loads(committed()), json.loads(own.to_json())
    assert (drawn["floors"], drawn["imports"]) == (now["floors"], now["imports"]), (
        "run python -m tools.draw_house"
    )


def test_the_imports_are_those_of_the_files(own: House) -> None:
    assert [floor for floor, rooms in enumerate(own.floors) if "ops" in rooms] == [1]
    assert [floor for floor, rooms in enumerate(own.floors) if "serving/policies" in rooms] == [4]
    assert ("serving/versions", "serving/decoders") in own.imports
    assert not any({"serving/decoders", "serving/scorers"} == set(edge) for edge in own.imports)
    rooms = {room for floor in own.floors for room in floor}
    assert {room for edge in own.imports for room in edge} <= rooms
    assert not any(start == end for start, end in own.imports)


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("config.py", "plain"),
        ("ops/dense.py", "ops"),
        ("ops/beam_attention/xla.py", "ops"),
        ("serving/api.py", "serving"),
        ("serving/http/server.py", "serving/http"),
    ],
)
def test_the_room_of_a_file(file: str, room: str) -> None:
    assert room_of(file) == room


def test_an_arrow_that_a_longer_way_says_is_left_out() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "c"), ("a", "d"), ("e", "d")]
    assert longest_only(edges) == [("a", "b"), ("b", "c"), ("c", "d"), ("e", "d")]


def test_drivers_stand_above_what_they_import_and_every_room_has_a_place_of_its_own(own: House) -> None:
    rows = [row for floor, row in rows_of(HOUSE) if floor == 5]
    assert rows == [["evaluation", "serving/engine"], ["serving/http"]]
    for house in (HOUSE, own):
        places = arrange(house)
        assert len(places) == sum(map(len, house.floors)) == len(set(places.values()))


def test_a_picture_holds_its_data(tmp_path: Path) -> None:
    draw(HOUSE, tmp_path / "house.svg")
    assert committed(tmp_path / "house.svg") == HOUSE.to_json()
    text = (tmp_path / "house.svg").read_text()
    assert text.count("<svg ") == 1 and "-->" in text
    draw(HOUSE, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
