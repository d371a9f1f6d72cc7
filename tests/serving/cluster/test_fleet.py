# SPDX-License-Identifier: Apache-2.0
"""`jgr cluster` as its clients meet it: two replicas on a real Ray, over HTTP, through a kill and a reload.

Ray is started once for the file, and its tests go on from one to the next: the last ones change the fleet.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

import jgr
from jgr.catalog.catalog import load_catalog
from jgr.cli import top
from jgr.models import manifest
from jgr.serving.engine.journal import Opened, read
from jgr.traffic.view import View
from tests.serving.decoders.test_cached_server import make_config as make_ranker
from tests.serving.fakes import PATIENCE_S
from tests.serving.http.test_tracing import Collector, attributes
from tests.serving.tiny_model import N_ITEMS, make_catalog, make_folder

pytestmark = pytest.mark.ray

LONG_S = 300.0
"""A replica that starts compiles."""
RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
ROOT = Path(__file__).resolve().parents[3]
IDS = [f"B{row:03}" for row in range(N_ITEMS)]
HISTORIES = [np.random.default_rng(seed).choice(IDS, 2 + seed % 7).tolist() for seed in range(24)]
CANDIDATES = ["i1", "i2", "i3"]
KEY, SLOW = "key-of-the-tests", "key-with-a-rate."
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEPT = [[f"i{(start + event) % 30}" for event in range(12)] for start in range(12)]
"""Histories of users whom the ranker keeps."""


@dataclass
class Fleet:
    """A fleet that runs. folder: of its model, which a reload reads again. collector: of its traces."""

    url: str
    folder: Path
    process: subprocess.Popen[str]
    collector: Collector

    def client(self, **options: Any) -> jgr.Client:
        return jgr.Client(self.url, KEY, timeout_s=PATIENCE_S, **options)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a series, by its labels' values."""
        text = self.get("/metrics").decode()
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def get(self, path: str) -> bytes:
        status, body = self.ask("GET", path)
        assert status == 200, body
        return body

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        answer = urllib3.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={"authorization": f"Bearer {KEY}", **headers},
            timeout=PATIENCE_S,
            retries=False,
        )
        return answer.status, answer.data


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    manifest.write(folder, make_folder(folder), make_catalog())
    ranker = folder.parent / "ranker"
    manifest.write(ranker, make_ranker(ranker, "model.name=ranker"), load_catalog(ranker / "catalog.jsonl"))
    keys = [{"name": "tests", "key": KEY}, {"name": "slow", "key": SLOW, "rate": 0.001, "burst": 3}]
    entries = [{**key, "role": "client"} for key in keys]
    (folder.parent / "keys.json").write_text(json.dumps({"keys": entries}))
    (folder.parent / "keys.json").chmod(0o600)
    collector = Collector()
    own = (
        "server.admin_key=4dm1n",
        "fleet.health_s=1",
        f"server.keys={folder.parent / 'keys.json'}",
        f"server.traces={collector.url}",
        f"server.journal={folder.parent / 'day.jsonl'}",
    )
    settings = [f"--set={setting}" for setting in own]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w") as errors:
        command = ["cluster", str(folder), str(ranker), "--replicas=2", "--port=0", *settings]
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"RAY_TMPDIR": str(tmp_path_factory.mktemp("r"))},
        )
    with process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, log.read_text()
        yield Fleet(url, folder, process, collector)
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * PATIENCE_S) == 0, log.read_text()
    collector.stop()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def alone(fleet: Fleet) -> Iterator[jgr.Engine]:
    """The same model in this process."""
    engine = jgr.Engine(str(fleet.folder))
    yield engine
    engine.close()


def scores(answer: jgr.Answer) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


def test_answers_are_those_of_one_engine(fleet: Fleet, alone: jgr.Engine) -> None:
    with fleet.client() as client:
        for of in (
            lambda one: one.recommend(HISTORIES, top_k=5),
            lambda one: one.rank(HISTORIES, [IDS[:6]] * len(HISTORIES)),
        ):
            for ours, theirs in zip(of(client), of(alone), strict=True):
                assert scores(ours) == pytest.approx(scores(theirs), abs=1e-4)
    asked = {
        name: count for (path, name, _), count in fleet.series("jgr_requests_total").items() if "rank" in path
    }
    assert sum(asked.values()) == len(HISTORIES)
    assert len(asked) == 2, "both were asked"


def test_a_user_comes_back_to_the_replica_that_has_them(fleet: Fleet) -> None:
    users = [f"user-{number}" for number in range(len(KEPT))]
    with fleet.client(model="ranker") as client:
        for round in range(3):
            for user, history in zip(users, KEPT, strict=True):
                answer = client.rank(history, CANDIDATES, user_id=user, layout="user_prefix")
                assert (answer.usage.cached_tokens > 0) == (round > 0), (user, round)


def test_an_erasure_reaches_the_replica_that_has_the_user(fleet: Fleet) -> None:
    with fleet.client(model="ranker") as client:
        client.rank(KEPT[0], CANDIDATES, user_id="gone", layout="user_prefix")
    assert json.loads(fleet.ask("DELETE", "/v1/users/gone/cache")[1]) == {"entries": 1}
    assert json.loads(fleet.ask("DELETE", "/v1/users/gone/cache")[1]) == {"entries": 0}


def test_refusals_are_those_of_a_server(fleet: Fleet) -> None:
    status, body = fleet.ask(
        "POST", "/v1/recommend", {"history": ["B000"], "topk": 1}, **{"X-Request-Id": "mine"}
    )
    error = json.loads(body)["error"]
    assert (status, error["field"], error["request_id"]) == (422, "topk", "mine")
    assert fleet.ask("GET", "/v1/rank")[0] == 405
    assert fleet.ask("GET", "/v1/nothing")[0] == 404
    assert fleet.ask("POST", "/v1/models/tiny/reload")[0] == 401
    large = fleet.ask("POST", "/v1/recommend", {"history": ["B000"] * 300_000})
    assert (large[0], json.loads(large[1])["error"]["type"]) == (413, "body_too_large")


def test_the_whole_view_names_every_replica(fleet: Fleet) -> None:
    assert json.loads(fleet.get("/health/ready")) == {"status": "ready", "replicas": 2, "of": 2}
    assert len(names(fleet)) == 2
    models = json.loads(fleet.get("/v1/models"))
    assert [info["id"] for info in models["data"]] == ["tiny", "ranker"]
    served = {info["id"]: (info["version"], info["catalog_version"]) for info in models["data"]}
    assert {replica["name"] for replica in models["replicas"]} == names(fleet)
    for replica in models["replicas"]:
        assert replica["state"] == "ready" and replica["node"].startswith(socket.gethostname())
        assert {one["id"]: (one["version"], one["catalog_version"]) for one in replica["models"]} == served
    with fleet.client() as client:
        shown = next(top.views(client, "fleet", 0.0, lambda seconds: None))
    assert isinstance(shown, View)
    assert {row.replica for row in shown.replicas} == names(fleet)
    assert {row.versions for row in shown.replicas} == {tuple(version for version, _ in served.values())}


def test_routing_tells_what_it_does(fleet: Fleet) -> None:
    routed = fleet.series("jgr_fleet_routed_total")
    assert {replica for _, replica, _ in routed} == names(fleet)
    assert {rule for *_, rule in routed} == {"joint"}
    attempts = {outcome: count for (_, outcome), count in fleet.series("jgr_fleet_attempts_total").items()}
    assert attempts["answered"] >= sum(routed.values()) > 40, "each was taken, and answered but for this one"
    assert attempts["lost"] == 0 and list(fleet.series("jgr_fleet_retries_total").values()) == [0]
    (decisions,) = fleet.series("jgr_fleet_decision_seconds_count").values()
    assert decisions >= sum(routed.values())
    assert {replica for _, replica in fleet.series("jgr_fleet_report_age_seconds")} == names(fleet)


def test_a_keys_rate_counts_for_the_whole_fleet(fleet: Fleet) -> None:
    asked = [
        urllib3.request(
            "GET",
            f"{fleet.url}/v1/items/B000?model=tiny",
            headers={"authorization": f"Bearer {SLOW}"},
            retries=False,
        )
        for _ in range(4)
    ]
    assert [answer.status for answer in asked] == [200, 200, 200, 429]
    error = asked[3].json()["error"]
    assert error["type"] == "quota_exceeded"
    assert error["message"] == "the key 'slow' may make 0.001 requests a second; try again later"
    assert 900 < int(asked[3].headers["retry-after"]) <= 1000
    assert asked[3].headers["x-request-id"] == error["request_id"]
    assert list(fleet.series("jgr_fleet_refused_total").values()) == [1]


def test_a_request_is_traced_through_the_front_into_the_replica(fleet: Fleet) -> None:
    body = {"history": HISTORIES[0], "top_k": 2}
    parent = f"00-{TRACE}-{PARENT}-01"
    assert fleet.ask("POST", "/v1/recommend", body, traceparent=parent)[0] == 200
    ends_s = time.monotonic() + PATIENCE_S
    found: dict[str, Any] = {}
    while not {"route", "/v1/recommend"} <= found.keys():  # they are sent every few seconds
        assert time.monotonic() < ends_s, found.keys()
        fleet.get("/health/ready")
        found = {span.name: span for span in fleet.collector.spans if span.trace_id.hex() == TRACE}
    route, request = found["route"], found["/v1/recommend"]
    assert (route.parent_span_id.hex(), request.parent_span_id) == (PARENT, route.span_id)
    told = attributes(route)
    assert told["jgr.replica"] in names(fleet) and told["jgr.rule"] == "joint"
    assert (told["jgr.attempt"], told["http.response.status_code"]) == (0, 200)
    instances = {resource.get("service.instance.id") for resource in fleet.collector.resources}
    assert {told["jgr.replica"], told["jgr.front"]} <= instances


def test_each_replica_writes_a_journal_of_its_own(fleet: Fleet) -> None:
    written = {path.name.split(".")[1]: path for path in fleet.folder.parent.glob("day.*.jsonl")}
    assert written.keys() == names(fleet)
    assert not (fleet.folder.parent / "day.jsonl").exists()
    for path in written.values():
        assert {
            line.event.name.partition("@")[0] for line in read(path) if isinstance(line.event, Opened)
        } == {
            "tiny",
            "ranker",
        }


@dataclass
class Load:
    """Clients that ask on and on, and what they got."""

    fleet: Fleet
    expected: Sequence[dict[str, float]]
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)

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
            if self.expected and found != pytest.approx(self.expected[at], abs=1e-4):
                self.wrong.append((at, found))

    def until(self, holds: Callable[[], bool]) -> None:
        """Go on until it holds, and some requests more."""
        ends_s = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < ends_s, (self.statuses, self.wrong[:3])
        enough = sum(self.statuses.values()) + 60
        while sum(self.statuses.values()) < enough:
            assert time.monotonic() < ends_s, (self.statuses, self.wrong[:3])


def test_a_replica_that_is_killed_loses_no_request_and_is_replaced(fleet: Fleet, alone: jgr.Engine) -> None:
    expected = [scores(answer) for answer in alone.recommend(HISTORIES, top_k=5)]
    before = names(fleet)
    victim = pids(fleet)[0]
    with Load(fleet, expected) as load:
        load.until(lambda: load.statuses["200"] > 30)
        os.kill(victim, signal.SIGKILL)
        load.until(lambda: ready(fleet) == 2 and names(fleet) != before)
    assert (set(load.statuses), load.wrong) == ({"200"}, [])


def test_a_reload_goes_from_one_replica_to_the_next_and_refuses_nobody(fleet: Fleet) -> None:
    old = json.loads(fleet.get("/v1/models"))["data"][0]["version"]
    manifest.write(fleet.folder, make_folder(fleet.folder, seed=2), make_catalog())
    with Load(fleet, ()) as load:
        status, body = fleet.ask("POST", "/v1/models/tiny/reload", authorization="Bearer 4dm1n")
        assert status == 202, body
        again, body = fleet.ask("POST", "/v1/models/tiny/reload", authorization="Bearer 4dm1n")
        assert (again, json.loads(body)["error"]["type"]) == (409, "conflict"), "one change at a time"
        seen: list[str] = []

        def changed() -> bool:
            seen.append(json.loads(fleet.get("/v1/models"))["data"][0]["version"])
            return len(seen) > 12 and old not in seen[-12:]

        load.until(changed)
    assert (set(load.statuses), load.wrong) == ({"200"}, [])
    assert old in load.versions and len(load.versions) == 2


def pids(fleet: Fleet) -> list[int]:
    """The processes of this fleet's replicas; other fleets may run on this machine."""
    parents: dict[int, int] = {}
    replicas = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if (process / "cmdline").read_bytes().startswith(b"ray::ServeReplica:jgr:Replica"):
                replicas.append(int(process.name))

    def ours(pid: int) -> bool:
        return pid == fleet.process.pid or (pid in parents and ours(parents[pid]))

    return [pid for pid in replicas if ours(pid)]


def ready(fleet: Fleet) -> int:
    return int(json.loads(fleet.get("/health/ready"))["replicas"])


def names(fleet: Fleet) -> set[str]:
    """The names of the replicas that serve."""
    return {name for (name,) in fleet.series("process_cpu_seconds_total")}
