# SPDX-License-Identifier: Apache-2.0
"""What one key keeps of its users is not another's: with a caching decoder and a caching scorer, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.decoders import test_cached_server as decoders
from tests.serving.fakes import Pending, Reply
from tests.serving.scorer_fakes import HSTU, ScorerServer, make_folder
from tests.serving.scorers import test_kept_users as scorers

KEYS = {
    "ada": "ada-has-this-key",
    "bob": "bob-has-that-key",
    "root": "root-has-this-key",
    "eve": "the-common-key",
}
ROLES = {"ada": "client", "bob": "client", "root": "admin"}

Ask = Callable[..., Reply]
"""Sends a request: whose key it has, its path, its body and its method."""


def settings(folder: Path) -> tuple[str, ...]:
    entries = [{"name": name, "key": KEYS[name], "role": role} for name, role in ROLES.items()]
    (folder / "keys.json").write_text(json.dumps({"keys": entries}))
    return f"server.keys={folder}/keys.json", f"server.api_key={KEYS['eve']}", "server.explain=true"


def asking(port: int) -> Ask:
    def ask(who: str, path: str, body: Any = None, method: str | None = None) -> Reply:
        headers = {"authorization": f"Bearer {KEYS[who]}"}
        return Pending(port, method or ("GET" if body is None else "POST"), path, body, headers).reply()

    return ask


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("decoder")
    server = decoders.Served(
        decoders.make_config(
            folder / "model", "cache.shadow=0", "profiles.batch=1", "train.layers=1", *settings(folder)
        )
    )
    yield asking(server.port)
    server.stop()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("scorer")
    kept = ("executors.share_user=cache", "cache.device_mb=0.1", "executors.number=1", *scorers.ONE_SIZE)
    with ScorerServer(make_folder(folder / "model", HSTU, *kept, *settings(folder))) as server:
        yield asking(int(server.url.rpartition(":")[2]))


@pytest.fixture(params=["decoder", "scorer"])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.getfixturevalue(request.param)
    return found


def to_rank(ask: Ask, user: str | None) -> dict[str, Any]:
    (model,) = ask("eve", "/v1/models").json["data"]
    if model["timed"]:
        return scorers.body(HSTU, user_id=user)
    return {"history": decoders.ids(*range(12)), "candidates": decoders.ids(20, 21, 22), "user_id": user}


def cached(ask: Ask, who: str, user: str | None) -> bool:
    """Whether anything of the user's part came from the cache, for one that never changes."""
    reply = ask(who, "/v1/rank", {**to_rank(ask, user), "explain": True})
    assert reply.status == 200, reply.body
    (part,) = [part for part in reply.json["explain"] if part["segment"] == "user"]
    usage = reply.json["usage"]
    assert usage["cached_tokens"] >= part["cached_tokens"]
    assert part["cached_tokens"] in (0, part["tokens"])
    return part["cached_tokens"] > 0


def erase(ask: Ask, who: str, user: str, query: str = "") -> Reply:
    return ask(who, f"/v1/users/{user}/cache{query}", method="DELETE")


@pytest.mark.parametrize("user", ["%ff", "%00", "%1b", "x" * 257])
def test_a_user_that_no_body_could_name_is_refused_in_a_path(ask: Ask, user: str) -> None:
    reply = erase(ask, "ada", user)
    assert (reply.status, reply.error["field"]) == (422, "user_id")
    assert erase(ask, "ada", "x" * 256).status == 200


def test_a_user_whose_id_has_the_character_for_no_character_is_erased_like_any(ask: Ask) -> None:
    assert [cached(ask, "ada", "\ufffd") for _ in range(2)] == [False, True]
    assert erase(ask, "ada", "%ff").status == 422, "which is decoded to the same"
    assert cached(ask, "ada", "\ufffd")
    erased = erase(ask, "ada", "%EF%BF%BD")
    assert erased.status == 200 and erased.json["entries"] > 0
    assert not cached(ask, "ada", "\ufffd")


@pytest.mark.parametrize("user", ["u", None])
def test_a_users_entries_are_of_the_key_that_made_them(ask: Ask, user: str | None) -> None:
    for who in ("ada", "bob", "eve"):
        assert not cached(ask, who, user), f"{who} is told what others have asked"
        assert cached(ask, who, user)
    assert cached(ask, "ada", user)


def test_a_recommendation_is_kept_apart_as_well(decoder: Ask) -> None:
    body = {"history": decoders.ids(*range(11, -1, -1)), "top_k": 1, "user_id": "r"}
    for who in ("ada", "bob"):
        tokens = [decoder(who, "/v1/recommend", body).json["usage"]["cached_tokens"] for _ in range(2)]
        assert tokens[0] == 0 < tokens[1]


@pytest.mark.parametrize("user", ["explained", None])
def test_an_explanation_tells_nothing_of_another_keys_users(ask: Ask, user: str | None) -> None:
    body = to_rank(ask, user)
    body["history"] = body["history"][::-1]  # which no other test asks with
    for who in ("ada", "bob"):
        for source in ("computed", "device"):
            reply = ask(who, "/v1/explain/rank", body)
            assert reply.status == 200, reply.body
            assert {span["source"] for span in reply.json["spans"] if span["kind"] == "user"} == {source}, who


def test_a_hint_is_for_the_key_that_gave_it(ask: Ask) -> None:
    (model,) = ask("eve", "/v1/models").json["data"]
    body: dict[str, Any] = {"history": decoders.ids(*range(12))}
    if model["timed"]:
        body = {
            name: value for name, value in scorers.body(HSTU).items() if name not in ("candidates", "user_id")
        }
    assert ask("ada", "/v1/users/hinted/prefill", body).json["kept"]
    assert cached(ask, "ada", "hinted")
    assert not cached(ask, "bob", "hinted")
    assert (
        ask("root", "/v1/users/hinted/prefill", body).status == 403
    )  # an admin's key asks for nothing else either
    assert erase(ask, "ada", "hinted").json == {"entries": 1}
    assert not cached(ask, "ada", "hinted")


def test_an_erasure_needs_the_key_that_made_the_entries_or_an_admins_that_names_it(ask: Ask) -> None:
    for who in ("ada", "bob"):
        cached(ask, who, "v")
    assert erase(ask, "eve", "v").json == {"entries": 0}
    assert cached(ask, "ada", "v") and cached(ask, "bob", "v")
    assert erase(ask, "ada", "v").json == {"entries": 1}
    assert not cached(ask, "ada", "v") and cached(ask, "bob", "v")
    reply = erase(ask, "ada", "v", "?tenant=bob")
    assert (reply.status, reply.error["type"], reply.error["field"]) == (403, "forbidden", "tenant")
    for query in ("", "?tenant=", "?tenant=b/ob", "?tenant=id:v"):
        reply = erase(ask, "root", "v", query)
        assert (reply.status, reply.error["type"], reply.error["field"]) == (422, "invalid_request", "tenant")
    reply = erase(ask, "root", "v", "?tenant=bobby")
    assert (reply.status, reply.error["type"], reply.error["field"]) == (404, "not_found", "tenant")
    assert cached(ask, "bob", "v")
    assert erase(ask, "root", "nobody", "?tenant=bob").json == {"entries": 0}
    assert erase(ask, "root", "v", "?tenant=bob").json == {"entries": 1}
    assert not cached(ask, "bob", "v") and cached(ask, "ada", "v")


def test_no_users_name_looks_like_another_tenants(ask: Ask) -> None:
    cached(ask, "ada", "w")
    for spelled in ("w", "ada/id:w", "/w", "id:w", "../ada/id:w"):
        assert not cached(ask, "bob", spelled)
    assert cached(ask, "ada", "w")
