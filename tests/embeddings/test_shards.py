# SPDX-License-Identifier: Apache-2.0
"""Tables in shards: files first, then a Redis server, which may be dead, slow, or wrong: an error each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis

from jgr.embeddings.redis_shard import RedisShard, upload
from jgr.embeddings.shards import LocalShard, ShardError, Shards
from jgr.models import table_file
from jgr.models.table_file import TableFile
from tests.features.redis_process import Proxy, RedisProcess

ROWS = np.random.default_rng(5).standard_normal((40, 6)).astype(np.float16)


def shard(path: Path, first: int, end: int, model: str = "m") -> LocalShard:
    part, whole = [ROWS[first:end]], table_file.digest_of([ROWS], "float16")
    table_file.write(
        path, "items", part, width=6, dtype="float16", model=model, rows=40, first=first, whole=whole
    )
    return LocalShard(TableFile(path))


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path_factory.mktemp("r"))
    yield process
    process.kill()


def filled(server: RedisProcess, local: LocalShard) -> None:
    upload(server.address, msgspec.structs.replace(local.header, first=0, held=40), ROWS, 5.0)


def test_rows_come_from_the_shards_that_have_them(tmp_path: Path, server: RedisProcess) -> None:
    local = [shard(tmp_path / "a", 0, 10), shard(tmp_path / "b", 8, 20)]
    filled(server, local[0])
    shards = Shards({"items": [*local, RedisShard(server.address, "items", "m", 5.0)]})
    asked = np.array([39, 0, 9, 15, 20], np.int64)
    found = shards.read("items", asked)
    assert found.dtype == np.float16 and (found == ROWS[asked]).all()
    assert shards.counts["items"] == {"local": 3, "remote": 2}
    shards.close()


def test_rows_of_another_table_of_the_same_model_are_an_error_and_no_rows(
    tmp_path: Path, server: RedisProcess
) -> None:
    local = shard(tmp_path / "a", 0, 10)
    filled(server, local)
    remote = RedisShard(server.address, "items", "m", 5.0)
    shards = Shards({"items": [local, remote]})
    assert (shards.read("items", np.array([3, 30])) == ROWS[[3, 30]]).all()
    for other in (ROWS[::-1].copy(), (2 * ROWS).astype(np.float16)):
        whole = table_file.digest_of([other], "float16")
        upload(
            server.address, msgspec.structs.replace(local.header, first=0, held=40, whole=whole), other, 5.0
        )
        with pytest.raises(ShardError, match="gave a wrong row 30"):
            shards.read("items", np.array([3, 30]))
        with pytest.raises(ShardError, match=r"its shards, in the folder and in .*, differ: whole is"):
            Shards({"items": [local, RedisShard(server.address, "items", "m", 5.0)]})


def test_a_value_that_is_too_long_is_a_wrong_row_and_keeps_nobody_from_the_others(
    tmp_path: Path, server: RedisProcess
) -> None:
    local = shard(tmp_path / "a", 0, 10)
    filled(server, local)
    shards = Shards({"items": [local, RedisShard(server.address, "items", "m", 5.0)]})
    with redis.Redis.from_url(server.address) as client:
        client.set("jgr:rows:items:m:30", bytes(500))
    for _ in range(5):
        with pytest.raises(ShardError, match="gave a wrong row 30"):
            shards.read("items", np.array([30]))
    assert (shards.read("items", np.array([31])) == ROWS[[31]]).all()
    filled(server, local)
    assert (shards.read("items", np.array([30])) == ROWS[[30]]).all()


def test_shards_that_differ_or_leave_rows_out_are_refused(tmp_path: Path) -> None:
    first, later = shard(tmp_path / "a", 0, 10), shard(tmp_path / "b", 12, 40)
    with pytest.raises(ShardError, match="table items: row 10 and others are in no shard"):
        Shards({"items": [later, first]})
    other = shard(tmp_path / "c", 10, 40, model="n")
    with pytest.raises(ShardError, match="remote, differ: model is 'm' and 'n'"):
        Shards({"items": [first, other]})


def test_a_server_that_dies_is_slow_or_lies_is_an_error(tmp_path: Path, server: RedisProcess) -> None:
    local = shard(tmp_path / "a", 0, 10)
    filled(server, local)
    proxy = Proxy(server.socket)
    try:
        remote = RedisShard(proxy.address, "items", "m", 1.0)
        shards = Shards({"items": [local, remote]})
        asked = np.array([3, 30, 31], np.int64)
        assert (shards.read("items", asked) == ROWS[asked]).all()
        proxy.hold()
        with pytest.raises(ShardError, match=r"the server of embeddings\.remote failed: Timeout"):
            shards.read("items", asked)
        proxy.release()
        proxy.cut()
        assert (shards.read("items", asked) == ROWS[asked]).all()  # over a new connection
        with redis.Redis.from_url(server.address) as client:
            keys = [f"jgr:rows:items:m:{row}" for row in (30, 31)]
            one, other = client.mget(keys)
            for wrong, message in (
                (other, "gave a wrong row 30"),  # a row, but not this one
                (one[:-2], "gave a wrong row 30"),
                (one[:-1] + bytes([one[-1] ^ 1]), "gave a wrong row 30"),
            ):
                client.set(keys[0], wrong)
                with pytest.raises(ShardError, match=message):
                    shards.read("items", asked)
            client.delete(keys[0])
        with pytest.raises(ShardError, match="lacks row 30"):
            shards.read("items", asked)
        server.kill()
        with pytest.raises(ShardError, match=r"the server of embeddings\.remote failed"):
            shards.read("items", asked)
        assert (shards.read("items", asked[:1]) == ROWS[3]).all()  # what is here does not need it
        assert shards.counts["items"]["failed"] == 12
    finally:
        proxy.close()


def test_a_server_without_the_models_rows_is_told_at_start(server: RedisProcess) -> None:
    with pytest.raises(ShardError, match="has no rows of model 'm'"):
        RedisShard(server.address, "items", "m", 5.0)
    with redis.Redis.from_url(server.address) as client:
        client.set("jgr:rows:items:m", b"{}")
    with pytest.raises(ShardError, match="missing required field"):
        RedisShard(server.address, "items", "m", 5.0)
    with pytest.raises(ShardError, match=r"embeddings\.remote: "):
        RedisShard("ftp://x", "items", "m", 5.0)


def overwritten(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(table_file.HEADER_BYTES)
        file.write(bytes(ROWS.nbytes))


def cut(path: Path) -> None:
    os.truncate(path, table_file.HEADER_BYTES + 12)


def old_shard(path: Path) -> LocalShard:
    """A shard whose file was written long ago: a change in the same tick of the clock has the same time."""
    shard(path, 0, 40)
    os.utime(path, ns=(0, 0))
    return LocalShard(TableFile(path))


@pytest.mark.parametrize("change", [overwritten, cut])
def test_a_file_that_is_written_to_while_it_is_served_is_an_error(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path, asked = tmp_path / "a", np.array([3, 39], np.int64)
    shards = Shards({"items": [old_shard(path)]})
    assert (shards.read("items", asked) == ROWS[asked]).all()
    change(path)
    for _ in range(2):
        with pytest.raises(ShardError, match=f"^table items: {path} was written to while it is served"):
            shards.read("items", asked)
    assert shards.counts["items"] == {"local": 2, "failed": 4}


def test_a_file_that_is_written_to_in_the_middle_of_a_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    local = old_shard(path)
    file: Any = local._file
    rows = file.rows

    class Written:
        def __getitem__(self, which: Any) -> Any:
            found = rows[which]
            overwritten(path)
            return found

    file.rows = Written()
    with pytest.raises(ShardError, match="was written to while it is served"):
        local.read(np.arange(4))


def test_a_file_that_is_replaced_by_rename_or_deleted_is_read_on(tmp_path: Path) -> None:
    path, other, asked = tmp_path / "a", tmp_path / "b", np.arange(40)
    local = old_shard(path)
    table_file.write(other, "items", [-ROWS], width=6, dtype="float16", model="m")
    other.rename(path)
    assert (local.read(asked) == ROWS).all()
    assert (LocalShard(TableFile(path)).read(asked) == -ROWS).all()
    path.unlink()
    assert (local.read(asked) == ROWS).all()
