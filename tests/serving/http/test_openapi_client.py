# SPDX-License-Identifier: Apache-2.0
"""A client that openapi-python-client makes of a live /openapi.json asks the server that it was made of."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.serving.fakes import LiveServer

KEY = "s3cret"
SETTINGS = """
post_hooks: []
package_name_override: jgr_api
content_type_overrides:
  application/x-ndjson: application/octet-stream
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(f"server.api_key={KEY}", "server.open_docs=true") as server:
        yield server


@pytest.fixture(scope="module")
def made(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The generated package, imported."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "openapi.json").write_bytes(server.call("/openapi.json").body)
    (folder / "config.yml").write_text(SETTINGS)
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta=none", "--fail-on-warning"]
    paths = [
        f"--path={folder}/openapi.json",
        f"--config={folder}/config.yml",
        f"--output-path={folder}/jgr_api",
    ]
    done = subprocess.run([*command, *paths], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield importlib.import_module("jgr_api")
    sys.path.remove(str(folder))


def test_every_operation_has_a_name_of_its_own_and_a_tag(server: LiveServer) -> None:
    document = server.call("/openapi.json").json
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names) == 35
    assert all(name.isidentifier() for name in names)
    tags = {tag["name"] for tag in document["tags"]}
    assert {tag for operation in operations for tag in operation["tags"]} == tags
    assert json.dumps(document)


def test_the_generated_client_ranks_and_recommends(made: ModuleType, server: LiveServer) -> None:
    api = {
        name: importlib.import_module(f"jgr_api.api.{tag}.{name}")
        for name, tag in (
            ("recommend", "requests"),
            ("rank", "requests"),
            ("rerank", "compatible"),
            ("get_item", "catalogs"),
        )
    }
    models = importlib.import_module("jgr_api.models")
    with made.AuthenticatedClient(base_url=f"http://127.0.0.1:{server.port}", token=KEY) as client:
        answer = api["recommend"].sync(client=client, body=models.RecommendRequest(history=["a"], top_k=3))
        assert isinstance(answer, models.Answer)
        assert [item.item_id for item in answer.items] == ["c", "d", "7"]
        answer = api["rank"].sync(
            client=client, body=models.RankRequest(history=["a"], candidates=["d", "a", 7])
        )
        assert [(item.item_id, item.score) for item in answer.items] == [("a", 0.0), ("d", -3.0), ("7", -4.0)]
        body = models.RerankRequest(query=["a"], documents=["d", "a"], top_n=1)
        (result,) = api["rerank"].sync(client=client, body=body).results
        assert (result.index, result.relevance_score) == (1, 0.0)
        refused = api["rank"].sync(client=client, body=models.RankRequest(history=["a"], candidates=["zzz"]))
        assert isinstance(refused, models.ErrorAnswer)
        assert (refused.error.type_, refused.error.field) == ("invalid_request", "candidates[0]")
        assert api["get_item"].sync("a", client=client).metadata.additional_properties == {
            "title": "title of a"
        }
