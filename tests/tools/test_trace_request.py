# SPDX-License-Identifier: Apache-2.0
"""What a move is, by hand; and the files and moves of the two requests, which may only become fewer."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from jgr.catalog.prefix_tree import PrefixTree
from tools.draw_house import committed, room_of
from tools.trace_request import Event, Profiler, Trace, exceeded, route, trace_all

LIMITS = {"recommend_files": 23, "recommend_moves": 114, "rank_files": 24, "rank_moves": 139}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trace]:
    return trace_all(tmp_path_factory.mktemp("models"))


def events(*given: str) -> Trace:
    """Such as "t1 call a.py"."""
    return Trace(tuple(Event(*words.split(), "f") for words in given))


def test_a_move_is_an_event_in_another_file_than_the_last_of_its_thread() -> None:
    found = events(
        "t1 call a", "t2 call c", "t1 call b", "t1 return b", "t2 return c", "t1 return a", "t1 call a"
    )
    assert [(before.file, after.file) for before, after in found.moves] == [("a", "b"), ("b", "a")]
    assert found.files == ["a", "b", "c"]
    assert route(found).split() == ["t1", "->", "b:", "f", "t1", "<-", "a:", "f"]


def test_a_file_that_is_only_returned_to_is_not_entered() -> None:
    assert events("t1 return a", "t1 call b").files == ["b"]


def test_calls_outside_of_the_package_are_left_out_and_new_threads_are_seen() -> None:
    def work() -> None:
        PrefixTree.build(np.array([[0, 1], [1, 0]], np.int32))

    profiler = Profiler()
    with profiler.installed():
        work()  # not recorded
        with profiler.recording():
            sorted(map(str, range(3)))
            thread = threading.Thread(target=work, name="other")
            thread.start()
            thread.join()
    assert {event.thread for event in profiler.trace.events} == {"other"}
    assert profiler.trace.files == ["catalog/prefix_tree.py"]
    assert profiler.trace.events[0].function == "PrefixTree.build"


def test_limits_that_are_exceeded_are_named() -> None:
    found = {"rank": events("t1 call a", "t1 call b")}
    assert exceeded(found, {"rank_files": 2, "rank_moves": 1, "recommend_files": 0}) == []
    assert exceeded(found, {"rank_files": None, "rank_moves": 0}) == ["rank: 1 moves, more than 0"]


@pytest.mark.slow
def test_a_request_enters_few_files_and_moves_between_them_seldom(traces: Mapping[str, Trace]) -> None:
    assert exceeded(traces, LIMITS) == []


@pytest.mark.slow
def test_the_picture_of_the_house_shows_these_ways(traces: Mapping[str, Trace]) -> None:
    drawn = json.loads(committed())["ways"]
    for kind, traced in traces.items():
        assert {room for edge in drawn[kind] for room in edge} == {room_of(file) for file in traced.files}, (
            "run python -m tools.draw_house"
        )


@pytest.mark.slow
def test_the_route_is_that_of_the_whole_server(traces: Mapping[str, Trace]) -> None:
    for kind, room in (("recommend", "serving/decoders/"), ("rank", "serving/scorers/")):
        found = traces[kind]
        assert found.events[0].file == "serving/http/server.py"
        assert any(file.startswith(room) for file in found.files)
        assert len({event.thread for event in found.events}) > 1, "the worker's part is seen"
