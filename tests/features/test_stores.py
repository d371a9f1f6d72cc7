# SPDX-License-Identifier: Apache-2.0
"""Both stores alike, and the cache before a real Redis server that is killed, slow, or holds something else."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import redis

from jgr import extras
from jgr.config import FeaturesConfig
from jgr.features.addresses import open_store
from jgr.features.cache import FeatureCache
from jgr.features.memory import FRESH, MISSING, STALE
from jgr.features.redis_store import PREFIX
from jgr.features.schema import MAX_RECORD_BYTES, Schema
from jgr.features.stores import FeatureStore, StoreError
from jgr.fields import UserError
from tests.embeddings.test_lying_servers import LyingProxy
from tests.features.redis_process import Proxy, RedisProcess

SCHEMA = Schema.parse("x:int32")
ITEMS = [*(f"item {n}" for n in range(300)), "not there"]
RECORDS = SCHEMA.pack({"x": np.arange(300)[:, None]})
PATIENCE_S = 30.0
DEADLINE_S = 0.1


def rows(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield process
    process.kill()


@pytest.fixture
def proxy(server: RedisProcess) -> Iterator[Proxy]:
    store = open_store(server.address, PATIENCE_S)
    store.put_many(ITEMS[:300], RECORDS)
    store.close()
    before = Proxy(server.socket)
    yield before
    before.close()


@pytest.fixture(params=["redis", "sqlite"])
def store(request: pytest.FixtureRequest, server: RedisProcess, tmp_path: Path) -> Iterator[FeatureStore]:
    address = server.address if request.param == "redis" else str(tmp_path / "features.sqlite")
    opened = open_store(address, PATIENCE_S, create=True)
    yield opened
    opened.close()


def test_a_file_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a ? # %20.sqlite"
    filled = open_store(str(path), PATIENCE_S, create=True)
    filled.put_many(ITEMS[:300], RECORDS)
    filled.close()
    opened = open_store(str(path), PATIENCE_S)
    assert opened.get_many(ITEMS[299:]) == [RECORDS[299], None]
    path.unlink()
    failed: list[object] = []

    def ask() -> None:
        with pytest.raises(StoreError) as refused:
            opened.get_many(ITEMS[:1])
        failed.append(refused.value)

    thread = threading.Thread(target=ask)  # with a connection of its own
    thread.start()
    thread.join()
    opened.close()
    assert failed and not path.exists()


def test_stores_give_back_what_was_put(store: FeatureStore) -> None:
    assert store.schema() is None
    store.set_schema("x:int8")
    store.set_schema(str(SCHEMA))
    assert store.schema() == str(SCHEMA)
    store.put_many(["a", "ä \0'%", "b"], [b"\0\xff", b"", b"old"])
    store.put_many(["b"], [b"new"])
    asked = ["b", "not there", "ä \0'%", "b", "a"]
    assert store.get_many(asked) == [b"new", None, b"", b"new", b"\0\xff"]
    found: list[list[bytes | None]] = []
    thread = threading.Thread(target=lambda: found.append(store.get_many(asked[:1])))
    thread.start()
    thread.join()
    assert found == [[b"new"]]
    many = [str(n) for n in range(3000)]
    store.put_many(many, [item.encode() for item in many])
    assert store.get_many(many) == [item.encode() for item in many]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("missing.sqlite", "missing.sqlite: there is no such feature store; run jgr features load"),
        ("http://host/", "features.store: http:// is none of redis://"),
        ("redis://host:port/x", "features.store: "),
    ],
)
def test_wrong_addresses_are_named(address: str, message: str) -> None:
    with pytest.raises(StoreError) as raised:
        open_store(address, 1.0)
    assert message in str(raised.value)


def test_an_address_that_cannot_be_read_shows_nothing_of_its_password() -> None:
    for password in ("se/cret", "se#cret", "se?cret"):
        with pytest.raises(StoreError) as refused:
            open_store(f"redis://:{password}@127.0.0.1:6379/0", 1.0)
        assert "se" not in str(refused.value).split() and "'se'" not in str(refused.value)
        assert "%2F" in str(refused.value)


def test_what_is_not_a_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.sqlite"
    path.write_text("not a database at all, whatever its name says")
    with pytest.raises(StoreError, match=r"text\.sqlite: cannot be used as a feature store"):
        open_store(str(path), 1.0)
    store = open_store(f"unix://{tmp_path}/nobody.sock", 1.0)
    calls: list[Callable[[], object]] = [
        lambda: store.get_many(["a"]),
        lambda: store.put_many(["a"], [b""]),
        store.schema,
        lambda: store.set_schema("x:int8"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"the Redis server of features\.store failed"):
            call()


@pytest.mark.parametrize("tables", [[], ["notes"], ["features"]])
def test_a_database_of_another_program_is_refused_and_stays_as_it_was(
    tmp_path: Path, tables: list[str]
) -> None:
    """Also one that has nothing yet, which is an empty file."""
    path = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as other:
        for name in tables:
            other.execute(f"CREATE TABLE {name} (text TEXT)")
    path.touch()
    before = path.read_bytes()
    assert bool(before) == bool(tables)
    with pytest.raises(
        StoreError, match=r"other\.sqlite: is a database, and no feature store; run jgr features"
    ):
        open_store(str(path), 1.0)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["other.sqlite"]


def serve(proxy: Proxy, **settings: float) -> FeatureCache:
    config = FeaturesConfig(
        max_wait_ms=PATIENCE_S * 1e3, **{"timeout_ms": PATIENCE_S * 1e3, "ttl_s": 3600.0, **settings}
    )  # type: ignore[arg-type]
    return FeatureCache(open_store(proxy.address, config.timeout_ms / 1e3), SCHEMA, ITEMS, config)


def deadline_ns() -> int:
    return time.monotonic_ns() + round(DEADLINE_S * 1e9)


def test_wrong_types_and_cut_values_are_counted(server: RedisProcess, proxy: Proxy) -> None:
    with redis.Redis.from_url(server.address) as direct:
        direct.delete(PREFIX + ITEMS[0])
        direct.rpush(PREFIX + ITEMS[0], "a", "list")
        direct.set(PREFIX + ITEMS[1], RECORDS[1][:-3])
        cache = serve(proxy)
        features = cache.get_many(rows(0, 1, 2, 300))
        assert features.states.tolist() == [MISSING, MISSING, FRESH, MISSING]
        assert features.records["x"][:, 0].tolist() == [0, 0, 2, 0]
        counts = cache.counts()
        assert (counts.invalid, counts.not_found, counts.failures) == (2, 1, 0)
        # What is put right is found, without a restart.
        direct.delete(PREFIX + ITEMS[0])
        direct.mset({PREFIX + ITEMS[0]: RECORDS[0], PREFIX + ITEMS[1]: RECORDS[1]})
        until(lambda: cache.get_many(rows(0, 1)).states.tolist() == [FRESH, FRESH])
        assert cache.close(PATIENCE_S)


def test_values_of_any_bytes_and_lengths_come_back(server: RedisProcess) -> None:
    """Some of which look like the end of a value, or the beginning of the next."""
    rng = np.random.default_rng(0)
    parts = (b"\r\n", b"$4\r\n", b"$0\r\n\r\n", b"a", b"", b"*2\r\n", b"$-1\r\n")
    values = [
        b"".join(parts[part] for part in rng.integers(0, len(parts), rng.integers(0, 6))) for _ in range(3000)
    ]
    values[::7] = [
        bytes(rng.integers(0, 256, size, np.uint8)) for size in rng.integers(0, 4, len(values[::7]))
    ]
    store = open_store(server.address, PATIENCE_S)
    names = [str(place) for place in range(len(values))]
    store.put_many(names, values)
    assert store.get_many([*names, "not there", *names]) == [*values, None, *values]
    store.close()


def test_a_value_longer_than_any_record_costs_its_own_item_alone(server: RedisProcess, proxy: Proxy) -> None:
    with redis.Redis.from_url(server.address) as direct:
        direct.set(PREFIX + ITEMS[0], bytes(MAX_RECORD_BYTES + 1))
        direct.set(PREFIX + ITEMS[2], bytes(5 << 20))
    store = open_store(proxy.address, PATIENCE_S)
    found = store.get_many([*ITEMS[:4], "not there"])
    assert found == [b"", RECORDS[1], b"", RECORDS[3], None]
    assert store.get_many(ITEMS[3:4]) == [RECORDS[3]]  # nothing of the long ones is left
    store.close()
    cache = serve(proxy)
    assert cache.get_many(rows(0, 1, 2, 3)).states.tolist() == [MISSING, FRESH, MISSING, FRESH]
    assert (cache.counts().invalid, cache.counts().failures) == (2, 0)
    assert cache.close(PATIENCE_S)


@pytest.mark.parametrize(
    "answer",
    [
        b"*1000000000\r\n",
        b"*-1\r\n",
        b":7\r\n",
        b"$-1\r\n",
        b"*2\r\n*0\r\n*0\r\n",
        b"*2\r\n$3\r\nabcdefg\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"-" + 5000 * b"a",
    ],
)
def test_a_server_that_answers_something_else_is_a_failure_and_the_next_answer_is_right(
    server: RedisProcess, proxy: Proxy, answer: bytes
) -> None:
    lying = LyingProxy(server.socket)
    store = open_store(lying.address, PATIENCE_S)
    lying.lie = lambda client: client.sendall(answer)
    with pytest.raises(StoreError, match=r"^the Redis server of features\.store failed: "):
        store.get_many(ITEMS[:2])
    lying.lie = None
    assert store.get_many(ITEMS[:2]) == RECORDS[:2]
    store.close()
    lying.close()


def test_an_answer_in_drops_ends_in_time(server: RedisProcess, proxy: Proxy) -> None:
    lying, ended = LyingProxy(server.socket), threading.Event()

    def drip(client: socket.socket) -> None:
        client.sendall(b"*1\r\n$40000\r\n")
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                client.sendall(b"x")

    lying.lie = drip
    store = open_store(lying.address, 0.3)
    with pytest.raises(StoreError, match=r"its answer was not whole within 0\.3 s"):
        store.get_many(ITEMS[:1])  # each drop comes in time
    ended.set()
    store.close()
    lying.close()


def test_a_slow_server_is_not_waited_for_beyond_the_deadline(proxy: Proxy) -> None:
    cache = serve(proxy)
    assert cache.get_many(rows(0)).missing == 0
    proxy.hold()
    for _ in range(3):  # the answer is held until all have ended
        features = cache.get_many(rows(0, 1), deadline_ns())
        assert features.states.tolist() == [FRESH, MISSING]
    proxy.release()
    assert cache.get_many(rows(0, 1)).missing == 0
    assert cache.counts().fetched == 2 and cache.counts().late == 3
    assert cache.close(PATIENCE_S)


def test_an_answer_that_never_comes_is_a_failure_and_is_asked_for_again(proxy: Proxy) -> None:
    cache = serve(proxy, timeout_ms=50.0)
    proxy.hold()
    assert cache.get_many(rows(0)).missing == 1
    assert cache.counts().failures == 1
    proxy.release()
    until(lambda: cache.get_many(rows(0)).missing == 0)
    assert cache.close(PATIENCE_S)


def test_killed_and_restarted_under_load(server: RedisProcess, proxy: Proxy) -> None:
    cache = serve(proxy, ttl_s=0.05, absent_ttl_s=0.05, timeout_ms=200.0)
    cache.get_many(rows(*range(200)))
    stop, seen, slowest = threading.Event(), [threading.Semaphore(0) for _ in range(3)], [0.0]

    def load(first: int) -> None:
        number = first
        while not stop.is_set():
            number += 7
            start = time.monotonic()
            features = cache.get_many(rows(*((number + n) % 300 for n in range(16))), deadline_ns())
            slowest.append(time.monotonic() - start)
            # Whatever the server does, a record is the item's own or the default one.
            x = features.records["x"][:, 0]
            own = (np.arange(16) + number) % 300
            assert np.array_equal(x, np.where(features.states == MISSING, 0, own))
            for state in np.unique(features.states):
                seen[state].release()

    threads = [threading.Thread(target=load, args=(100 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        failures = cache.counts().failures
        server.kill()
        proxy.cut()
        until(lambda before=failures: cache.counts().failures > before)  # type: ignore[misc]
        await_(seen[STALE])  # it is visible that the server is gone
        server.start()
        reloaded = open_store(server.address, PATIENCE_S)
        reloaded.put_many(ITEMS[:300], RECORDS)
        reloaded.close()
        await_(seen[FRESH])
        until(lambda: cache.get_many(rows(*range(300)), time.monotonic_ns() + 10**10).missing == 0)
    stop.set()
    for thread in threads:
        thread.join()
    counts = cache.counts()
    assert counts.failures > 0 and counts.stale > 0 and counts.invalid == 0
    assert max(slowest) < DEADLINE_S + 1
    assert cache.close(PATIENCE_S)


def await_(event: threading.Semaphore) -> None:
    """An event from now on."""
    while event.acquire(blocking=False):
        pass
    assert event.acquire(timeout=PATIENCE_S)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end


@pytest.mark.parametrize("mode", ["synchronous", "sync_missing"])
@pytest.mark.parametrize("cache_mb", [0.0, 0.001])  # none, and twelve of three hundred records
def test_a_cache_that_is_too_small_costs_round_trips_and_no_features(
    store: FeatureStore, mode: str, cache_mb: float
) -> None:
    store.put_many(ITEMS[:300], RECORDS)
    settings: Any = {"mode": mode, "cache_mb": cache_mb, "buckets": 4, "max_wait_ms": PATIENCE_S * 1e3}
    cache = FeatureCache(store, SCHEMA, ITEMS, FeaturesConfig(**settings), clock=lambda: 0)
    asked = rows(*range(300, -1, -1), 7)
    for _ in range(2):
        features = cache.get_many(asked)
        assert features.records["x"][:, 0].tolist() == [0, *range(299, -1, -1), 7]
        assert features.states.tolist() == [MISSING] + [FRESH] * 301
        assert (features.missing, features.stale) == (1, 0)
    counts = cache.counts()
    assert counts.entries == (12 if cache_mb else 0)
    assert 2 * 301 - counts.entries <= counts.fetched <= 2 * 301
    assert (counts.held, counts.late) == (0, 0)
    assert cache.close(PATIENCE_S)


def test_a_store_in_redis_without_its_client_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^features\.store in a Redis server needs redis: pip install 'jgr\[redis\]'$"
    ):
        open_store("redis://127.0.0.1:1/0", PATIENCE_S)
