# SPDX-License-Identifier: Apache-2.0
"""A day of a server with two models, replayed from its journal into fresh policies: the same plans, byte for byte."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jgr.cache.memory import Memory
from jgr.config import Config, ConfigError, override
from jgr.serving.engine.engine import AnyEngine, Engine
from jgr.serving.engine.journal import Journal, Line, Opened, journal_at, read, replay
from jgr.serving.policies.admission import LEAST_NS
from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import (
    Accepted,
    Candidates,
    Job,
    Plan,
    Profile,
    Rejected,
    Request,
    Start,
    User,
)
from jgr.serving.policies.run_costs import RunCosts
from jgr.serving.versions.sources import make_engine
from tests.serving.decoders.test_cached_server import ids
from tests.serving.fakes import PATIENCE_S, Pending
from tests.serving.scorer_fakes import ITEMS, MONDAY, ScorerServer, fake_engine
from tests.serving.versions.test_shared_memory import ADMIN, ASKED, Two
from tools import show_journal


class Held:
    """An engine's executors, whose launches can be held, and told to fail."""

    def __init__(self, engine: AnyEngine) -> None:
        self._executors = engine.served.executors
        self._launch, self._executors.launch = self._executors.launch, self.launch
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.open.set()
        self.errors: list[Exception] = []

    def launch(self, start: Start, work: Any) -> Any:
        error = self.errors.pop() if self.errors else None  # what is told later is for later launches
        self.entered.release()
        assert self.open.wait(PATIENCE_S)
        if error is not None:
            raise error
        return self._launch(start, work)


def ranking(model: str, user: int, **given: Any) -> dict[str, Any]:
    """A request of a user whose history depends on its number."""
    if model == "tiny":
        return {**ASKED, "user_id": f"u{user}", "scenario": 0, "time": ASKED["time"] + user, **given}
    history = ids(*range(user % 5, 9))
    return {"model": "jgr", "user_id": f"u{user}", "history": history, "candidates": ids(20, 21), **given}


def wait_for(server: Two, family: str, model: str) -> None:
    """Ask until a model's series is 1; each question lets the server's loop turn."""
    for _ in range(10_000):
        if server.metrics(family)[f'{family}{{model="{model}"}}'] == 1:
            return
    raise AssertionError(f"{family} of {model} is not 1")


def the_day(server: Two) -> None:
    """Both kinds of requests, alone and together, of users who come again; and everything that can go wrong."""
    port = int(server.listener.url.rpartition(":")[2])

    def send(body: dict[str, Any], path: str = "/v1/rank") -> Pending:
        return Pending(port, "POST", path, body, ADMIN)

    def statuses(*sent: Pending) -> Counter[int]:
        return Counter(each.reply().status for each in sent)

    for user in (0, 1, 0, 2, 3, 1):
        assert statuses(*(send(ranking(model, user)) for model in ("jgr", "tiny"))) == {200: 2}
    recommend = {"model": "jgr", "history": ids(1, 2), "top_k": 2}
    assert statuses(*(send(recommend, "/v1/recommend") for _ in range(3))) == {200: 3}
    for model in ("jgr", "tiny"):
        held = Held(next(d.engine for d in server.deployments if d.name == model))
        held.open.clear()
        running = send(ranking(model, 4))
        assert held.entered.acquire(timeout=PATIENCE_S)
        late, gone = send(ranking(model, 5, deadline_ms=0.01)), send(ranking(model, 6))
        assert late.reply().status == 429, "it could not be in time"
        if model == "jgr":  # whose second batch waits for the first; a scorer has another lane
            wait_for(server, "jgr_queue_depth", model)
        else:
            assert held.entered.acquire(timeout=PATIENCE_S)
        gone.abandon()
        wait_for(server, "jgr_cancelled_total", model)
        held.open.set()
        assert running.reply().status == 200
        held.errors.append(ArithmeticError("out of memory"))
        assert statuses(send(ranking(model, 7))) == {500: 1}
    assert Pending(port, "DELETE", "/v1/users/u0/cache", None, ADMIN).reply().status == 200
    server.memory.pool.lose(server.memory.pool.epoch, ArithmeticError("the device is gone"))
    assert statuses(*(send(ranking(model, user)) for model in ("jgr", "tiny") for user in (0, 1))) == {200: 4}
    server.reload()
    assert statuses(*(send(ranking(model, user)) for model in ("jgr", "tiny") for user in range(4))) == {
        200: 8
    }


def fresh_policies(server: Two) -> tuple[Any, Any]:
    """`make` and `end` of `replay`: engines that have never run, in memory of their own."""
    memory = Memory.of(*server.configs.values())
    engines: dict[int, AnyEngine] = {}

    def make(number: int, opened: Opened) -> Any:
        model = opened.name.partition("@")[0]
        engines[number], _ = make_engine(server.configs[model], False, memory)
        served = engines[number].served
        served.started()
        return served.policy(bytes(opened.measured))

    return make, lambda number: engines[number].served.close(idle=True)


def opened_names(path: Path) -> list[str]:
    return [line.event.name for line in read(path) if isinstance(line.event, Opened)]


def test_a_day_of_two_models_replays_into_the_same_plans(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    server = Two(tmp_path, f"server.journal={path}", "batching.in_flight=1")
    try:
        the_day(server)
    finally:
        server.stop()
    assert [line.split("  ")[:3] for line in show_journal.lines(path)] == [
        ["journal", f"policy {number}", name] for number, name in enumerate(opened_names(path))
    ]
    lines = list(read(path))
    shown = show_journal.policies(path)
    assert sum((policy.calls for policy in shown), Counter[str]()).total() == len(lines) - 6
    assert all(policy.ended for policy in shown)
    events = Counter(type(line.event).__struct_config__.tag for line in lines)
    assert events["open"] == 3 and events["close"] == 3, "two models, and one of them again"
    assert {"submit", "plan", "commit", "cancel", "renew", "forget", "drain"} <= events.keys()
    assert {line.event.outcome for line in lines if hasattr(line.event, "outcome")} == {"well", "failed"}
    replayed = 0
    for line, result in replay(lines, *fresh_policies(server)):
        assert result == bytes(line.result), f"line {replayed}: {line.event}"
        replayed += 1
    assert replayed == len(lines) - events["open"] - events["close"] > 100


def test_what_was_refused_beforehand_is_refused_again_in_a_replay(tmp_path: Path) -> None:
    profile, ms = Profile("recommend", 1, 8, 1), 1_000_000

    def make(number: int = 0, opened: Opened | None = None) -> Batcher:
        costs = RunCosts({profile: 0.010})
        return Batcher([profile], max_tokens=100, max_wait_ns=0, max_queue=9, costs=costs)

    def job(number: int, deadline_ms: int) -> Job:
        return Job(number, "recommend", 8, 1, 0, deadline_ms * ms)

    path = tmp_path / "journal"
    policy = journal_at(str(path)).follow("model/catalog", {}, make(), 0)
    policy.submit(job(1, 50), 1)
    assert policy.refuses(job(-1, 50), 2) is None
    assert policy.refuses(job(-1, 5), 3) == Rejected("too_late", 3 + 10 * ms + LEAST_NS)
    policy.submit(job(2, 50), 4)
    lines = list(read(path))
    tags = [type(line.event).__struct_config__.tag for line in lines]
    assert tags == ["open", "submit", "refuses", "submit"], "what changed nothing is not written"
    assert [(result, bytes(line.result)) for line, result in replay(lines, make, lambda number: None)] == [
        (bytes(line.result), bytes(line.result)) for line in lines[1:]
    ]


def test_every_line_and_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    starts = (
        Start(0, 0, Profile("rank", 1, 8, 4), (Request(1), Request(2)), epoch=3),
        Start(1, 2, 128, (Candidates(3, 0, 77),)),
        Start(2, 0, 0, (User(3),)),
    )
    for plain in (Plan(starts, (4, 5)), Accepted(3, 10)):
        assert msgspec.json.decode(msgspec.json.encode(plain), type=type(plain)) == plain
    journal = journal_at(str(tmp_path / "journal"))
    assert journal_at(str(tmp_path / "journal")) is journal
    with pytest.raises(ConfigError, match=r"server\.journal: .*: No such file or directory"):
        journal_at(str(tmp_path / "nowhere" / "journal"))
    with pytest.raises(ConfigError, match=r"server\.journal: .*null byte"):
        journal_at("a\0b")


def test_a_damaged_journal_is_named_by_its_line_and_one_that_was_cut_off_is_read_to_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    good = b'{"policy":0,"now_ns":5,"event":{"type":"plan"},"result":{"starts":[],"expired":[]}}\n'
    path.write_bytes(good + good[:-30])
    assert [line.now_ns for line in read(path)] == [5]
    assert all(isinstance(line, Line) for line in read(path))
    path.write_bytes(good + b'{"policy":0}\n')
    with pytest.raises(ConfigError, match="journal, line 2: "):
        list(read(path))
    path.write_bytes(good + b'{"policy":0,"now_ns":1,"event":{"type":"open","name":"\xff"}}\n')
    with pytest.raises(ConfigError, match="journal, line 2: "):
        list(read(path))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        list(read(tmp_path))


def test_a_journal_without_its_beginning_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"policy":3,"now_ns":5,"event":{"type":"plan"},"result":{"starts":[],"expired":[]}}\n')
    assert show_journal.main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: no line opens policy 3: the file's beginning is gone\n"


def test_a_restart_keeps_the_journal_before_it_and_only_the_owner_reads_either(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for at in (1, 2):
        journal = Journal(path)
        journal.write(Line(0, at, Opened("model")))
        journal.close()
    old = path.with_name("journal.old")
    assert [line.now_ns for file in (old, path) for line in read(file)] == [1, 2]
    assert [file.stat().st_mode & 0o777 for file in (old, path)] == [0o600, 0o600]


def test_two_servers_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    running = Journal(path)
    running.write(Line(0, 1, Opened("model")))
    with pytest.raises(ConfigError, match=r"server\.journal: .*journal: another server writes to it"):
        Journal(path)
    running.write(Line(0, 2, Opened("model")))
    running._file.close()
    assert [line.now_ns for line in read(path)] == [1, 2] and os.listdir(tmp_path) == ["journal"]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(ConfigError, match="it must be a file"):
            Journal(path)


class FullDisk(io.RawIOBase):
    """A file on a disk that is full after `room` more bytes."""

    name = "/full/journal"

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def write(self, text: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = bytes(text)[: self.room]
        self.room -= len(written)
        self.content += written
        return len(written)


@pytest.mark.parametrize("room", [0, 30, 1000])
def test_a_full_disk_ends_the_journal_and_not_the_serving(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    journal, disk = journal_at(str(path)), FullDisk(room)
    journal.close()
    journal._file = disk  # type: ignore[assignment]
    served = fake_engine()[0].served
    config = override(Config(), "server.port=0")
    with ScorerServer(config, Engine(served, None, journal=str(path))) as server:
        for _ in range(5):
            server.rank(history=ITEMS[:1], history_times=[MONDAY], candidates=ITEMS[1:3])
    assert [record.message.partition(" ends here")[0] for record in caplog.records] == [
        "server.journal: /full/journal"
    ]
    path.write_bytes(disk.content)
    assert len(list(read(path))) == disk.content.count(b"\n"), "what was written before can be read"
