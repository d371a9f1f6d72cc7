# SPDX-License-Identifier: Apache-2.0
"""`jgr cluster` as its clients meet it: two replicas on a real Ray, over HTTP, through a kill and a reload.

Ray is started once for the file, and its tests go on from one to the next: the last ones change the fleet.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

import jgr
from jgr.catalog.catalog import load_catalog
from jgr.cli import top
from jgr.models import manifest
from jgr.placement.items import Items, Workers, expected_bytes, hash_items
from jgr.traffic.view import View
from tests.serving.cluster.live import (
    HISTORIES,
    IDS,
    KEY,
    LONG_S,
    Fleet,
    Load,
    ended_by_a_signal,
    names,
    pids,
    ready,
    until_all_are_ready,
    whole_answer,
)
from tests.serving.decoders.test_cached_server import make_config as make_ranker
from tests.serving.fakes import PATIENCE_S
from tests.serving.http.test_tracing import Collector, attributes
from tests.serving.tiny_model import as_lines, make_catalog, make_folder, shuffled_catalog

pytestmark = pytest.mark.ray

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
ROOT = Path(__file__).resolve().parents[3]
CANDIDATES = ["i1", "i2", "i3"]
SLOW = "key-with-a-rate."
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BURST = 2
"""Requests that the second key may make at once, of each front."""
KEPT = [[f"i{(start + event) % 30}" for event in range(12)] for start in range(12)]
"""Histories of users whom the ranker keeps."""
TOKEN_BYTES = 512
"""Bytes of the keys and values of a token of the ranker."""
FEW = ("profiles.batch=4", "profiles.tokens=32", "rank.requests=4")
"""Few programs, since every process compiles its own."""
FETCHING = ("fleet.fetched_mb=1", "fleet.fetch=always", "fleet.fetch_ms=60000")


def write_keys(path: Path, *more: Mapping[str, str]) -> None:
    keys = [{"name": "tests", "key": KEY}, {"name": "slow", "key": SLOW, "rate": 0.001, "burst": 2 * BURST}]
    path.write_text(json.dumps({"keys": [{**key, "role": "client"} for key in (*keys, *more)]}))
    path.chmod(0o600)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    manifest.write(folder, make_folder(folder), make_catalog())
    ranker = folder.parent / "ranker"
    manifest.write(ranker, make_ranker(ranker, "model.name=ranker"), load_catalog(ranker / "catalog.jsonl"))
    write_keys(folder.parent / "keys.json")
    collector = Collector()
    own = (
        "server.admin_key=4dm1n",
        "server.base_path=/shop",
        f"server.keys={folder.parent / 'keys.json'}",
        f"server.traces={collector.url}",
        "fleet.health_s=2",
        "fleet.fronts=2",
        "fleet.items=hash",
        "fleet.items_mb=1",
        *FETCHING,
        *FEW,
    )
    settings = [f"--set={setting}" for setting in own]
    temporary = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # the names of Ray's sockets must be short
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w") as errors:
        command = ["cluster", str(folder), str(ranker), "--replicas=2", "--port=0", *settings]
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"RAY_TMPDIR": str(temporary)},
        )
    with process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, log.read_text()
        found = Fleet(url, folder, process, temporary, collector, log)
        yield found
        assert ended_by_a_signal(found) == [b"HTTP/1.1 200"] * 4, "a stop finishes what was accepted"
        assert process.wait(2 * PATIENCE_S) == 0, log.read_text()
    collector.stop()
    shutil.rmtree(temporary, ignore_errors=True)
    own = [line for line in log.read_text().splitlines() if not line.startswith("(ServeController ")]
    assert [line for line in own if "Traceback" in line] == [], log.read_text()


@pytest.fixture(scope="module")
def alone(fleet: Fleet) -> Iterator[jgr.Engine]:
    """The same model in this process."""
    engine = jgr.Engine(str(fleet.folder), FEW)
    yield engine
    engine.close()


def scores(answer: jgr.Answer) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


def test_requests_are_answered_below_the_base_path_and_without_it(fleet: Fleet) -> None:
    body = json.dumps({"history": HISTORIES[0], "candidates": IDS[:6]}).encode()
    found = []
    for base in ("", "/shop"):
        headers = {"authorization": f"Bearer {KEY}"}
        reply = urllib3.request(
            "POST", f"{fleet.url}{base}/v1/rank", body=body, headers=headers, timeout=LONG_S
        )
        assert reply.status == 200, reply.data
        found.append([item["item_id"] for item in reply.json()["items"]])
        health = urllib3.request("GET", f"{fleet.url}{base}/health/ready", headers=headers, timeout=LONG_S)
        assert health.json()["replicas"] == 2
    assert found[0] == found[1]


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
    assert sum(asked.values()) >= len(HISTORIES), "and a second time where one was silent"
    assert len(asked) == 2, "both were asked"


def test_a_user_comes_back_to_the_replica_that_has_them(fleet: Fleet) -> None:
    users = [f"user-{number}" for number in range(len(KEPT))]
    with fleet.client(model="ranker") as client:

        def cached(user: str, history: Sequence[str]) -> bool:
            answer = client.rank(history, CANDIDATES, user_id=user, layout="user_prefix")
            return answer.usage.cached_tokens > 0

        assert not any(map(cached, users, KEPT))
        ends_s = time.monotonic() + PATIENCE_S
        while not all(map(cached, users, KEPT)):  # the other front hears of it in a report
            assert time.monotonic() < ends_s
        assert all(map(cached, users, KEPT))


def test_items_come_from_the_replica_that_holds_them(fleet: Fleet) -> None:
    """The ranker's items, 30 of two tokens, are each on one replica, half of a list on the one that is not asked."""
    ends_s = time.monotonic() + LONG_S
    while sum(fleet.series("jgr_fleet_items_held").values()) < 30:
        assert time.monotonic() < ends_s, fleet.series("jgr_fleet_items_held")
    lists = [[f"i{row}" for row in range(start, start + 6)] for start in range(0, 30, 6)]
    with fleet.client(model="ranker") as client:
        answers = [client.rank(KEPT[0], items, layout="item_prefix") for items in lists]
    engine = jgr.Engine(str(fleet.folder.parent / "ranker"), ["cache.policy=none", *FEW], ["rank"])
    for items, answer in zip(lists, answers, strict=True):
        assert answer.usage.cached_tokens == 2 * len(items), "nobody has computed one"
        expected = engine.rank(KEPT[0], items, layout="item_prefix")
        assert scores(answer) == pytest.approx(scores(expected), abs=1e-4)
    engine.close()
    moved = fleet.series("jgr_fleet_item_bytes_total")
    items = Items(np.ones(30), np.full(30, 2), TOKEN_BYTES)
    reads = [(0, np.arange(start, start + 6, dtype=np.int32)) for start in range(0, 30, 6)]
    predicted = expected_bytes(hash_items(items, Workers(2, 1 << 20)), reads).sum()
    assert sum(value for labels, value in moved.items() if "request" in labels) == predicted > 0


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
    assert fleet.ask("POST", "/v1/models/tiny/reload")[0] == 403
    large = fleet.ask("POST", "/v1/recommend", {"history": ["B000"] * 300_000})
    assert (large[0], json.loads(large[1])["error"]["type"]) == (413, "body_too_large")


def test_of_who_may_not_ask_no_body_is_read(fleet: Fleet) -> None:
    """A megabyte is announced, and one byte of it comes."""
    asked = [
        ("/v1/catalogs", "wrong", 401),
        ("/v1/models/tiny/reload", "wrong", 401),
        ("/v1/rank", "wrong", 401),
    ]
    for path, key, status in (*asked, ("/v1/catalogs", KEY, 403), ("/v1/models/tiny/reload", KEY, 403)):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 1000000\r\n\r\n"
        told = fleet.head_of(f"{head}{{".encode())
        assert told.startswith(b"HTTP/1.1 %d " % status), path
        assert (b"www-authenticate: Bearer" in told) == (status == 401)


def test_heads_that_rays_proxy_would_fail_at_are_answered_or_refused(fleet: Fleet) -> None:
    def told(header: bytes) -> bytes:
        return fleet.head_of(b"GET /health/live HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % header)

    for header in (b"x-request-id: a\tb\xff", b"x-session-id: \xff", b"serve_multiplexed_model_id: \xff"):
        assert told(header).startswith(b"HTTP/1.1 200 "), header
    assert told(b"x-large: " + b"a" * 100_000).startswith(b"HTTP/1.1 431 ")


def test_each_front_has_one_upload_in_hand_and_refuses_more_before_it_reads_them(fleet: Fleet) -> None:
    """Six begin, of which one byte comes each; two fronts take one each at most."""
    host, port = fleet.url.removeprefix("http://").split(":")
    asked = b"POST /v1/catalogs?model=tiny HTTP/1.1\r\nhost: x\r\nauthorization: Bearer 4dm1n\r\n"
    asked += b"content-length: 1000000\r\n\r\n{"
    with ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection((host, int(port)), PATIENCE_S)) for _ in range(6)
        ]
        for client in clients:
            client.sendall(asked)
        told: list[bytes] = []
        while len(told) < 4:
            readable, _, _ = select.select(clients, [], [], PATIENCE_S)
            assert readable
            told += map(whole_answer, readable)
            clients = [client for client in clients if client not in readable]
    for answer in told[:4]:
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in answer
        assert b"another catalog is being uploaded" in answer
    ends_s = time.monotonic() + PATIENCE_S  # those whose clients have left are no longer in hand
    while fleet.ask("POST", "/v1/catalogs?model=tiny", b"{}", authorization="Bearer 4dm1n")[0] != 422:
        assert time.monotonic() < ends_s


def test_a_websocket_is_refused_and_ends_nothing(fleet: Fleet) -> None:
    before = fleet.series("jgr_fleet_decision_seconds_count")
    asked = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    for _ in range(8):  # both fronts get some
        assert fleet.ask("GET", "/v1/recommend", **asked)[0] == 403
    with fleet.client() as client:
        client.recommend(HISTORIES, top_k=5)
    assert set(fleet.series("jgr_fleet_decision_seconds_count")) == set(before), "the fronts are the same"


def test_the_whole_view_names_every_replica(fleet: Fleet) -> None:
    until_all_are_ready(fleet)
    assert len(names(fleet)) == 2
    assert len(pids(fleet, "Front")) == 2
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
    ended = Counter[str]()
    for (front, outcome), count in fleet.series("jgr_fleet_attempts_total").items():
        assert front in {front for front, *_ in routed}
        ended[outcome] += int(count)
    late = ended["late"]  # another replica has answered first
    assert ended["answered"] + late >= sum(routed.values()) > 40, "each was taken, and has ended by now"
    assert ended["lost"] == 0 and sum(fleet.series("jgr_fleet_retries_total").values()) >= late
    assert sum(fleet.series("jgr_fleet_decision_seconds_count").values()) >= sum(routed.values())
    assert {replica for _, replica in fleet.series("jgr_fleet_report_age_seconds")} == names(fleet)
    ends_s = time.monotonic() + PATIENCE_S
    while any((flying := fleet.series("jgr_fleet_tokens_in_flight")).values()):
        assert time.monotonic() < ends_s, (
            flying,
            "what has ended is booked no longer, whatever Ray tells after it",
        )
    assert {replica for _, replica in flying} == names(fleet)


def test_a_keys_rate_counts_for_the_whole_fleet(fleet: Fleet) -> None:
    """Each front has half of it, and they are asked by chance."""
    headers, answers, ends_s = {"authorization": f"Bearer {SLOW}"}, [], time.monotonic() + PATIENCE_S
    while sum(count > 0 for count in fleet.series("jgr_fleet_refused_total").values()) < 2:
        assert time.monotonic() < ends_s
        url = f"{fleet.url}/v1/items/B000?model=tiny"
        answers.append(urllib3.request("GET", url, headers=headers, retries=False))
    statuses = Counter(answer.status for answer in answers)
    assert statuses == {200: 2 * BURST, 429: len(answers) - 2 * BURST}
    assert sum(fleet.series("jgr_fleet_refused_total").values()) == statuses[429]
    refused = next(answer for answer in answers if answer.status == 429)
    error = refused.json()["error"]
    assert error["type"] == "quota_exceeded"
    assert error["message"] == "the key 'slow' has used up its rate of 0.001 a second; try again later"
    assert 1800 < int(refused.headers["retry-after"]) <= 2000
    assert refused.headers["x-request-id"] == error["request_id"]


def test_changed_keys_are_read_by_every_front_and_replica(fleet: Fleet) -> None:
    """Whichever is asked, a new key opens it and a removed one does not."""

    def last(status: int) -> None:
        ends_s, same = time.monotonic() + PATIENCE_S, 0
        while same < 16:  # two fronts and two replicas, by chance
            assert time.monotonic() < ends_s
            found = fleet.ask("GET", "/v1/models", authorization="Bearer key-that-is-new.")[0]
            assert found in (200, 401)
            same = same + 1 if found == status else 0

    path = fleet.folder.parent / "keys.json"
    last(401)
    write_keys(path, {"name": "new", "key": "key-that-is-new."})
    last(200)
    write_keys(path)
    last(401)
    assert fleet.ask("GET", "/v1/models")[0] == 200


def test_a_request_is_traced_through_the_front_into_the_replica(fleet: Fleet) -> None:
    body = {"history": HISTORIES[0], "top_k": 2}
    parent = f"00-{TRACE}-{PARENT}-01"
    assert fleet.ask("POST", "/v1/recommend", body, traceparent=parent)[0] == 200
    ends_s = time.monotonic() + PATIENCE_S
    answered: list[Any] = []
    while not answered:  # spans are sent every few seconds, of two attempts where one replica was silent
        assert time.monotonic() < ends_s
        fleet.get("/health/ready")
        spans = [span for span in list(fleet.collector.spans) if span.trace_id.hex() == TRACE]
        above = {span.parent_span_id for span in spans if span.name == "/v1/recommend"}
        routes = [span for span in spans if span.name == "route" and span.span_id in above]
        answered = [span for span in routes if attributes(span)["http.response.status_code"] == 200]
    route = answered[0]
    assert route.parent_span_id.hex() == PARENT
    told = attributes(route)
    assert told["jgr.replica"] in names(fleet) and told["jgr.rule"] == "joint"
    assert told["jgr.attempt"] in (0, 1)
    instances = {resource.get("service.instance.id") for resource in fleet.collector.resources}
    assert {told["jgr.replica"], told["jgr.front"]} <= instances


def test_what_is_shown_does_not_wait_for_a_replica_that_hangs(fleet: Fleet, alone: jgr.Engine) -> None:
    """The other one is shown, and answers; the one that hung is shown again, with all that it had counted. It is not
    replaced, since three questions of Ray after its health take twice as long as what is asked here."""
    until_all_are_ready(fleet)
    served, before = names(fleet), fleet.series("jgr_requests_total")
    paths = ("/health/ready", "/v2/health/ready", "/health/live", "/v1/models", "/metrics")
    body, victim = {"history": HISTORIES[0], "top_k": 5}, pids(fleet, "Replica")[0]
    with ThreadPoolExecutor(8) as pool:
        os.kill(victim, signal.SIGSTOP)
        try:
            asked = [pool.submit(fleet.ask, "POST", "/v1/recommend", body) for _ in range(3)]
            answered = next(as_completed(asked))
            *shown, text = pool.map(fleet.get, paths)
        finally:
            os.kill(victim, signal.SIGCONT)
    assert [request.result()[0] for request in asked] == [200] * 3
    found = {item["item_id"]: item["score"] for item in json.loads(answered.result()[1])["items"]}
    assert found == pytest.approx(scores(alone.recommend(HISTORIES[:1], top_k=5)[0]), abs=1e-4)
    health, kserve, live, models = map(json.loads, shown)
    assert health == {"status": "ready", "replicas": 1, "of": 2}
    assert (kserve, live["status"]) == ({"ready": True}, "live")
    (well,) = (replica["name"] for replica in models["replicas"])
    during = fleet.series("jgr_requests_total", text.decode())
    assert {name for _, name, _ in during} == {well} < {name for _, name, _ in before} == served
    assert all(during[labels] >= count for labels, count in before.items() if well in labels)
    ages = fleet.series("jgr_fleet_report_age_seconds", text.decode())
    assert {name for _, name in ages} == served, "routing tells of both"
    until_all_are_ready(fleet)
    after = fleet.series("jgr_requests_total")
    assert names(fleet) == served and all(after[labels] >= count for labels, count in before.items())
    assert sum(after.values()) >= sum(before.values()) + len(asked)


def test_two_catalogs_at_once_and_then_a_replica_that_is_killed(
    fleet: Fleet, alone: jgr.Engine, tmp_path: Path
) -> None:
    """No request is lost, each answer is of the catalog that it names, and a replica that replaces the one that was
    killed serves the catalog that was uploaded."""
    lines = tmp_path / "catalog.jsonl"
    lines.write_bytes(as_lines(shuffled_catalog()))
    with jgr.Engine(str(fleet.folder), [f"catalog.path={lines}", *FEW]) as other:
        expected = {
            engine.info.catalog_version: [scores(answer) for answer in engine.recommend(HISTORIES, top_k=5)]
            for engine in (alone, other)
        }
        version = other.info.catalog_version
    catalogs, admin = "/v1/catalogs", {"authorization": "Bearer 4dm1n"}
    with Load(fleet, expected) as load:
        status, body = fleet.ask("POST", f"{catalogs}?model=tiny", lines.read_bytes(), **admin)
        assert (status, json.loads(body).get("version")) == (201, version), body
        while (status := fleet.ask("POST", f"{catalogs}/{version}/activate?model=tiny", **admin)[0]) == 409:
            pass  # the upload goes to the second replica
        assert status == 202
        load.until(lambda: fleet.catalogs() == {version})
        assert set(load.catalogs) == set(expected)
        before, victim = names(fleet), pids(fleet, "Replica")[0]
        os.kill(victim, signal.SIGKILL)
        load.until(lambda: ready(fleet) == 2 and names(fleet) != before)
        assert fleet.catalogs() == {version}
        load.catalogs.clear()
        load.until(lambda: sum(load.catalogs.values()) > 60)
        assert set(load.catalogs) == {version}
    assert (set(load.statuses), load.wrong) == ({"200"}, [])


def test_a_reload_goes_from_one_replica_to_the_next_and_refuses_nobody(fleet: Fleet) -> None:
    old = json.loads(fleet.get("/v1/models"))["data"][0]["version"]
    manifest.write(fleet.folder, make_folder(fleet.folder, seed=2), make_catalog())
    with Load(fleet, {}) as load:
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


def test_a_change_that_fails_is_told_in_the_fleets_log(fleet: Fleet) -> None:
    (fleet.folder / "serving.json").write_text("{")
    told = fleet.head_of(
        b"POST /v1/models/tiny/reload HTTP/1.1\r\nhost: x\r\nauthorization: Bearer 4dm1n\r\ncontent-length: 0\r\n\r\n"
    )
    assert told.startswith(b"HTTP/1.1 202 ") and b"\r\nlocation: /shop/v1/models\r\n" in told
    ends_s = time.monotonic() + PATIENCE_S
    while json.loads(fleet.get("/v1/models"))["rollout"]["state"] != "failed":
        assert time.monotonic() < ends_s
    line = "Coordinator .*jgr.serving.cluster.rollout: /v1/models/tiny/reload: stopped after 0 replicas: .*serving.json"
    while re.search(line, fleet.log.read_text()) is None:
        assert time.monotonic() < ends_s, fleet.log.read_text()
