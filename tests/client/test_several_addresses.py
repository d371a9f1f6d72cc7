# SPDX-License-Identifier: Apache-2.0
"""jgr.Client with several addresses of one service: what becomes of requests when one of them is lost."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import jgr
from jgr.client import remote
from jgr.serving.api import ModelInfo
from tests.client.scripted import ANSWER, BUSY, reply, scripted
from tests.serving.fakes import PATIENCE_S

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
ROOT = Path(__file__).resolve().parents[2]
STOPPING = reply(
    "503 Service Unavailable", {"error": {"type": "unavailable", "message": "draining", "request_id": "r"}}
)


def request_id(asked: bytes) -> bytes:
    found = re.search(rb"(?i)x-request-id: (.+)\r", asked)
    assert found is not None
    return found[1]


def test_a_request_goes_under_its_id_to_the_next_address_and_those_after_it_go_there_first() -> None:
    with (
        scripted(None) as (lost, at_lost),
        scripted(STOPPING) as (stopping, at_stopping),
        scripted((ANSWER, ANSWER)) as (url, seen),
        jgr.Client([lost, stopping, url]) as client,
    ):
        assert client.recommend(["x"]).id == "r2"
        assert client.recommend(["x"]).id == "r2"
    assert (len(at_lost), len(at_stopping), len(seen)) == (1, 1, 2)
    ids = [request_id(asked) for asked in (*at_lost, *at_stopping, *seen)]
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_each_address_is_tried_once_a_round_and_what_a_server_refuses_is_not_tried_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    with (
        scripted(None, None) as (lost, at_lost),
        scripted(STOPPING, STOPPING, BUSY) as (other, at_other),
        jgr.Client((lost, other), retries=1) as client,
    ):
        with pytest.raises(jgr.Unavailable, match="draining"):
            client.recommend(["x"])
        assert (len(at_lost), len(at_other)) == (2, 2), "twice a round, since one retry is allowed"
        with jgr.Client([other, lost]) as again, pytest.raises(jgr.Overloaded):
            again.recommend(["x"])
    assert len({request_id(asked) for asked in at_lost}) == 1


def test_a_change_of_the_server_is_not_sent_again_once_it_may_have_been_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, connects, connect = list[float](), list[int](), remote._Connection.connect

    def counted(connection: remote._Connection) -> None:
        connects.append(1)
        connect(connection)

    monkeypatch.setattr(remote.time, "sleep", waits.append)
    monkeypatch.setattr(remote._Connection, "connect", counted)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with scripted(None) as (lost, at_lost), jgr.Client([nobody, lost, nobody]) as client:
        with pytest.raises(jgr.Unavailable, match=lost):
            client.fetch("POST", "/v1/models/m/reload", b"", ModelInfo)
    assert len(at_lost) == 1
    stopping = pytest.raises(jgr.Unavailable)
    for answer in (None, STOPPING):  # nor where it may be tried again, which is for what may be done twice
        with scripted(answer) as (lost, at_lost), jgr.Client(lost, retries=2) as client, stopping:
            client.fetch("POST", "/v1/models/m/rollback", b"", ModelInfo)
        assert len(at_lost) == 1 and not waits
    connects.clear()
    with scripted((ANSWER, None)) as (lost, at_lost), jgr.Client(lost) as client:  # over a kept connection
        client.recommend(["x"])
        with stopping:
            client.fetch("POST", "/v1/models/m/rollback", b"", ModelInfo)
    assert (len(at_lost), len(connects)) == (2, 1)


def test_addresses_must_be_there_and_each_one_be_a_url() -> None:
    for none in ([], ["http://127.0.0.1:1", "x"], [None]):
        with pytest.raises(jgr.Error, match="URL"):
            jgr.Client(none)  # type: ignore[arg-type]


@contextmanager
def servers(count: int) -> Iterator[list[tuple[str, subprocess.Popen[str]]]]:
    """Servers without a model, each a process, and their URLs."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RUN, "serve", "--null", "--port=0"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    cwd=ROOT,
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        yield [(process.stdout.readline().strip(), process) for process in processes if process.stdout]


def test_no_request_is_lost_where_a_server_is_killed_and_each_is_answered_once() -> None:
    """Over real HTTP, in load."""
    with servers(2) as ((first, victim), (second, _)):
        client = jgr.Client([first, second], timeout_s=PATIENCE_S)
        answers: list[str] = []
        failures: list[Exception] = []
        stop, some = threading.Event(), threading.Semaphore(0)

        def go() -> None:
            while not stop.is_set():
                try:
                    answers.append(client.recommend(["1", "2"], top_k=2).id)
                except jgr.RequestFailed as error:
                    failures.append(error)
                some.release()

        threads = [threading.Thread(target=go) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            assert some.acquire(timeout=PATIENCE_S)
        victim.send_signal(signal.SIGKILL)
        victim.wait(PATIENCE_S)
        for _ in range(200):
            assert some.acquire(timeout=PATIENCE_S)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        client.close()
    assert failures == []
    assert len(answers) > 200 and len(set(answers)) == len(answers)
