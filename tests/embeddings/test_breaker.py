# SPDX-License-Identifier: Apache-2.0
"""When a server that does not answer is asked again, by hand; and a shard that fails at once meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jgr.embeddings.breaker import AFTER, Breaker
from jgr.embeddings.redis_shard import RedisShard
from jgr.embeddings.shards import ShardAway, ShardError
from tests.embeddings.test_shards import ROWS, filled, shard
from tests.features.redis_process import Proxy, RedisProcess


def test_after_some_failures_in_a_row_one_question_in_a_while_is_asked() -> None:
    breaker = Breaker()
    for _ in range(AFTER):
        assert breaker.may(5.0)
        breaker.failed(5.0)
    assert not breaker.may(5.09)
    assert breaker.may(5.1) and not breaker.may(5.15), "the one that asks is not back yet"
    assert not breaker.may(8.0), "not even where it takes longer than the while"
    breaker.failed(5.3)
    assert not breaker.may(5.49) and breaker.may(5.5)
    for _ in range(9):
        breaker.failed(6.0)
    assert not breaker.may(6.99) and breaker.may(7.0), "the while does not become longer than a second"
    breaker.worked()
    assert breaker.may(7.0) and breaker.may(7.0) and breaker.failed_in_row == 0


def test_a_question_that_ends_with_any_error_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, now_s, asked = RedisProcess(tmp_path), [0.0], np.array([30], np.int64)
    filled(server, shard(tmp_path / "a", 0, 10))
    try:
        remote = RedisShard(server.address, "items", "m", 5.0, lambda: now_s[0])

        def broken(*given: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(remote._server, "read", broken)
            for _ in range(AFTER):
                with pytest.raises(MemoryError):
                    remote.read(asked)
        with pytest.raises(ShardAway, match="was not asked"):
            remote.read(asked)
        now_s[0] = 0.1
        assert (remote.read(asked) == ROWS[asked]).all()
    finally:
        server.kill()


def test_a_shard_that_hangs_costs_its_time_a_few_times_and_comes_back(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    filled(server, shard(tmp_path / "a", 0, 10))
    proxy, now_s, asked = Proxy(server.socket), [0.0], np.array([30, 31], np.int64)
    try:
        remote = RedisShard(proxy.address, "items", "m", 0.1, lambda: now_s[0])
        proxy.hold()
        for _ in range(AFTER):
            with pytest.raises(ShardAway, match="failed: Timeout"):
                remote.read(asked)
        for _ in range(100):
            with pytest.raises(
                ShardAway, match="was not asked, since it failed 3 times in a row, at last so: table "
            ):
                remote.read(asked)
        proxy.release()
        now_s[0] = 0.1
        assert (remote.read(asked) == ROWS[asked]).all() and (remote.read(asked) == ROWS[asked]).all()
        for _ in range(2 * AFTER):  # it answers: that it lacks a row says nothing of the others
            with pytest.raises(ShardError, match="lacks row 77"):
                remote.read(np.array([77], np.int64))
        assert (remote.read(asked) == ROWS[asked]).all()
    finally:
        proxy.close()
        server.kill()
