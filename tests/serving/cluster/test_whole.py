# SPDX-License-Identifier: Apache-2.0
"""What a fleet says of itself, from what its replicas say; requests and answers as plain data."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from jgr.config import FleetConfig
from jgr.serving.api import ModelList
from jgr.serving.cluster.relay import Answered, Asked, Uploads, ask, head, read
from jgr.serving.cluster.series import Series
from jgr.serving.cluster.whole import Shared, best, erased, merged, metrics, models, readiness, scraped_by
from jgr.serving.engine.metrics import CONTENT_TYPE
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import ReplicaInfo, Rollout, ServedVersion
from jgr.serving.http.front import below
from jgr.serving.http.openapi import document
from jgr.serving.http.server import App
from jgr.serving.policies import routing, routing_terms
from jgr.serving.policies.bookings import Work
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.served_models import Models
from tests.serving.fakes import make_config, make_engine
from tests.serving.http.test_server import conform


def test_who_asks_alike_meanwhile_shares_an_answer() -> None:
    async def run() -> None:
        shared, made, goes_on = Shared(), list[str](), asyncio.Event()

        async def make(name: str) -> Answered:
            made.append(name)
            await goes_on.wait()
            if name == "bad":
                raise RequestError("unavailable", "none")
            return Answered(200, [], name.encode())

        def ask(alike: str, name: str) -> asyncio.Task[Answered]:
            return asyncio.create_task(shared.answer(alike, lambda: make(name)))

        leaves, first, second, other, bad = (
            ask(*each) for each in (("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "bad"))
        )
        while len(made) < 3:
            await asyncio.sleep(0)
        leaves.cancel()
        goes_on.set()
        assert [(await each).body for each in (first, second, other)] == [b"1", b"1", b"4"]
        with pytest.raises(RequestError):
            await bad
        assert leaves.cancelled() or leaves.cancelling()
        assert (await ask("a", "5")).body == b"5"  # nobody gets an old one
        assert made == ["1", "4", "bad", "5"]

    asyncio.run(run())


def test_scrapes_are_alike_where_all_that_changes_the_answer_is() -> None:
    def of(*headers: tuple[bytes, bytes], method: str = "GET") -> object:
        return scraped_by(Asked(method, "/metrics", b"", list(headers), b""))

    key, kind = (b"authorization", b"x"), (b"accept", b"text/plain")
    assert of(key, kind, (b"user-agent", b"a")) == of(key, (b"x-request-id", b"1"), kind)
    different = [of(), of(key), of((b"accept", b"x")), of((b"accept-encoding", b"x")), of(method="HEAD")]
    assert len(set(different)) == len(different)


def test_one_upload_is_in_hand_at_a_time_whatever_becomes_of_it() -> None:
    uploads = Uploads()
    with pytest.raises(ConnectionError), uploads.one():
        with pytest.raises(RequestError, match="another catalog is being uploaded") as refused, uploads.one():
            pass
        raise ConnectionError  # its client leaves
    assert refused.value.type == "unavailable"
    with uploads.one():
        pass


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    for within_s, part_s in ((0.01, None), (None, 0.01)):
        with pytest.raises(RequestError, match="did not come in time") as refused:
            asyncio.run(read(scope, receive, 4, within_s, part_s))
        assert refused.value.type == "invalid_http"


def values(text: str) -> dict[tuple[str, ...], float]:
    """The values of all series, by name and labels."""
    return {
        (sample.name, *(f"{label}={value}" for label, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def text_of(requests: int, seconds: float) -> str:
    registry = CollectorRegistry()
    Counter("jgr_requests", "Requests.", ["status"], registry=registry).labels("200").inc(requests)
    Histogram("jgr_seconds", "Seconds.", buckets=(1.0, 2.0), registry=registry).observe(seconds)
    return generate_latest(registry).decode()


def test_every_series_of_every_replica_is_there_once_with_the_replicas_name() -> None:
    whole = merged({"a": text_of(3, 0.5), "b": text_of(5, 1.5)}).decode()
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(whole)
        for sample in family.samples
    }
    assert found[("jgr_requests_total", ("replica", "a"), ("status", "200"))] == 3
    assert found[("jgr_requests_total", ("replica", "b"), ("status", "200"))] == 5
    assert found[("jgr_seconds_bucket", ("le", "1.0"), ("replica", "a"))] == 1
    assert found[("jgr_seconds_bucket", ("le", "1.0"), ("replica", "b"))] == 0
    assert found[("jgr_seconds_sum", ("replica", "b"))] == 1.5
    assert whole.count("# TYPE jgr_requests_total counter") == 1


def test_the_series_of_fronts_stand_beside_those_of_replicas_once_each() -> None:
    fronts = []
    for front, routed in (("f", 3), ("g", 4)):
        series = Series(front)
        series.become(["a"])
        for _ in range(routed):
            series.routed("a", "joint")
        fronts.append(series.text())
    private = [(b"x-kept", b"1"), (b"content-length", b"3")]
    told = {"a": Answered(200, private, text_of(1, 0.5).encode()), "b": Answered(503, [], b"no")}
    whole = metrics(told, fronts)
    assert dict(whole.headers) == {
        b"x-kept": b"1",
        b"content-type": CONTENT_TYPE.encode(),
        b"content-length": b"%d" % len(whole.body),
    }
    text = whole.body.decode()
    found = values(text)
    assert found["jgr_requests_total", "replica=a", "status=200"] == 1
    assert found["jgr_fleet_routed_total", "front=f", "replica=a", "rule=joint"] == 3
    assert found["jgr_fleet_routed_total", "front=g", "replica=a", "rule=joint"] == 4
    assert text.count("# TYPE jgr_fleet_routed_total counter") == 1
    refused = Answered(401, [], b"no")
    assert metrics({"a": refused, "b": refused}, fronts) is refused
    with pytest.raises(RequestError, match="no replica answers"):
        metrics({}, fronts)


def test_the_models_of_a_fleet_are_those_of_one_replica_and_the_versions_of_each() -> None:
    def replica(name: str, version: str) -> dict[str, Any]:
        served = ServedVersion(
            id="m", version=version, catalog_version="c", state="ready", reload="done", reload_error=None
        )
        info = ReplicaInfo(name=name, node="host/1", state="ready", models=[served])
        return {"name": name, "info": msgspec.to_builtins(info)}

    engine = make_engine(make_config())
    alone = msgspec.json.encode(ModelList(data=[engine.info]))
    assert "replicas" not in json.loads(alone), "one server says nothing of replicas"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(alone))]
    last = Rollout(state="running", path="/v1/models/m/reload", of=2, done=("b",))
    about = [replica("a", "m@1"), replica("b", "m@2")]
    whole = models(Answered(200, headers, alone), about, msgspec.to_builtins(last), 3)
    assert dict(whole.headers)[b"content-length"] == b"%d" % len(whole.body)
    answer = json.loads(whole.body)
    assert answer["data"] == json.loads(alone)["data"]
    assert [(each["name"], each["models"][0]["version"]) for each in answer["replicas"]] == [
        ("a", "m@1"),
        ("b", "m@2"),
    ]
    assert answer["of"] == 3
    assert answer["rollout"] == {
        "state": "running",
        "path": "/v1/models/m/reload",
        "of": 2,
        "done": ["b"],
        "replica": None,
        "error": None,
        "back": [],
    }
    silent = models(Answered(200, headers, alone), about, None, 3)
    assert json.loads(silent.body)["rollout"] is None, "the coordinator does not answer"
    refused = Answered(401, [], b"no")
    assert models(refused, [], None, 3) is refused


def test_the_documentation_describes_what_only_a_fleet_tells() -> None:
    engine = make_engine(make_config())
    described = document([engine.info], keyed=False)
    schemas = described["components"]["schemas"]
    one = Answered(200, [], msgspec.json.encode(ModelList(data=[engine.info])))
    last = Rollout(state="failed", path="/v1/models/m/reload", of=2, done=("b",), replica="a", error="no")
    told = {
        "/v1/models": [models(one, [], msgspec.to_builtins(last), 2), models(one, [], None, 2)],
        "/health/ready": [readiness([one], 2)],
    }
    for path, answers in told.items():
        schema = described["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        for answer in answers:
            conform(json.loads(answer.body), schema, schemas, path)


def test_an_erasure_is_done_when_every_replica_has_done_it() -> None:
    done = Answered(200, [(b"content-type", b"application/json")], b'{"entries": 2}')
    assert json.loads(erased([done, done]).body) == {"entries": 4}
    with pytest.raises(RequestError, match="1 of 2 replicas did not answer") as refused:
        erased([done, TimeoutError()])
    assert refused.value.type == "unavailable"
    forbidden = Answered(403, [], b"{}")
    assert erased([done, forbidden]) is forbidden
    unknown = Answered(404, [], b"{}")
    assert json.loads(erased([unknown, done, unknown]).body) == {"entries": 2}, "one replica had something"
    assert erased([unknown, forbidden, done]) is forbidden
    assert erased([unknown, unknown]) is unknown
    with pytest.raises(RequestError, match="1 of 2 replicas did not answer"):
        erased([unknown, TimeoutError()])


def test_a_fleet_is_ready_when_one_replica_is_and_says_how_many_are() -> None:
    well, starting, refused = Answered(200, [], b""), Answered(503, [], b"starting"), Answered(401, [], b"")
    for found, count in (([starting, well], 1), ([well, starting, well], 2)):
        assert json.loads(readiness(found, 3).body) == {"status": "ready", "replicas": count, "of": 3}
    assert readiness([starting, starting], 2) is starting
    assert readiness([refused, refused], 2) is refused
    assert best([starting, well]) is well
    with pytest.raises(RequestError, match="no replica answers") as nobody:
        readiness([], 2)
    assert nobody.value.type == "unavailable"


def test_a_refusal_goes_whole_from_one_process_to_another() -> None:
    error = RequestError("overloaded", "too many", "items[3]", predicted_ms=7.5, retry_after_s=2)
    there = pickle.loads(pickle.dumps(error))
    assert (str(there), vars(there)) == ("too many", vars(error))


def test_the_work_of_a_router_is_its_mean_over_time() -> None:
    work = Work()
    work.begin("r", 100.0, 0)
    work.begin("s", 40.0, 0)
    work.end("s", 40.0, 250)
    work.begin("r", 50.0, 500)
    assert work.mean(1000) == {"r": 125.0, "s": 10.0}
    work.end("r", 100.0, 1000)
    work.end("r", 50.0, 1500)
    assert work.mean(2000) == {"r": 25.0}
    assert work.mean(3000) == {}


def test_a_request_without_a_socket_is_answered_as_over_one() -> None:
    async def run() -> None:
        config = make_config()
        engine = make_engine(config)
        models = Models([Deployment(engine, config.catalog)])
        await models.start(lambda *_: None)
        app = App(models, config.server)
        body = json.dumps({"history": ["a"], "top_k": 2}).encode()
        answered = await ask(app, Asked("POST", "/v1/recommend", b"", [(b"x-request-id", b"mine")], body))
        assert answered.status == 200
        assert [item["item_id"] for item in json.loads(answered.body)["items"]] == ["c", "d"]
        assert dict(answered.headers)[b"x-request-id"] == b"mine"
        late = await ask(
            app,
            Asked("POST", "/v1/recommend", b"", [], b'{"history": ["a"], "top_k": 1, "deadline_ms": 50}'),
            **{"jgr.waited_ns": 60_000_000},
        )
        assert late.status in (429, 504), "its time was over before it came here"
        missing = await ask(app, Asked("GET", "/v1/items/%C3%A4%2F", b"", [], b""))
        assert missing.status == 404 and "ä/" in missing.body.decode()
        assert await models.drain(5.0)
        assert models.join(10)

    asyncio.run(run())


def test_a_key_that_the_front_has_charged_is_not_charged_again(tmp_path: Path) -> None:
    key = "k" * 16
    keys = {"keys": [{"name": "ada", "key": key, "role": "client", "rate": 0.001, "burst": 1}]}
    (tmp_path / "keys").write_text(json.dumps(keys))

    async def run() -> None:
        config = make_config(f"server.keys={tmp_path / 'keys'}")
        models = Models([Deployment(make_engine(config), config.catalog)])
        await models.start(lambda *_: None)
        app = App(models, config.server)
        asked = Asked("GET", "/v1/items/a", b"", [(b"authorization", b"Bearer " + key.encode())], b"")
        statuses = [(await ask(app, asked, **{"jgr.charged": True})).status for _ in range(3)]
        statuses += [(await ask(app, asked)).status for _ in range(2)]
        assert statuses == [200, 200, 200, 200, 429]
        stranger = asked._replace(headers=[(b"authorization", b"Bearer nobodys")])
        assert (await ask(app, stranger, **{"jgr.charged": True})).status == 401
        assert await models.drain(5.0)
        assert models.join(10)

    asyncio.run(run())


def test_a_body_is_read_whole_and_no_further_than_it_may_be() -> None:
    async def run() -> None:
        messages: list[Message] = [
            {"type": "http.request", "body": b"ab", "more_body": True},
            {"type": "http.request", "body": b"cd"},
        ]

        async def receive() -> Message:
            return messages.pop(0)

        scope = {
            "method": "POST",
            "path": "/ä",
            "raw_path": b"/%C3%A4",
            "query_string": b"q=1",
            "headers": [],
        }
        saved = list(messages)
        assert await read(scope, receive, 4) == Asked("POST", "/%C3%A4", b"q=1", [], b"abcd")
        messages = list(saved)
        with pytest.raises(RequestError) as refused:
            await read(scope, receive, 3)
        assert refused.value.type == "body_too_large"
        messages = []  # nothing is received of a body that says that it is too large
        with pytest.raises(RequestError) as refused:
            await read({**scope, "headers": [(b"content-length", b"4")]}, receive, 3)
        assert refused.value.type == "body_too_large"
        messages = [saved[0], {"type": "http.disconnect"}]
        with pytest.raises(ConnectionError):
            await read(scope, receive, 4)

    asyncio.run(run())


@pytest.mark.parametrize(
    "path", ["/v1/users/%FF/cache", "/v1/users/%EF%BF%BD%2F/cache", "/v1/items/a%0Ab", "/"]
)
def test_a_front_passes_a_path_on_as_it_was_sent(path: str) -> None:
    assert [below(base + path, "/shop/jgr") for base in ("", "/shop/jgr", "/sho%70/jgr")] == [
        path.replace("%2F", "/")
    ] * 3
    assert below("/shop/jgr", "/shop/jgr") == "/"
    scope = {"method": "GET", "path": "/ä%", "query_string": b"", "headers": []}
    assert head(scope).path == "/%C3%A4%25", "a proxy need not tell the path as it was sent"


def test_the_weights_of_a_configuration_are_the_policys_own() -> None:
    fleet = FleetConfig()
    own = (routing_terms.LOAD, routing_terms.SHARE, routing_terms.AFFINITY)
    assert (fleet.load, fleet.share, fleet.affinity) == own
    assert routing.Router("r", fleet.routing).nodes == ()
