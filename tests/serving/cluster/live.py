# SPDX-License-Identifier: Apache-2.0
"""A fleet that runs, as its clients meet it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

import jgr
from tests.serving.fakes import PATIENCE_S
from tests.serving.http.test_tracing import Collector
from tests.serving.tiny_model import N_ITEMS

KEY = "key-of-the-tests"
LONG_S = 300.0
"""A replica that starts compiles."""
IDS = [f"B{row:03}" for row in range(N_ITEMS)]
HISTORIES = [np.random.default_rng(seed).choice(IDS, 2 + seed % 7).tolist() for seed in range(24)]


@dataclass
class Fleet:
    """A fleet that runs. folder: of its model, which a reload reads again. temporary: Ray's. collector: of its
    traces. log: what it writes to stderr."""

    url: str
    folder: Path
    process: subprocess.Popen[str]
    temporary: Path
    collector: Collector
    log: Path

    def client(self, **options: Any) -> jgr.Client:
        return jgr.Client(self.url, KEY, timeout_s=PATIENCE_S, **options)

    def series(self, name: str, text: str = "") -> dict[tuple[str, ...], float]:
        """The values of a series, by its labels' values. text: of /metrics; "": it is asked for."""
        text = text or self.get("/metrics").decode()
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def catalogs(self) -> set[str]:
        """The versions of the tiny model's catalog that the replicas serve."""
        return {labels[-1] for labels in self.series("jgr_catalog_info") if "tiny" in labels}

    def get(self, path: str) -> bytes:
        status, body = self.ask("GET", path)
        assert status == 200, body
        return body

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        answer = urllib3.request(
            method,
            self.url + path,
            body=body if body is None or isinstance(body, bytes) else json.dumps(body),
            headers={"authorization": f"Bearer {KEY}", **headers},
            timeout=PATIENCE_S,
            retries=False,
        )
        return answer.status, answer.data

    def head_of(self, asked: bytes) -> bytes:
        """The head of the answer to these bytes."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall(asked)
            answer = b""
            while b"\r\n\r\n" not in answer and (more := connection.recv(65536)):
                answer += more
        return answer


@dataclass
class Load:
    """Clients that ask on and on, and what they got."""

    fleet: Fleet
    expected: Mapping[str, Sequence[dict[str, float]]]
    """Scores by the version of the catalog that an answer names."""
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)
    catalogs: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._go, args=(number,)) for number in range(6)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _go(self, number: int) -> None:
        at = number
        while not self._stop.is_set():
            at = (at + 5) % len(HISTORIES)
            status, body = self.fleet.ask("POST", "/v1/recommend", {"history": HISTORIES[at], "top_k": 5})
            self.statuses[str(status)] += 1
            answer = json.loads(body)
            if status != 200:
                self.wrong.append(answer)
                continue
            self.versions[answer["model"]] += 1
            found = {item["item_id"]: item["score"] for item in answer["items"]}
            self.catalogs[answer["catalog_version"]] += 1
            expected = self.expected.get(answer["catalog_version"])
            if self.expected and (expected is None or found != pytest.approx(expected[at], abs=1e-4)):
                self.wrong.append((at, found))

    def until(self, holds: Callable[[], bool]) -> None:
        """Go on until it holds, and some requests more."""
        ends_s = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < ends_s, (self.statuses, self.wrong[:3])
        enough = sum(self.statuses.values()) + 60
        while sum(self.statuses.values()) < enough:
            assert time.monotonic() < ends_s, (self.statuses, self.wrong[:3])


def whole_answer(client: socket.socket) -> bytes:
    """An answer whose body is an object."""
    answer = b""
    while not answer.endswith(b"}}") and (more := client.recv(1 << 16)):
        answer += more
    return answer


def pids(fleet: Fleet, deployment: str) -> list[int]:
    """The processes of a deployment of this fleet; other fleets may run on this machine."""
    name, parents, found = f"ray::ServeReplica:jgr:{deployment}".encode(), dict[int, int](), list[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if (process / "cmdline").read_bytes().startswith(name):
                found.append(int(process.name))

    def ours(pid: int) -> bool:
        return pid == fleet.process.pid or (pid in parents and ours(parents[pid]))

    return [pid for pid in found if ours(pid)]


def ready(fleet: Fleet) -> int:
    return int(json.loads(fleet.get("/health/ready"))["replicas"])


def until_all_are_ready(fleet: Fleet) -> None:
    """Those that are slow are not counted."""
    ends_s = time.monotonic() + PATIENCE_S
    while ready(fleet) < 2:
        assert time.monotonic() < ends_s


def names(fleet: Fleet) -> set[str]:
    """The names of the replicas that serve."""
    return {name for (name,) in fleet.series("process_cpu_seconds_total")}


def ended_by_a_signal(fleet: Fleet) -> list[bytes]:
    """Send SIGTERM while four requests are on their way, whose bodies come to their end once others are refused; the
    statuses of their answers."""
    host, port = fleet.url.removeprefix("http://").split(":")
    body = json.dumps({"history": ["B001"], "top_k": 3}).encode()
    lines = ("host: x", f"authorization: Bearer {KEY}", f"content-length: {len(body)}", "", "")
    head = "\r\n".join(("POST /v1/recommend HTTP/1.1", *lines))
    clients = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(4)]
    for client in clients:
        client.sendall(head.encode() + body[:9])
    for _ in range(10):
        fleet.get("/health/live")
    fleet.process.send_signal(signal.SIGTERM)
    ends_s = time.monotonic() + PATIENCE_S
    while (told := fleet.ask("GET", "/v1/models"))[0] != 503:
        assert time.monotonic() < ends_s, told
    for client in clients:
        client.sendall(body[9:])
    found = [whole_answer(client)[:12] for client in clients]
    for client in clients:
        client.close()
    return found
