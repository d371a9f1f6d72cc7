# SPDX-License-Identifier: Apache-2.0
"""Keys of a file: who may do what, how often and how much of the queue, and files that cannot be used."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from jgr.config import ConfigError, ServerConfig
from jgr.serving.errors import RequestError
from jgr.serving.http.keys import Caller, KeyEntry, Keys, _require_once, read_keys
from jgr.serving.http.server import Visit
from jgr.serving.policies.quotas import Places
from tests.serving.fakes import PATIENCE_S, LiveServer, Pending, Reply, make_config
from tests.serving.http.test_process import process

BODY = {"history": ["a"], "top_k": 1}
ADA, BOB, ROOT = "ada-has-this-key", "bob-has-that-key", "root-has-this-key"
RELOAD = "/v1/models/jgr/reload"


def entry(name: str, key: str, role: str = "client", **more: Any) -> dict[str, Any]:
    return {"name": name, "key": key, "role": role, **more}


def write(path: Path, *entries: Any, mode: int = 0o600) -> str:
    path.write_text(json.dumps({"keys": entries}))
    path.chmod(mode)
    return f"server.keys={path}"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def told(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.error["type"]


def series(server: LiveServer, name: str, **headers: str) -> float:
    lines = server.call("/metrics", **headers).body.decode().splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name))


def refused(server: LiveServer, reason: str, **headers: str) -> float:
    return series(server, f'jgr_refused_total{{reason="{reason}"}}', **headers)


def wait_until(holds: Callable[[], bool]) -> None:
    """Each question lets the server's loop turn."""
    for _ in range(20_000):
        if holds():
            return
    raise AssertionError("it has not come to that")


def test_each_key_opens_what_its_role_may_do_and_those_of_the_settings_go_on(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", entry("ada", ADA), entry("root", ROOT, "admin"))
    with LiveServer(keys, "server.api_key=k", "server.admin_key=4dm1n") as server:
        for key in (ADA, "k"):
            assert server.call("/v1/recommend", BODY, **bearer(key)).status == 200
            assert told(server.call(RELOAD, method="POST", **bearer(key))) == (403, "forbidden")
        for key in (ROOT, "4dm1n"):
            assert told(server.call("/v1/recommend", BODY, **bearer(key))) == (403, "forbidden")
            assert told(server.call(RELOAD, method="POST", **bearer(key))) == (409, "conflict")
        for headers in (
            {},
            bearer(BOB),
            bearer(ADA + "x"),
            bearer(ADA[:-1]),
            {"authorization": ADA},
            bearer(""),
        ):
            assert told(server.call("/v1/recommend", BODY, **headers)) == (401, "unauthorized")
        assert server.call("/health/ready").status == 200
        assert refused(server, "unauthorized", **bearer(ADA)) == 10
        schemes = server.call("/openapi.json", **bearer(ADA)).json["paths"]["/v1/rank"]["post"]
        assert schemes["security"] == [{"key": []}]
        assert schemes["responses"]["429"]["description"] == "overloaded or quota_exceeded"


def test_a_refusal_tells_whether_a_key_was_missing_or_no_key_for_this(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", entry("ada", ADA), entry("root", ROOT, "admin"))
    with LiveServer(keys) as server:
        needs = "needs the header 'Authorization: Bearer <API key>'"
        assert server.call("/v1/recommend", BODY).error["message"] == needs
        said = server.call("/v1/recommend", BODY, **bearer("nobodys")).error["message"]
        assert said == f"{needs}; what came is no API key of this server"
        said = server.call(RELOAD, method="POST", **bearer("nobodys")).error["message"]
        assert said.endswith("<admin key>'; what came is no admin key of this server")
        for path in (
            "/v1/recommend",
            "/v1/rerank",
            "/v2/models/rank/infer",
            "/v1/users/u/prefill",
            "/v1/models",
        ):
            reply = server.call(path, None if path == "/v1/models" else BODY, **bearer(ROOT))
            error = reply.json["error"]
            said = error if path.startswith("/v2") else error["message"]
            assert reply.status == 403 and said.startswith(
                "the key 'root' is an admin's: it changes models"
            ), path
        said = server.call(RELOAD, method="POST", **bearer(ADA)).error["message"]
        assert said.startswith("the key 'ada' is a client's") and said.endswith("this takes an admin's key")


def test_a_file_alone_closes_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(write(tmp_path / "keys", entry("ada", ADA)), "server.host=0.0.0.0") as server:
        assert told(server.call("/v1/recommend", BODY)) == (401, "unauthorized")
        assert told(server.call(RELOAD, method="POST", **bearer(ADA))) == (403, "forbidden")
    assert not caplog.records


def test_a_rate_is_of_its_key_and_of_all_that_makes_work(tmp_path: Path) -> None:
    slow = entry("ada", ADA, rate=0.001, burst=3)
    with LiveServer(write(tmp_path / "keys", slow, entry("bob", BOB))) as server:
        taken = [
            server.call("/v1/recommend", BODY, **bearer(ADA)),
            server.call("/v1/recommend", {"history": []}, **bearer(ADA)),
            server.call("/v1/items/a", **bearer(ADA)),
        ]
        assert [reply.status for reply in taken] == [200, 422, 200]
        for path, body in (("/v1/rank", {"history": ["a"], "candidates": ["b"]}), ("/v1/items/a", None)):
            reply = server.call(path, body, **bearer(ADA))
            assert told(reply) == (429, "quota_exceeded")
            assert "'ada' has used up its rate of 0.001 a second" in reply.error["message"]
            assert 900 < int(reply.headers["retry-after"]) <= 1000
        assert told(server.call("/v1/users/u/cache", method="DELETE", **bearer(ADA))) == (
            429,
            "quota_exceeded",
        )
        assert server.call("/health/live", **bearer(ADA)).status == 200
        assert server.call("/v1/recommend", BODY, **bearer(BOB)).status == 200
        assert refused(server, "quota", **bearer(BOB)) == 3
        assert server.executor.batches == [1, 1]


def test_the_parts_of_a_rate_are_together_the_rate(tmp_path: Path) -> None:
    """Three processes that count a part each give a caller, who asks all of them on and on, what one would."""
    path = tmp_path / "keys"
    write(path, entry("ada", ADA, rate=100.0, burst=6))

    def taken(parts: int) -> int:
        keys = [Keys(ServerConfig(keys=str(path)), parts) for _ in range(parts)]
        found = 0
        for now_ns in range(0, 1_000_000_001, 1_000_000):
            for one in keys:
                with suppress(RequestError):
                    one.client(b"Bearer " + ADA.encode()).charge(now_ns)
                    found += 1
        return found

    assert taken(1) == 106, "what it holds at first, and a second of its rate"
    assert abs(taken(3) - 106) <= 3, "each part may round by one"


def test_a_key_holds_its_share_of_the_queue_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", entry("ada", ADA, share=0.5), entry("bob", BOB))
    with LiveServer(keys, "batching.max_queue=4", "batching.order=edf") as server:
        server.executor.hold()
        held = [server.send("/v1/recommend", BODY, **bearer(ADA)) for _ in range(2)]
        server.executor.wait_entered()
        while (
            reply := server.call("/v1/recommend", {**BODY, "deadline_ms": 1}, **bearer(ADA))
        ).status == 504:
            pass  # the second has not been read yet
        assert told(reply) == (429, "quota_exceeded")
        assert "share of the queue" in reply.error["message"] and reply.headers["retry-after"] == "1"
        assert refused(server, "share", **bearer(BOB)) == 1
        others = [server.send("/v1/recommend", BODY, **bearer(BOB)) for _ in range(2)]
        held.pop().abandon()
        while (
            reply := server.call("/v1/recommend", {**BODY, "deadline_ms": 1}, **bearer(ADA))
        ).status == 429:
            pass  # nobody has noticed yet that the client has left
        assert told(reply) == (504, "deadline_exceeded")
        server.executor.release()
        assert [pending.reply().status for pending in (*held, *others)] == [200] * 3
        assert server.call("/v1/recommend", BODY, **bearer(ADA)).status == 200


def test_a_key_holds_no_more_connections_than_it_may(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", entry("ada", ADA, connections=2), entry("bob", BOB))
    with LiveServer(keys) as server, ExitStack() as stack:
        links = [stack.enter_context(closing(HTTPConnection("127.0.0.1", server.port))) for _ in range(4)]

        def ask(link: HTTPConnection, key: str) -> tuple[int, str | None, bytes]:
            link.request("POST", "/v1/recommend", json.dumps(BODY), bearer(key))
            response = link.getresponse()
            return response.status, response.headers["connection"], response.read()

        for _ in range(3):  # a connection has one place, however often it asks, of each key that it asks with
            assert [ask(link, ADA)[0] for link in links[:2]] == [200, 200]
        status, connection, body = ask(links[2], ADA)
        error = json.loads(body)["error"]
        assert (status, connection, error["type"]) == (429, "close", "quota_exceeded")
        assert "the key 'ada' may have 2 connections at a time" in error["message"]
        assert links[2].sock is None  # as a client sees it that was told to close
        assert ask(links[3], BOB)[0] == 200 and ask(links[3], ADA)[0] == 429
        assert refused(server, "connections", **bearer(BOB)) == 2
        assert refused(server, "unauthorized", **bearer(BOB)) == 0
        links[0].close()
        wait_until(lambda: ask(links[3], ADA)[0] == 200)  # the server has seen that one has gone


def test_a_connection_that_is_lost_before_its_call_is_read_holds_no_place() -> None:
    visit, places = Visit(), Places(1)
    assert visit.admits(places) and visit.admits(places) and not Visit().admits(places)
    visit.end()
    assert visit.admits(places) and Visit().admits(places)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("ada", ADA, connections=0)], "keys[0].connections: must be a whole number, 1 or more"),
        ([entry("ada", ADA), entry("ada", BOB)], "keys[1].name is that of keys[0]"),
        ([entry("ada", ADA), entry("bob", ADA)], "keys[1].key is that of keys[0]"),
        ([entry("ada", "the-api-key-of-all")], "keys[0].key is that of server.api_key"),
        ([entry("ada", "the-admin-key-of-all")], "keys[0].key is that of server.admin_key"),
        ([entry("default", ADA)], "keys[0].name is that of server.api_key"),
        ([entry("ada", "fifteen-letters")], "keys[0].key: must be text of length 16 or more"),
        ([entry("ada", "sixteen letters and blanks")], "keys[0].key: must be text that matches"),
        ([entry("a/b", ADA)], "keys[0].name: must be text that matches"),
        ([entry("ada", ADA, "owner")], "keys[0].role: must be 'admin' or 'client', not 'owner'"),
        ([entry("ada", ADA, rate=0)], "keys[0].rate: must be a number, 0.001 or more"),
        ([entry("ada", ADA, burst=3)], "keys[0].burst needs a rate"),
        ([entry("ada", ADA, share=1.5)], "keys[0].share: must be a number, 1.0 or less"),
        (
            [entry("ada", ADA), entry("bob", BOB, quota=1)],
            "keys[1]: unknown field 'quota'; there are name, key, ",
        ),
        ([entry("ada", ADA, rol="client")], "keys[0]: unknown field 'rol'; the nearest is 'role'"),
        ([{"name": "ada", "role": "client"}], "keys[0].key is required"),
        (["ada"], "keys[0]: must be an object, not text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_field(
    tmp_path: Path, entries: Any, words: str
) -> None:
    keys = write(tmp_path / "keys", *entries)
    config = make_config(keys, "server.api_key=the-api-key-of-all", "server.admin_key=the-admin-key-of-all")
    with pytest.raises(ConfigError) as raised:
        Keys(config.server)
    message = str(raised.value)
    assert message.startswith(f"server.keys: {tmp_path}/keys: ") and words in message and "\n" not in message
    assert not any(key in message for key in (ADA, BOB, "the-api-key-of-all"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"[]", "the file: must be an object, not a list"),
        (b'{"keys": []}', "keys: none is a client's, so that nobody could ask"),
        (
            b'{"keys": [{"name": "root", "key": "0123456789abcdef", "role": "admin"}]}',
            "keys: none is a client's, so that nobody could ask",
        ),
        (b'{"keys": [], "key": []}', "unknown field 'key'"),
        (b'{"keys": [], "keys": []}', "the name 'keys' stands twice"),
        (
            b'{"keys": [{"name": "ada", "key": "0123456789abcdef", "role": "client", "role": "admin"}]}',
            "the name 'role' stands twice",
        ),
        (b" " * (1 << 22) + b"{}", "holds more than"),
        (None, "cannot be read: No such file"),
        ("fifo", "cannot be read: it is not a regular file"),
    ],
)
def test_a_file_that_is_none_ends_the_start_in_a_line(tmp_path: Path, content: Any, words: str) -> None:
    if content == "fifo":
        os.mkfifo(tmp_path / "keys")
    elif content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        Keys(make_config(f"server.keys={tmp_path}/keys").server)
    assert str(raised.value).startswith(f"server.keys: {tmp_path}/keys: ") and words in str(raised.value)


def test_a_file_without_a_clients_key_goes_with_one_of_the_settings(tmp_path: Path) -> None:
    keys = Keys(make_config(write(tmp_path / "keys"), "server.api_key=the-api-key-of-all").server)
    assert keys.client(b"Bearer the-api-key-of-all").name == "default"


def test_a_file_that_lost_its_clients_keys_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(make_config(write(tmp_path / "keys", entry("ada", ADA))).server)
    write(tmp_path / "keys")
    keys.reload()
    assert keys.client(b"Bearer " + ADA.encode()).name == "ada"
    assert [record.getMessage() for record in caplog.records] == [
        f"the keys stay as they are: server.keys: {tmp_path}/keys: keys: none is a client's, so that nobody could ask"
    ]


def test_a_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Keys(make_config(write(tmp_path / "keys", entry("ada", ADA))).server)
    assert not caplog.records
    Keys(make_config(write(tmp_path / "keys", entry("ada", ADA), mode=0o640)).server)
    assert "can be read by others than its owner" in caplog.text


def test_a_file_that_is_taken_away_once_it_was_read_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_remove(config: ServerConfig) -> list[KeyEntry]:
        entries = read_keys(config)
        (tmp_path / "keys").unlink()
        return entries

    monkeypatch.setattr("jgr.serving.http.keys.read_keys", read_and_remove)
    keys = Keys(make_config(write(tmp_path / "keys", entry("ada", ADA))).server)
    assert keys.client(b"Bearer " + ADA.encode()).name == "ada"


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        (["server.host=0.0.0.0"], True),
        (["server.host=0.0.0.0", "server.api_key=k"], False),
        (["server.host=0.0.0.0", "server.admin_key=4dm1n"], True),
        ([], False),
    ],
)
def test_a_server_that_anybody_may_ask_says_so(
    settings: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(*settings):
        assert ("0.0.0.0, and neither server.api_key nor server.keys is set" in caplog.text) is warns


class Name(str):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def test_names_of_a_file_are_compared_once_each(tmp_path: Path) -> None:
    """A file has room for a million, and the event loop waits where it is read again."""
    Name.compared = 0
    pairs = [(Name(at), at) for at in range(3_000)]
    _require_once(tmp_path, pairs)
    assert Name.compared < len(pairs)
    with pytest.raises(ConfigError, match="the name '7' stands twice"):
        _require_once(tmp_path, [*pairs, (Name(7), 7)])


def test_what_a_key_holds_counts_under_its_new_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    config = make_config(write(file, entry("ada", ADA, rate=1, share=0.5, connections=2), entry("bob", BOB)))
    keys = Keys(config.server)

    def ada() -> Caller:
        found = keys.find(f"Bearer {ADA}".encode())
        assert found is not None
        return found

    before = ada()
    assert before.share is not None and before.places is not None
    before.charge(0)
    assert [before.share.enter("queue", 4) for _ in range(3)] == [True, True, False]
    visits = [Visit() for _ in range(3)]
    assert [visit.admits(before.places) for visit in visits] == [True, True, False]

    write(
        file,
        entry("ada", ADA, rate=1, share=0.75, connections=3),
        entry("bob", BOB, share=0.5, connections=1),
    )
    keys.reload()
    after = ada()
    assert after.share is not None and after.places is not None
    with pytest.raises(RequestError, match="its rate of 1 a second"):
        after.charge(0)  # the rate is the same, and is used up
    assert [after.share.enter("queue", 4) for _ in range(2)] == [True, False]
    assert [visits[2].admits(after.places), Visit().admits(after.places)] == [True, False]
    assert visits[0].admits(after.places), "it has its place"

    write(file, entry("ada", ADA, rate=1, share=0.25, connections=1))
    keys.reload()
    last = ada()
    assert last.share is not None and last.places is not None
    before.share.leave("queue")  # what was entered before both
    after.share.leave("queue")
    assert not last.share.enter("queue", 4)
    after.share.leave("queue")
    assert last.share.enter("queue", 4)
    for visit in visits[:2]:
        visit.end()
    assert not Visit().admits(last.places)
    visits[2].end()
    assert Visit().admits(last.places)


def test_what_a_key_has_used_up_stays_used_up_when_the_file_is_read_again(tmp_path: Path) -> None:
    slow = entry("ada", ADA, rate=0.001, share=0.5)
    setting = write(tmp_path / "keys", slow)
    keys = Keys(make_config(setting).server)
    before = keys.client(b"Bearer " + ADA.encode())
    write(tmp_path / "keys", {**slow, "key": BOB}, entry("new", ADA))
    keys.reload()
    after, new = keys.client(b"Bearer " + BOB.encode()), keys.client(b"Bearer " + ADA.encode())
    assert after.bucket is before.bucket and after.share is before.share and before.bucket is not None
    assert (new.name, new.bucket, new.share) == ("new", None, None)
    write(tmp_path / "keys", entry("ada", BOB, rate=5.0))
    keys.reload()
    assert keys.client(b"Bearer " + BOB.encode()).bucket is not before.bucket


def test_a_changed_file_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(make_config(write(tmp_path / "keys", entry("ada", ADA))).server)
    caplog.set_level("INFO")
    keys.refresh()
    assert not caplog.records
    write(tmp_path / "keys", entry("bob", BOB), entry("eve", "eve-has-one-as-well"))
    keys.refresh()
    keys.refresh()
    assert keys.find(b"Bearer " + ADA.encode()) is None
    assert keys.client(b"Bearer " + BOB.encode()).name == "bob"
    (tmp_path / "keys").unlink()
    keys.refresh()
    keys.refresh()
    assert keys.client(b"Bearer " + BOB.encode()).name == "bob", "as they were"
    told = [record.levelname for record in caplog.records if "keys" in record.message]
    assert told == ["INFO", "ERROR"]


def test_the_log_tells_keys_by_their_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(make_config(write(tmp_path / "keys", entry("ada", ADA, rate=5.0))).server)
    caplog.set_level("INFO")
    write(tmp_path / "keys", entry("ada", "ada-has-a-new-one-now", rate=9.0))
    keys.reload()
    write(tmp_path / "keys", entry("ada", "ada-has-a-new-one-now", rate=9.0), entry("bob", BOB))
    keys.reload()
    write(tmp_path / "keys", entry("ada", ADA, rate=9.0), entry("eve", "eve-has-one-as-well"))
    keys.reload()
    assert [record.getMessage() for record in caplog.records if "server.keys: " in record.getMessage()] == [
        "server.keys: 0 keys were added, 0 removed, 1 changed",
        "server.keys: 1 key was added, 0 removed, 0 changed",
        "server.keys: 1 key was added, 1 removed, 1 changed",
    ]


def test_sighup_reads_the_keys_again_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    def hang_up(words: str) -> str:
        child.send_signal(signal.SIGHUP)
        for line in child.stderr or ():
            if words in line:
                return line
        raise AssertionError("the process has ended")

    def status(key: str) -> int:
        return Pending(port, "GET", "/v1/models", None, bearer(key)).reply().status

    keys = write(tmp_path / "keys", entry("ada", ADA))
    with process(f"--set={keys}") as (child, port):
        assert [status(ADA), status(BOB)] == [200, 401]
        (tmp_path / "keys").write_text('{"keys": [{"name": "ada"}]}')
        assert "keys[0].key is required" in hang_up("the keys stay as they are")
        assert [status(ADA), status(BOB)] == [200, 401]
        write(tmp_path / "keys", entry("bob", BOB), entry("eve", "eve-has-one-as-well"))
        assert "2 keys were added, 1 removed, 0 changed" in hang_up("server.keys: 2")
        assert [status(ADA), status(BOB)] == [401, 200]
        write(tmp_path / "keys", entry("bob", BOB, rate=5.0), entry("eve", "eve-has-one-as-well"))
        assert "0 keys were added, 0 removed, 1 changed" in hang_up("server.keys: 0")
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
