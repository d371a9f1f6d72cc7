# SPDX-License-Identifier: Apache-2.0
"""Executors around a toy ranker whose scores are worked out by hand: sharing of the user's part, features from the
staging buffer, padding, donation, and what a fault leaves behind (FLAME-6, 10, 14)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.entries import Stored
from jgr.cache.pool import DevicePool, StateView
from jgr.config import Config, ConfigError, override
from jgr.features.addresses import open_store
from jgr.features.schema import Schema
from jgr.features.stores import StoreError
from jgr.models import scorers
from jgr.models.retrievers import items_digest
from jgr.models.scorers import Candidates, Needs, Users
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.weights import Weights
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.scorers import executors
from jgr.serving.scorers.executors import Executor, PartWork, Programs, ReadWork, Share, fastest, rising
from jgr.serving.scorers.loading import ScorerModel, make_scorer_engine
from jgr.serving.scorers.user_block import new_block
from tests.features.redis_process import Proxy, RedisProcess
from tests.serving.scorer_fakes import CATALOG, ITEMS, ScorerServer

SCHEMA = Schema.parse("y:int16, x:float32[2]")
S = 3


@dataclass(frozen=True)
class ToyConfig:
    """Score of an item, task "a": the user's sum + its row + 1000 x[0] + 10000 x[1]; task "b": the user's count."""

    n_items: int = len(ITEMS)
    max_items: int = S
    items: str = items_digest(ITEMS)


class ToyParams(NamedTuple):
    embed: Any


class Toy:
    def needs(self, cfg: ToyConfig) -> Needs:
        return Needs(cfg.max_items, ("a", "b"), slots=(5,), scenarios=9, features=(("x", 2),))

    def read(self, params: Any, cfg: ToyConfig, users: Users) -> Any:
        known = users.rows >= 0
        total = jnp.where(known, users.rows, 0).sum(axis=1) + 100 * users.context[:, 0] + 7 * users.scenario
        return {"sum": total * params.embed, "count": known.sum(axis=1)}

    def score(self, params: Any, cfg: ToyConfig, state: Any, candidates: Candidates) -> jax.Array:
        x = candidates.features["x"]
        first = state["sum"][:, None] + candidates.rows + 1000 * x[..., 0] + 10000 * x[..., 1]
        scores = jnp.stack([first, jnp.broadcast_to(state["count"][:, None], first.shape)], axis=-1)
        return jnp.where(candidates.rows[..., None] >= 0, scores, 0.0).astype(jnp.float32)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scorers._SCORERS, ToyConfig, Toy())


def programs(share: Share) -> Programs:
    cfg: Any = ToyConfig()
    made = Programs(cfg, ToyParams(jnp.float32(1.0)), (2, 4), share, SCHEMA)
    for size in made.layouts:
        made.compile(size)
    return made


def block(made: Programs, rows: tuple[int, ...] = (1, 2), context: int = 3, scenario: int = 0) -> Any:
    bytes_, views = new_block(made.user)
    assert views.keys() == {"rows", "context", "scenario"}  # and nothing that is not read
    views["rows"][: len(rows)], views["context"][0], views["scenario"][0] = rows, context, scenario
    return bytes_


def records(*x: tuple[float, float]) -> npt.NDArray[np.void]:
    return SCHEMA.records(SCHEMA.pack({"y": np.full((len(x), 1), 9), "x": np.array(x)}))


def rows(*given: int) -> npt.NDArray[np.int32]:
    return np.array(given, np.int32)


@pytest.mark.parametrize("share", ["part", "request"])
def test_a_part_is_scored_with_its_user_and_its_features_and_padding_is_cut(share: Share) -> None:
    made = programs(share)
    four, two = Executor(made, 4, None), Executor(made, 2, None)
    user: Any = block(made)
    if share == "request":
        user = Executor(made, USER_PART, None).run(ReadWork(user)).state
    full = four.run(PartWork(rows(10, 11, 12, 13), user, records((1, 0), (0, 1), (0, 0), (2, 2))))
    assert full.tolist() == [[1313, 2], [10314, 2], [315, 2], [22316, 2]]
    less = four.run(PartWork(rows(20), user, records((0.5, 0))))
    assert less.tolist() == [[823, 2]]  # nothing of the part before
    assert full.tolist() == [
        [1313, 2],
        [10314, 2],
        [315, 2],
        [22316, 2],
    ]  # nor is that part's answer written over
    assert two.run(PartWork(rows(20), user, records((0.5, 0)))).tolist() == less.tolist()


def test_a_part_may_have_its_user_in_it_and_in_between_be_given_a_state() -> None:
    made = programs("request")
    executor, other = Executor(made, 2, None), block(made, rows=(5,), scenario=1)
    state = Executor(made, USER_PART, None).run(ReadWork(other)).state
    for _ in range(2):
        whole = executor.run(PartWork(rows(20), block(made), records((0.5, 0)))).tolist()
        given = executor.run(PartWork(rows(20), state, records((0.5, 0)))).tolist()
        assert whole == [[823, 2]] and given != whole
        assert given == executor.run(PartWork(rows(20), other, records((0.5, 0)))).tolist()


def test_scores_are_written_in_place() -> None:
    memory = programs("request").compile(4).memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 4 * 2 * 4


def test_a_fault_leaves_an_executor_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs("request")
    reads, executor = Executor(made, USER_PART, None), Executor(made, 2, None)
    user = reads.run(ReadWork(block(made))).state
    with pytest.raises(ValueError):
        executor.run(PartWork(rows(1, 2, 3), user, records((0, 0))))  # more than fit
    broken = executor._staging
    monkeypatch.setattr(broken, "run", partial(_raise, ArithmeticError("the device is gone")))
    with pytest.raises(ArithmeticError):
        executor.run(PartWork(rows(1), user, records((0, 0))))
    assert executor._staging is not broken
    assert executor.run(PartWork(rows(1), user, records((0, 0)))).tolist() == [[304, 2]]


def _raise(error: Exception, *given: Any) -> Any:
    raise error


def test_a_users_part_is_kept_and_fetched_and_computed_where_the_pool_was_lost() -> None:
    made = programs("cache")
    states = StateView(DevicePool(10, 1024), made.kept)
    reads = Executor(made, USER_PART, states)
    cells = tuple(range(states.room.cells))
    written = reads.run(ReadWork(block(made), Stored(cells, 0, True)))
    found = reads.run(ReadWork(block(made, context=0), Stored(cells, 0, False)))  # its block is not looked at
    lost = reads.run(ReadWork(block(made, context=0), Stored(cells, 1, False)))
    assert [(r.cached, r.kept) for r in (written, found, lost)] == [
        ("nothing", True),
        ("all", True),
        ("nothing", False),
    ]
    assert [int(r.state["sum"][0]) for r in (written, found, lost)] == [303, 303, 3]


def engine(store: str, *settings: str) -> Any:
    """Over the toy, with features of a store."""
    cfg: Any = ToyConfig()
    config = override(
        Config(), "executors.sizes=2,4", "server.port=0", "features.max_wait_ms=20000", *settings,
        f"features.store={store}",
    )  # fmt: skip
    return config, make_scorer_engine(
        ScorerModel(Weights(cfg, ToyParams(jnp.float32(1.0))), "r", Path()), config, CATALOG, Metrics()
    )


def fill(address: str) -> None:
    store = open_store(address, 5.0, create=True)
    store.set_schema(str(SCHEMA))
    of_row = np.arange(30, dtype=np.float32)
    values = SCHEMA.pack({"y": np.zeros((30, 1)), "x": np.stack([of_row, 0 * of_row], axis=1)})
    store.put_many(ITEMS[:30], values)
    store.close()


def test_redis_slow_and_dead_costs_features_and_no_answers(tmp_path: Path) -> None:
    """Over HTTP: what is missing is counted, and scored with the default record; deadlines hold while Redis hangs."""
    with RedisProcessAt(tmp_path) as (redis, proxy):
        fill(redis.address)
        config, made = engine(proxy.address, "features.timeout_ms=20000")
        with ScorerServer(config, made) as server:

            def rank(first: int, count: int, **given: Any) -> tuple[int, dict[str, int], dict[str, float]]:
                body = {
                    "history": ["B001"],
                    "context": {"slot0": 1},
                    "candidates": ITEMS[first : first + count],
                }
                answer = server.rank(**body, **given)
                usage = answer["usage"]
                found = {item["item_id"]: item["score"] for item in answer["items"]}
                return usage["feature_missing"], usage["feature_stale"], found  # type: ignore[return-value]

            missing, stale, found = rank(25, 10)
            assert (missing, stale) == (5, 0)
            assert found == {ITEMS[row]: 101 + row + 1000 * row * (row < 30) for row in range(25, 35)}
            proxy.hold()
            missing, stale, found = rank(24, 6, deadline_ms=300)
            assert (missing, found["B024"], found["B025"]) == (1, 101 + 24, 101 + 25 + 25_000)
            assert server.metric('jgr_features_total{state="missing"}') == 6
            redis.kill()
            proxy.cut()
            proxy.release()
            missing, stale, found = rank(0, 12, deadline_ms=5000)
            assert (missing, len(found)) == (12, 12)
            status, _ = server.call("/health/ready")
            assert status == 200
            assert server.metric('jgr_feature_events_total{event="failures"}') >= 1


@pytest.mark.parametrize("cache_mb", ["0", "0.001"])
def test_a_server_whose_feature_cache_is_too_small_scores_with_the_stores_values(
    tmp_path: Path, cache_mb: str
) -> None:
    path = str(tmp_path / "features.sqlite")
    fill(path)
    config, made = engine(path, f"features.cache_mb={cache_mb}", "features.buckets=2")
    with ScorerServer(config, made) as server:
        for _ in range(2):
            answer = server.rank(history=["B001"], context={"slot0": 1}, candidates=ITEMS[:35])
            found = {item["item_id"]: item["score"] for item in answer["items"]}
            assert found == {ITEMS[row]: 101 + row + 1000 * row * (row < 30) for row in range(35)}
            assert answer["usage"]["feature_missing"] == 5


class RedisProcessAt:
    """A Redis server, and a proxy before it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> tuple[RedisProcess, Proxy]:
        self._redis = RedisProcess(self._folder)
        self._proxy = Proxy(self._redis.socket)
        return self._redis, self._proxy

    def __exit__(self, *exception: object) -> None:
        self._proxy.close()
        self._redis.kill()


def test_without_a_store_a_model_is_served_without_features_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, made = engine("")
    assert made.served.features is None
    assert "items are ranked without their features x" in caplog.text


def test_a_store_that_does_not_fit_the_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        engine(str(tmp_path / "nothing.sqlite"))
    path = str(tmp_path / "other.sqlite")
    store = open_store(path, 5.0, create=True)
    with pytest.raises(ConfigError, match="jgr features load"):
        engine(path)
    store.set_schema("x:float32")
    store.close()
    with pytest.raises(ConfigError, match=r"the model reads x\[2\]"):
        engine(path)


def test_another_catalog_takes_the_programs_unless_the_records_have_changed(tmp_path: Path) -> None:
    path = str(tmp_path / "features.sqlite")
    fill(path)
    _, first = engine(path)
    second = first.rebuild.engine(CATALOG)
    assert second.served.executors.programs is first.served.executors.programs
    store = open_store(path, 5.0)
    store.set_schema(f"{SCHEMA},z:int8")
    store.close()
    third = first.rebuild.engine(CATALOG)
    assert third.served.executors.programs is not first.served.executors.programs
    for made in (first, second, third):
        assert made.served.features.close()


@pytest.mark.parametrize("slow", [range(0), range(7), range(4, 9)])
def test_what_is_compared_is_timed_on_a_machine_that_is_slow_for_a_while(
    monkeypatch: pytest.MonkeyPatch, slow: range
) -> None:
    now_s, calls = 0.0, 0

    def takes(seconds: float) -> None:
        nonlocal now_s, calls
        now_s += seconds * (50 if calls in slow else 1)
        calls += 1

    monkeypatch.setattr(executors.time, "perf_counter", lambda: now_s)
    found = fastest({"two": [partial(takes, 2.0), partial(takes, 2.5)], "three": [partial(takes, 3.0)]})
    assert found == pytest.approx({"two": 2.0, "three": 3.0})


def test_no_part_costs_more_than_a_larger_one() -> None:
    assert rising({USER_PART: 5.0, 4: 3.0, 8: 2.0, 16: 4.0}) == {USER_PART: 5.0, 4: 2.0, 8: 2.0, 16: 4.0}
    assert rising({}) == {}
