# SPDX-License-Identifier: Apache-2.0
"""Rows that are put into a server: all of them or none is found there, and an upload that was ended goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis

from jgr.config import UserError
from jgr.embeddings import redis_shard
from jgr.embeddings.redis_shard import RedisShard, rows_at_once, upload
from jgr.embeddings.shards import ShardError
from jgr.models import table_file
from jgr.models.table_file import RowType, TableHeader
from tests.features.redis_process import RedisProcess

ROWS = np.random.default_rng(5).standard_normal((40, 6)).astype(np.float16)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisProcess]:
    monkeypatch.setattr(redis_shard, "AT_ONCE", 4)
    process = RedisProcess(tmp_path)
    yield process
    process.kill()


def header(folder: Path, dtype: RowType = "float16") -> TableHeader:
    return table_file.write(folder / dtype, "items", [ROWS], width=6, dtype=dtype, model="m")


def held(server: RedisProcess) -> RedisShard:
    return RedisShard(server.address, "items", "m", 5.0)


def test_an_upload_that_was_ended_goes_on_and_a_whole_one_is_left_as_it_is(
    tmp_path: Path, server: RedisProcess
) -> None:
    of = header(tmp_path)

    def ended(done: int, total: int, status: str) -> None:
        assert (total, status) == (40, "uploading")
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(server.address, of, ROWS, 5.0, show=ended)
    with pytest.raises(ShardError, match="has no rows of model 'm'"):
        held(server)
    told = []
    assert upload(server.address, of, ROWS, 5.0, show=lambda *step: told.append(step)) == 28
    steps = range(4, 41, 4)
    assert told == [(at, 40, "uploading") for at in steps] + [(at, 40, "checking") for at in steps]
    remote = held(server)
    assert remote.header == of and (remote.read(np.arange(40)) == ROWS).all()
    assert upload(server.address, of, ROWS, 5.0, overwrite=False) == 0
    with redis.Redis.from_url(server.address) as client:
        client.set("jgr:rows:items:m:7", b"damaged")
    assert upload(server.address, of, ROWS, 5.0, overwrite=False) == 1
    assert (remote.read(np.arange(40)) == ROWS).all()
    remote.close()


def test_a_part_of_the_rows_has_a_digest_of_its_own(tmp_path: Path, server: RedisProcess) -> None:
    part = msgspec.structs.replace(header(tmp_path), first=30, held=10)
    assert upload(server.address, part, ROWS[30:], 5.0) == 10
    remote = held(server)
    assert (remote.header.first, remote.header.held) == (30, 10)
    assert remote.header.sha256 == hashlib.sha256(ROWS[30:].tobytes()).hexdigest()
    assert (remote.read(np.arange(30, 40)) == ROWS[30:]).all()
    with pytest.raises(ShardError, match="lacks row 29"):
        remote.read(np.arange(29, 31))
    remote.close()


def test_other_rows_of_the_model_are_replaced_on_request_alone(tmp_path: Path, server: RedisProcess) -> None:
    wide, narrow = ROWS.astype(np.float32), header(tmp_path)
    before = header(tmp_path, "float32")
    upload(server.address, before, wide, 5.0)
    with pytest.raises(UserError, match="holds other rows of this model: --overwrite replaces it"):
        upload(server.address, narrow, ROWS, 5.0, overwrite=False)
    assert held(server).header == before
    assert upload(server.address, narrow, ROWS, 5.0, overwrite=True) == 40
    assert held(server).header == narrow and (held(server).read(np.arange(40)) == ROWS).all()


def test_what_is_no_header_is_told_by_its_key_and_replaced_on_request(
    tmp_path: Path, server: RedisProcess
) -> None:
    of = header(tmp_path)
    upload(server.address, of, ROWS, 5.0)
    with redis.Redis.from_url(server.address) as client:
        client.set("jgr:rows:items:m", b"null")
    with pytest.raises(
        ShardError, match=r"at jgr:rows:items:m is no header: .*upload --overwrite writes it anew"
    ):
        held(server)
    with pytest.raises(UserError, match="holds other rows of this model"):
        upload(server.address, of, ROWS, 5.0, overwrite=False)
    assert upload(server.address, of, ROWS, 5.0, overwrite=True) == 0
    assert held(server).header == of


def test_a_server_that_drops_rows_is_told_and_has_no_table(tmp_path: Path, server: RedisProcess) -> None:
    def dropping(done: int, total: int, status: str) -> None:
        if (done, status) == (40, "uploading"):
            with redis.Redis.from_url(server.address) as client:
                client.delete("jgr:rows:items:m:7")

    with pytest.raises(
        ShardError, match=r"lacks row 7 \(read back after the upload; a server with too little"
    ):
        upload(server.address, header(tmp_path), ROWS, 5.0, show=dropping)
    with pytest.raises(ShardError, match="has no rows of model 'm'"):
        held(server)


def test_rows_at_once_are_bounded_by_bytes_too(tmp_path: Path) -> None:
    of = header(tmp_path)
    assert rows_at_once(of) == 1024
    assert rows_at_once(msgspec.structs.replace(of, width=1 << 16, dtype="float32")) == 15
