# SPDX-License-Identifier: Apache-2.0
"""jgr.Engine over a fake executor: one and several, threads and loops, what is refused, how it ends.

Answers by a real model, against HTTP, are in test_same_answers.py.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgr
from jgr.client import embedded
from jgr.config import Config
from jgr.serving.api import Item
from jgr.serving.engine.contract import Progress
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import Kind
from tests.serving.fakes import PATIENCE_S, FakeExecutor, make_config, make_engine


class Made:
    """An Engine over a FakeExecutor."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *settings: str, error: Exception | None = None
    ) -> None:
        config = make_config(*settings)
        self.executor = FakeExecutor(make_profiles(config.profiles))
        if error is not None:
            self.executor.errors.append(error)
        monkeypatch.setattr(embedded, "load_any", self._load)
        self.engine = jgr.Engine(config)
        self.executor.wait_entered()

    def _load(self, config: Config, kinds: Sequence[Kind]) -> Any:
        return make_engine(config, self.executor)

    def occupy(self, pool: ThreadPoolExecutor) -> Any:
        """A request that holds the executor until it is released."""
        self.executor.hold()
        future = pool.submit(self.engine.recommend, ["a"], top_k=3)
        self.executor.wait_entered()
        return future


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    made = Made(monkeypatch)
    yield made
    made.executor.release()
    made.engine.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ids(answer: jgr.Answer) -> list[str]:
    return [item.item_id for item in answer.items]


def test_one_history_gives_an_answer_and_several_a_list(made: Made) -> None:
    engine = made.engine
    answer = engine.recommend(["a"], top_k=3, include_metadata=True)
    assert ids(answer) == ["c", "d", "7"]  # as tests/serving/fakes.py computes them
    assert isinstance(answer, jgr.Answer) and isinstance(answer.items[0], jgr.Item)
    assert (answer.items[0].metadata, len(answer.id)) == ({"title": "title of c"}, 32)
    several = engine.recommend([["a"], ["a", "c"], [7]], top_k=3)
    assert [ids(one) for one in several] == [
        ids(engine.recommend(h, top_k=3)) for h in (["a"], ["a", "c"], [7])
    ]
    assert [ids(one) for one in engine.recommend([["a"]], top_k=3)] == [["c", "d", "7"]]
    assert engine.info.max_beam_width == 5


def test_candidates_are_shared_or_given_for_each_history(made: Made) -> None:
    engine = made.engine
    one = ids(engine.rank(["a"], ["b", "c"]))
    other = ids(engine.rank(["a"], ["d", "7", "c"], top_k=2))
    assert sorted(one) == ["b", "c"] and len(other) == 2
    assert [ids(a) for a in engine.rank([["a"], ["a"]], ["b", "c"])] == [one, one]
    assert ids(engine.rank([["a"], ["a"]], [["b", "c"], ["d", "7", "c"]])[0]) == one


def test_fields_of_the_user_are_lists_where_there_are_several(made: Made) -> None:
    for users in (["u1", None], np.array(["u1", "u2"])):
        assert len(made.engine.recommend([["a"], ["b"]], top_k=3, user_id=users)) == 2
    for wrong in ("u1", ["u1"], 7):
        with pytest.raises(jgr.InvalidRequest, match="one entry for each of the 2 histories") as caught:
            made.engine.recommend([["a"], ["b"]], top_k=3, user_id=wrong)
        assert caught.value.field == "user_id"
    with pytest.raises(jgr.InvalidRequest, match="candidates must be a list with one entry"):
        made.engine.rank([["a"], ["b"], ["c"]], [["a"], ["b"]])


def test_arrays_are_lists(made: Made) -> None:
    expected = ids(made.engine.recommend(["7", "7"], top_k=3))
    assert ids(made.engine.recommend(np.array([7, 7]), top_k=3)) == expected  # type: ignore[call-overload]
    assert [ids(a) for a in made.engine.recommend(np.array([[7, 7], [7, 7]]), top_k=3)] == [expected] * 2
    assert ids(made.engine.recommend((np.int64(7), np.int64(7)), top_k=3)) == expected  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("history", "fields", "field", "words"),
    [
        ([], {}, "history", "history: must be a list of length 1 or more"),
        ([[]], {}, "history", "length 1 or more"),
        ("a", {}, "history", "history must be a list of item ids, or a list of such lists, not str"),
        (None, {}, "history", "not NoneType"),
        ({"a"}, {}, "history", "not set"),
        ([None], {}, "history[0]", r"history\[0\]: must be a whole number or text, not null"),
        ([1.5], {}, "history[0]", r"history\[0\]: must be"),
        (["a", ["b"]], {}, "history[1]", r"history\[1\]: must be"),
        ([["a"], "b"], {}, "history", r"^histories\[1\]: history: must be a list, not text"),
        ([["a"], ["none"]], {}, "history", r"^histories\[1\]: no item of the history is in the catalog"),
        (["none"], {}, "history", "^no item of the history is in the catalog"),
        (["a"], {"top_k": 0}, "top_k", "top_k: must be a whole number, 1 or more"),
        (["a"], {"top_k": 99}, "top_k", "top_k"),
        (["a"], {"top": 3}, "top", "unknown field 'top'; the nearest is 'top_k'"),
        (["a"], {"beam_width": 99}, "beam_width", "99"),
        (["a"], {"filters": {"alow": ["b"]}}, "filters", "filters: unknown field 'alow'"),
        (["a"], {"deadline_ms": float("nan")}, None, ""),
        (["a"], {"user_id": object()}, None, "cannot be sent: a value of type object is no JSON"),
        (["a\ud800"], {}, None, "cannot be sent"),
    ],
)
def test_a_mistake_is_told_with_its_field(
    made: Made, history: Any, fields: dict[str, Any], field: str | None, words: str
) -> None:
    if fields.get("deadline_ms") is not None:  # NaN is no JSON: it is sent as null, which is no deadline
        assert ids(made.engine.recommend(history, **{"top_k": 3, **fields}))
        return
    with pytest.raises(jgr.InvalidRequest, match=words) as caught:
        made.engine.recommend(history, **{"top_k": 3, **fields})
    assert caught.value.field == field
    assert isinstance(caught.value, jgr.Error)


def test_candidates_that_cannot_be_ranked(made: Made) -> None:
    for candidates, field in (([], "candidates"), (["none"], "candidates[0]"), (["a", "a"], "candidates[1]")):
        with pytest.raises(jgr.InvalidRequest) as caught:
            made.engine.rank(["a"], candidates)
        assert caught.value.field == field
    with pytest.raises(jgr.NotFound, match="there is no model 'other'") as missing:
        made.engine.rank(["a"], ["b"], model="other")
    assert missing.value.field == "model"


def test_several_histories_travel_together(made: Made, pool: ThreadPoolExecutor) -> None:
    first = made.occupy(pool)
    several = pool.submit(made.engine.recommend, [["a"], ["b"], ["c"], ["d"]], top_k=3)
    made.executor.release()
    assert len(several.result(PATIENCE_S)) == 4 and ids(first.result(PATIENCE_S)) == ["c", "d", "7"]
    assert made.executor.batches[-1] == 4


def test_more_histories_than_may_wait_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, "batching.max_queue=2")
    assert len(made.engine.recommend([["a"]] * 25, top_k=3)) == 25
    made.engine.close()


def test_overload_deadline_and_failure_have_their_own_errors(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    made = Made(monkeypatch, "batching.max_queue=1", "batching.order=edf")
    running = made.occupy(pool)
    with pytest.raises(jgr.DeadlineExceeded, match="the deadline has passed") as late:
        made.engine.recommend(["a"], top_k=3, deadline_ms=1)
    assert late.value.request_id and late.value.retry_after is None

    async def fill() -> None:
        waiting = asyncio.create_task(made.engine.arecommend(["a"], top_k=3))
        await asyncio.sleep(0)
        with pytest.raises(jgr.Overloaded, match="too many requests are waiting") as refused:
            await made.engine.arecommend(["a"], top_k=3)
        assert refused.value.retry_after == 1.0
        waiting.cancel()  # which frees the place in the queue
        with pytest.raises(asyncio.CancelledError):
            await waiting
        queued = asyncio.create_task(made.engine.arecommend(["a"], top_k=3))
        await asyncio.sleep(0)
        made.executor.errors.append(RuntimeError("broken"))  # of the batch that runs
        made.executor.release()
        assert ids(await queued) == ["c", "d", "7"]

    asyncio.run(fill())
    with pytest.raises(jgr.InternalError, match="the model failed; see"):
        running.result(PATIENCE_S)
    made.engine.close()


def test_from_a_running_loop_and_from_many_threads(made: Made, pool: ThreadPoolExecutor) -> None:
    async def notebook() -> list[list[str]]:
        blocking = made.engine.recommend(["a"], top_k=3)
        awaited = await asyncio.gather(*(made.engine.arecommend(["a"], top_k=3) for _ in range(5)))
        several = await made.engine.arecommend([["a"], ["a"]], top_k=3)
        ranked = await made.engine.arank([["a"]], ["c"])
        return [ids(answer) for answer in (blocking, *awaited, *several, *ranked)]

    assert asyncio.run(notebook()) == [["c", "d", "7"]] * 8 + [["c"]]
    items = ["a", "b", "c", "d"] * 8
    asked = [pool.submit(made.engine.recommend, [item], top_k=3) for item in items]
    expected = {item: ids(made.engine.recommend([item], top_k=3)) for item in items}
    assert [ids(one.result(PATIENCE_S)) for one in asked] == [expected[item] for item in items]


def test_a_closed_engine_is_unavailable(monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    made = Made(monkeypatch)
    with made.engine as engine:
        running = made.occupy(pool)
        closing = pool.submit(engine.close)  # finishes what was asked
        made.executor.release()
        assert ids(running.result(PATIENCE_S)) == ["c", "d", "7"]
        closing.result(PATIENCE_S)
    engine.close()
    with pytest.raises(jgr.Unavailable, match="the engine is closed"):
        engine.recommend(["a"], top_k=3)
    with pytest.raises(jgr.Unavailable, match="the engine is closed"):
        asyncio.run(engine.arank([["a"]], ["b"]))


def test_a_forked_process_is_refused_rather_than_left_waiting(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as child:
        child.setattr(embedded.os, "getpid", lambda: -1)
        with pytest.raises(jgr.Unavailable, match="forked process"):
            made.engine.recommend(["a"], top_k=3)
    assert made.engine.recommend(["a"], top_k=3).items


def test_what_waits_when_an_engine_closes_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    made = Made(monkeypatch, "batching.max_queue=1", "server.drain_timeout_s=0.05")
    running = made.occupy(pool)
    several = pool.submit(made.engine.recommend, [["a"]] * 9, top_k=3)
    closing = pool.submit(made.engine.close)
    for future in (running, several):
        with pytest.raises(jgr.Unavailable):
            future.result(PATIENCE_S)
    made.executor.release()
    closing.result(PATIENCE_S)


class ManyPrograms(FakeExecutor):
    """Its warm-up goes on until it is stopped, or for so long that nobody waits for its end."""

    whole = False

    def warm_up(self, progress: Progress) -> None:
        self._pass()
        end_s = time.monotonic() + PATIENCE_S / 4
        while time.monotonic() < end_s:
            progress(1, 2, "a program")
        self.whole = True


def test_an_engine_that_is_stopped_in_its_warm_up_compiles_no_further_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = ManyPrograms(make_profiles(make_config().profiles))
    monkeypatch.setattr(embedded, "load_any", lambda config, kinds: make_engine(config, executor))
    thread = embedded._EngineThread(
        make_config(), ["rank"]
    )  # as a construction that is interrupted leaves it
    executor.wait_entered()
    thread.stop()
    assert not executor.whole
    thread.started.result(PATIENCE_S)
    with pytest.raises(jgr.Unavailable, match="the engine is closed"):
        thread.metrics()


def engine_threads() -> Sequence[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jgr-engine"]


def test_an_engine_that_nobody_holds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_threads()
    made = Made(monkeypatch)
    assert len(engine_threads()) == len(before) + 1
    del made.engine
    gc.collect()
    assert engine_threads() == before


def test_an_engine_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_threads()
    with pytest.raises(RuntimeError, match="no device"):
        Made(monkeypatch, error=RuntimeError("no device"))
    for thread in set(engine_threads()) - set(before):
        thread.join(PATIENCE_S)
    assert engine_threads() == before
    with pytest.raises(jgr.Error, match=r"model\.path: there is no model folder"):
        jgr.Engine("runs/none")
    with pytest.raises(jgr.Error, match=r"the nearest is 'beam\.width'"):
        jgr.Engine(Config(), ["beam.widht=3"])
    for settings in ("beam.width=3", {"beam.width": 3}):
        with pytest.raises(jgr.Error, match="settings must be a list such as"):
            jgr.Engine(Config(), settings)  # type: ignore[arg-type]
    for kinds in ("rank", [], ["rank", "prefill"]):
        with pytest.raises(jgr.Error, match=r'kinds must be a list such as \["rank"\]'):
            jgr.Engine(Config(), kinds=kinds)  # type: ignore[arg-type]


def test_a_scorer_is_not_loaded_for_what_it_cannot_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "sasrec"}')
    with pytest.raises(
        jgr.Error, match=r"kinds: .* is a scorer, which answers rank alone, not \['recommend'\]"
    ):
        jgr.Engine(tmp_path, kinds=["recommend"])


def test_an_answer_shows_what_it_has_alone() -> None:
    item = Item(item_id="a", score=0.5, rank=1)
    assert repr(item) == "Item(item_id='a', score=0.5, rank=1)"
    item.scores = {"click": 0.5}
    assert repr(item) == "Item(item_id='a', score=0.5, rank=1, scores={'click': 0.5})"


def test_metrics_are_what_a_server_shows(made: Made) -> None:
    assert 'jgr_batch_size_count{kind="recommend"} 0.0' in made.engine.metrics()
    made.engine.recommend(["a"], top_k=3)
    assert 'jgr_batch_size_count{kind="recommend"} 1.0' in made.engine.metrics()
    made.engine.close()
    with pytest.raises(jgr.Unavailable, match="the engine is closed"):
        made.engine.metrics()
