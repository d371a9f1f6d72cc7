# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fleet send each other, where the other end is another version of jgr."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jgr.serving.cluster import protocol
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.protocol import Incompatible, received, require, spoken
from jgr.serving.cluster.record import Record, latest
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.cluster.replica import Replica, Source
from jgr.serving.versions.served_state import State

ROOT = Path(__file__).resolve().parents[3]
MESSAGES = (
    Hint(user="u", events=3, items=("a", "b"), left_ms=5.0),
    Asked("POST", "/v1/rank", b"a=b", [(b"x", b"y")], b"{}", ("127.0.0.1", 7)),
    Answered(200, [(b"content-type", b"application/json")], b"{}"),
    Source(("/models/shop",), (), ("fleet.replicas=2",)),
)
RECORD = Record("s", 3, {"m": State("m@1", "c", uploads=("c",))}, {"c": b"x"})
LATER = """
import pickle, sys
from typing import NamedTuple
import jgr
from jgr.serving.cluster import hints, protocol
protocol.PROTOCOL, jgr.__version__ = 99, "9.9"

class Later(NamedTuple):  # another field, in the middle
    user: str = "u"
    more: int = 7
    events: int = 0

    def __reduce__(self):
        return protocol.sent(self)

sys.stdout.buffer.write(pickle.dumps(Later()))
"""


class Local(Replica):
    """Ray awaits what ends a replica; Python itself would not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_a_plain_tuple_and_becomes_what_it_was(message: object) -> None:
    arrived = pickle.loads(pickle.dumps(message))
    assert type(arrived) is tuple and arrived[:2] == tuple(spoken())
    assert received(type(message), arrived) == message
    assert received(type(message), message) is message, "within one process"


def test_a_record_arrives_whole_and_only_that_of_the_same_source_counts() -> None:
    arrived = pickle.loads(pickle.dumps(RECORD))
    assert type(arrived) is tuple and type(arrived[4]["m"]) is tuple
    found = Record.received(arrived)
    assert found == RECORD and found.states["m"].catalog == "c"
    others = [Record("s", 2), found, Record("other", 9)]
    assert latest(others, "s") == RECORD
    assert latest(others, "nobody's") == Record("nobody's")


def test_a_message_of_another_version_is_refused_by_name_and_not_by_its_shape() -> None:
    arrived = pickle.loads(
        subprocess.run([sys.executable, "-c", LATER], capture_output=True, cwd=ROOT, check=True).stdout
    )
    words = (
        rf"jgr 9\.9 of another process of the fleet speaks protocol 99, jgr {re.escape(spoken().jgr)} here "
        f"{spoken().protocol}: "
        "they cannot serve together"
    )
    with pytest.raises(Incompatible, match=words) as refused:
        received(Hint, arrived)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (type(again), again.type, str(again)) == (Incompatible, "unavailable", str(refused.value))
    with pytest.raises(Incompatible, match=words):
        require((99, "9.9", "and whatever comes then"))
    replica = object.__new__(Local)
    with pytest.raises(Incompatible, match=words):
        asyncio.run(replica.answer(arrived, MESSAGES[1]))  # type: ignore[arg-type]


def test_a_replica_that_another_version_has_deployed_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(protocol, "PROTOCOL", 99)
        deployed = pickle.dumps(MESSAGES[3])
    with pytest.raises(Incompatible, match="speaks protocol 99"):
        Local(pickle.loads(deployed), "a")
