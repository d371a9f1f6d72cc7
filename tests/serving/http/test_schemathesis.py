# SPDX-License-Identifier: Apache-2.0
"""Schemathesis, which makes requests of a live /openapi.json, holds every answer against it.

For each operation: the document's examples; one value at a bound at a time, or just beyond it, and methods that the
path does not take; drawn requests, good and bad. test_fuzz.py draws more, and wilder ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.core.parameters import ParameterLocation
from schemathesis.engine import events, from_schema

from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import Engine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.http.kserve import JSON_BYTES
from jgr.serving.http.operations import OPERATIONS, Operation
from tests.serving.fakes import ITEMS, LiveServer
from tests.serving.versions.test_catalog_changes import BODY_OF_UPLOAD, Rebuilds
from tests.serving.versions.test_reload import Versions

CLIENT_KEY, ADMIN_KEY = "cl13nt-k3y", "4dm1n"
DRAWN = 6
"""Good requests that are drawn for an operation, and bad ones."""
OFF = {"enabled": False}
RECORDED = {"responses": False}
"""The same requests in every run: none with what another answer had, as the ids of requests are random."""
CONFIG: dict[str, Any] = {
    "auth": {"openapi": {"key": {"bearer": CLIENT_KEY}, "admin_key": {"bearer": ADMIN_KEY}}},
    "cache": OFF,
    "generation": {"deterministic": True, "database": "none", "max-examples": DRAWN},
    "checks": {
        # A deadline may be drawn that a busy machine misses; status_code_conformance asks for the 504 all the same.
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "504"]},
        # No schema tells which items, models and users there are, and which fields a model reads.
        "positive_data_acceptance": OFF,
        # These three follow a resource from request to request, which the phases here do not.
        "use_after_free": OFF,
        "ensure_resource_availability": OFF,
        "object_level_authorization": OFF,
    },
}
STATEFUL = OFF
"""It goes along links from answers to requests; the document has none."""
BOUNDS_AND_BAD: dict[str, Any] = {
    "examples": {"extra-data-sources": RECORDED},
    "coverage": {"extra-data-sources": RECORDED},
    "fuzzing": {"extra-data-sources": RECORDED, "error-feedback": OFF, "generation": {"mode": "negative"}},
    "stateful": STATEFUL,
}
BAD = {**BOUNDS_AND_BAD, "coverage": OFF}
GOOD: dict[str, Any] = {
    "examples": OFF,
    "coverage": OFF,
    "fuzzing": {**BOUNDS_AND_BAD["fuzzing"], "generation": {"mode": "positive"}},
    "stateful": STATEFUL,
}

SAME_BODIES = {"explain_recommend", "explain_rank", "kserve_infer_version"}
"""Their bodies are those of recommend, rank and kserve_infer, whose bounds are hundreds: they are not tried again."""
ORDERED = [*(one for one in OPERATIONS if not one.admin), *(one for one in OPERATIONS if one.admin)]
"""Those that change the model or the catalog come last."""
UPLOADED = "91d47570df76ded0"
"""The version of what is uploaded."""
KNOWN = {"name": "jgr", "item_id": "a", "version": UPLOADED}
KNOWN_TO_KSERVE = {"name": "recommend", "version": "jgr"}
INPUTS = [
    {"name": "history", "datatype": "BYTES", "shape": [1], "data": ["a"]},
    {"name": "top_k", "datatype": "INT32", "shape": [1], "data": [2]},
]
LIMITS = ("top_k", "top_n", "beam_width", "min_beam_width", "min_candidates")
UNREAD = {
    "context", "deadline_ms", "filters", "history_actions", "history_texts", "history_times", "layout", "model",
    "rerank", "reuse_budget", "scenario", "task_weights", "time", "user_id",
}  # fmt: skip
"""Fields that the server's model refuses, or that make most answers refusals."""


@schemathesis.serializer("application/x-ndjson")
def as_it_is(context: Any, value: Any) -> bytes:
    """An upload, which is drawn as bytes, as a text, or as bytes in a text of Schemathesis' own."""
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else str(data).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server with keys, whose model reloads and whose catalog changes, without a model's weights."""
    versions = Versions()

    def load(metrics: Metrics) -> Engine[ServedDecoder]:
        engine = versions(metrics)
        engine.rebuild = Rebuilds(metrics).rebuild
        return engine

    keys = (f"server.api_key={CLIENT_KEY}", f"server.admin_key={ADMIN_KEY}")
    server = LiveServer(*keys, "server.explain=true", load=load)
    server.engine.rebuild = Rebuilds(server.engine.metrics).rebuild
    with server:
        uploaded = server.call("/v1/catalogs", BODY_OF_UPLOAD, "POST", authorization=f"Bearer {ADMIN_KEY}")
        assert (uploaded.status, uploaded.json["version"]) == (201, UPLOADED)
        yield server


@pytest.fixture(scope="module")
def schemas(server: LiveServer) -> list[Any]:
    """The server's document, for each list of phases."""
    url, headers = f"http://127.0.0.1:{server.port}/openapi.json", {"Authorization": f"Bearer {CLIENT_KEY}"}
    loaded = []
    for phases in (BOUNDS_AND_BAD, BAD, GOOD):
        config = SchemathesisConfig.from_dict({**CONFIG, "phases": phases})
        loaded.append(schemathesis.openapi.from_url(url, config=config, headers=headers))
        loaded[-1].hook("map_case")(knowing_the_server)
        loaded[-1].hook("before_add_examples")(examples_knowing_the_server)
    return loaded


def knowing_the_server(context: Any, case: Any) -> Any:
    """The same case with what the server has in place of drawn names, which nobody would have guessed: few would be
    answered otherwise. A part that is made to be bad, or is tried at its bound, stays as it is."""
    coverage = case.meta.phase.name == "coverage"
    tried = case.meta.phase.data.parameter_location if coverage else None
    good = {at for at, part in case.meta.components.items() if part.mode.is_positive and at != tried}
    if ParameterLocation.PATH in good:
        known = KNOWN_TO_KSERVE if case.operation.path.startswith("/v2") else KNOWN
        case.path_parameters = {name: known.get(name, drawn) for name, drawn in case.path_parameters.items()}
    if ParameterLocation.HEADER in good:
        case.headers.pop(JSON_BYTES, None)  # JSON ends nowhere near a drawn number
    if coverage or not case.meta.generation.mode.is_positive:
        return case
    case.query = {name: "jgr" if name == "model" else drawn for name, drawn in case.query.items()}
    case.query.pop("tenant", None)  # an admin's key alone may name one
    if case.media_type == "application/x-ndjson":
        case.body = BODY_OF_UPLOAD.decode()
    elif isinstance(case.body, dict):
        case.body = body_knowing_the_server(case.operation.path, case.body)
    return case


def examples_knowing_the_server(context: Any, examples: list[Any]) -> None:
    examples[:] = [knowing_the_server(context, case) for case in examples]


def body_knowing_the_server(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body with items of the catalog, and without the fields that the model does not read."""
    if path.endswith("/infer"):
        return {**body, "inputs": INPUTS, "outputs": [], "parameters": {}}
    if path == "/v1/score":  # no field of its schema is required, and few combinations are answered
        return {"queries": ["a"], "items": ["b"]}
    body = {name: drawn for name, drawn in body.items() if name not in UNREAD}
    for name in ("history", "query", "candidates", "documents"):
        if isinstance(body.get(name), dict):
            body[name] = {"history": known_ids(body[name]["history"])}
        elif isinstance(body.get(name), list):
            body[name] = known_ids(body[name])
    if "candidates" in body:
        body["candidates"] = ["b", "c", *body["candidates"]][:2]  # each may stand there once
    for name in LIMITS:
        body[name] = 2 if path.endswith("/recommend") and name == "top_k" else body.get(name) and 1
    return {name: value for name, value in body.items() if value is not None}


def known_ids(drawn: list[Any]) -> list[str]:
    return [ITEMS[len(str(one)) % len(ITEMS)] for one in drawn]


@pytest.mark.parametrize("operation", ORDERED, ids=[one.id for one in ORDERED])
def test_answers_are_those_that_the_document_has(
    schemas: list[Any], operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    bounds_and_bad, bad, good = schemas
    statuses = Counter[int]()
    with caplog.at_level(logging.ERROR):
        for schema in (bad if operation.id in SAME_BODIES else bounds_and_bad, good):
            for event in from_schema(schema.include(operation_id=operation.id)).execute():
                assert not isinstance(event, events.FatalError | events.NonFatalError), event
                if isinstance(event, events.ScenarioFinished):
                    statuses.update(checked(event.recorder))
    # A change may find another under way, and one that ends a change finds none.
    assert operation.status in statuses or (operation.admin and 409 in statuses), statuses
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def checked(recorder: Any) -> Iterator[int]:
    """The statuses of the answers, none of which failed a check."""
    for case_id, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                asked = recorder.cases[case_id].value.as_curl_command()
                raise AssertionError(f"{check.name}: {check.failure_info.failure}\n{asked}")
    for interaction in recorder.interactions.values():
        assert interaction.response is not None, interaction.request
        yield interaction.response.status_code
