# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of a fleet share: a fleet that runs, callers in an open loop, and one engine to compare with.

The models and the requests are those of the soak: a decoder that recommends, and ranks with a cache, and a scorer that
keeps its users, who come back. The decoder has two versions, behind a link that a deployment would switch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import urllib3
from prometheus_client.parser import text_string_to_metric_families

import jgr
from benchmarks.harness import Missing
from benchmarks.hostile_world import ADMIN, apart, as_lines, generated_catalog, make_models, scores
from benchmarks.soak_world import drawn
from jgr.config import Config, load_config

ROOT = Path(__file__).resolve().parents[1]
RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
START_S, PATIENCE_S, LOOK_S = 240.0, 60.0, 0.1
DEADLINE_MS = 2000.0
GRACE_S = 0.3
"""So much later than its deadline an answer may come that says so."""
MAX_APART = 1e-4
SETTINGS = ("fleet.health_s=1",)


class Models:
    """Both models below a folder. link: the decoder's folder, which is `one`, `two` or another one by now."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.link = folder, folder / "jgr"
        compiled = f"model.compilation_cache={folder / 'compiled'}"
        for seed, name in ((1, "two"), (0, "one")):
            self.files = make_models(folder, compiled, *SETTINGS, seed=seed)
            self.link.rename(folder / name)
        self.switch("one")
        (folder / "empty").mkdir()

    def switch(self, to: str) -> None:
        """Let the link lead elsewhere, as a deployment does before a reload."""
        fresh = self.folder / "fresh"
        fresh.symlink_to(self.folder / to)
        fresh.replace(self.link)

    @property
    def catalog(self) -> bytes:
        """Another catalog of the decoder, as it is uploaded."""
        return as_lines(generated_catalog(shift=1))


class Fleet:
    """`jgr cluster` in a process of its own, with what it has started.

    before: words before the command, such as those that enter a network namespace. url: of one proxy; more may be
    there.
    """

    def __init__(
        self,
        files: Sequence[Path],
        replicas: int,
        folder: Path,
        *settings: str,
        address: str = "",
        before: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "stderr"
        command = [*before, sys.executable, "-c", RUN, "cluster", f"--replicas={replicas}"]
        command += [f"--config={file}" for file in files]
        command += [f"--set={setting}" for setting in settings]
        command += [f"--address={address}"] if address else []
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ | {"RAY_TMPDIR": str(folder), "JAX_PLATFORMS": "cpu"} | dict(environment),
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            self.process.wait()
            raise Missing(f"the fleet did not start: {self.log.read_text()[-2000:]}")
        self.replicas = replicas

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in children:  # those that a killed parent has left
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        answer = urllib3.request(
            method, self.url + path, body=body, headers=ADMIN, timeout=PATIENCE_S, retries=False
        )
        with suppress(ValueError):
            return answer.status, json.loads(answer.data)
        return answer.status, answer.data.decode(errors="replace")

    def change(self, path: str, body: bytes | None = None) -> Any:
        """Ask for a change of all, again and again while another one goes on."""
        ends_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_s:
            with suppress(urllib3.exceptions.HTTPError):
                status, answer = self.ask("POST", path, body)
                if status < 300:
                    return answer
                if status not in (409, 503):
                    raise RuntimeError(f"{path}: {status} {answer}")
            time.sleep(LOOK_S)
        raise RuntimeError(f"{path}: refused for {PATIENCE_S} s")

    def served(self) -> dict[str, tuple[str, str]]:
        """The decoder's version and its catalog's, of each replica that answers, by its name."""
        try:
            status, text = self.ask("GET", "/metrics")
        except urllib3.exceptions.HTTPError:
            return {}
        found: dict[str, dict[str, str]] = {}
        for family in text_string_to_metric_families(text) if status == 200 else ():
            for sample in family.samples:
                if sample.name in ("jgr_model_info", "jgr_catalog_info") and sample.labels["model"] == "jgr":
                    found.setdefault(sample.labels["replica"], {})[sample.name] = sample.labels["version"]
        return {
            name: (versions.get("jgr_model_info", ""), versions.get("jgr_catalog_info", ""))
            for name, versions in found.items()
        }

    def reloads(self) -> dict[str, str]:
        """The state of the decoder's last reload, of each replica that answers, by its name."""
        status, answer = self.ask("GET", "/v1/models")
        of = answer["replicas"] if status == 200 else ()
        return {one["name"]: model["reload"] for one in of for model in one["models"] if model["id"] == "jgr"}

    def pids(self, of: str) -> list[int]:
        """Processes of this fleet whose titles begin so, such as ray::ServeReplica:jgr:Front."""
        return [pid for pid in descendants(self.process.pid) if title(pid).startswith(of)]


REPLICA, FRONT, COORDINATOR = (
    f"ray::ServeReplica:jgr:{name}" for name in ("Replica", "Front", "Coordinator")
)
PROXY = "ray::ProxyActor"


def title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def descendants(root: int) -> list[int]:
    """The processes that another one has started, and those that these have."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(process.name))
    found, left = [], [root]
    while left:
        here = children.get(left.pop(), [])
        found += here
        left += here
    return found


class Call(NamedTuple):
    """A request that was sent. at_s: when it was to be sent. took_s: from then to its end. outcome: ok, late, refused
    or lost."""

    at_s: float
    took_s: float
    outcome: str
    path: str
    body: Mapping[str, Any]
    answer: Mapping[str, Any]


@dataclass
class Callers:
    """Callers that ask at a rate, whatever becomes of it. retries: of each request, which goes on under its id.
    timeout_s: how long a client waits for an answer. draw: makes a request."""

    urls: Sequence[str]
    rate: float
    retries: int = 0
    seed: int = 0
    threads: int = 24
    deadline_ms: float | None = DEADLINE_MS
    timeout_s: float = 30.0
    draw: Callable[[random.Random], tuple[str, dict[str, Any]]] = drawn
    calls: list[Call] = field(default_factory=list)

    def __enter__(self) -> Callers:
        self._ending = threading.Event()
        self._clients = ExitStack()
        self._client = self._clients.enter_context(
            jgr.Client(list(self.urls), timeout_s=self.timeout_s, retries=self.retries)
        )
        self._begun_s = time.monotonic()
        self._running = [threading.Thread(target=self._go, args=(at,)) for at in range(self.threads)]
        for thread in self._running:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._running:
            thread.join()
        self._clients.close()

    def have(self, calls: int) -> bool:
        """Whether so many calls have ended."""
        return len(self.calls) >= calls

    def _go(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        turn = number
        while True:
            at_s = self._begun_s + turn / self.rate
            if self._ending.wait(max(0.0, at_s - time.monotonic())):
                return
            path, body = self.draw(rng)
            for name in ("priority", "deadline_ms"):
                body.pop(name, None)
            if self.deadline_ms is not None:
                body["deadline_ms"] = self.deadline_ms
            outcome, answer = self._ask(path, body)
            took_s = time.monotonic() - at_s
            if outcome == "ok" and self.deadline_ms is not None and took_s > self.deadline_ms / 1e3 + GRACE_S:
                outcome = "late"
            self.calls.append(Call(at_s, took_s, outcome, path, body, answer))
            turn += self.threads

    def _ask(self, path: str, body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        try:
            return "ok", self._client.fetch("POST", path, msgspec.json.encode(body), dict)
        except jgr.DeadlineExceeded as error:
            return "late", {"error": str(error)}
        except jgr.Overloaded as error:
            return "refused", {"error": str(error)}
        except jgr.RequestFailed as error:
            return "lost", {"error": str(error)}


class Reference:
    """One engine for each version that answers name, in this process; each is made when it is first named."""

    def __init__(self, models: Models) -> None:
        lines = models.folder / "other.jsonl"
        lines.write_bytes(models.catalog)
        decoder, scorer = (load_config(file) for file in models.files)
        self._left: list[tuple[Config, list[str]]] = [(scorer, [])] + [
            (decoder, [f"model.path={models.folder / name}", *settings])
            for settings in ([], [f"catalog.path={lines}"])
            for name in ("one", "two")
        ]
        self._engines: dict[tuple[str, str], jgr.Engine] = {}
        self._known: dict[bytes, dict[str, float]] = {}

    def _engine(self, version: str, catalog: str) -> jgr.Engine | None:
        while (version, catalog) not in self._engines and self._left:
            engine = jgr.Engine(*self._left.pop(0))
            self._engines[engine.info.version, engine.info.catalog_version] = engine
        return self._engines.get((version, catalog))

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def wrong(self, calls: Sequence[Call]) -> list[str]:
        """The answers that are others than one engine's: the first lines of each."""
        found = []
        for call in calls:
            if call.outcome not in ("ok", "late") or "items" not in call.answer:
                continue
            expected = self._expected(call)
            if expected is None:
                found.append(f"nobody serves {call.answer['model']} {call.answer['catalog_version']}")
            elif (far := apart(scores(call.answer), expected)) > MAX_APART:
                found.append(f"{far:g} apart: {call.path} {call.body} {scores(call.answer)} {expected}")
        return found

    def _expected(self, call: Call) -> dict[str, float] | None:
        engine = self._engine(call.answer["model"], call.answer["catalog_version"])
        if engine is None:
            return None
        leave = ("deadline_ms", "user_id")
        body = {name: value for name, value in call.body.items() if name not in leave}
        if call.path == "/v1/rank" and body["model"] == "jgr":
            body["layout"] = call.answer["usage"]["layout"]
        key = msgspec.json.encode(
            [call.path, body, call.answer["model"], call.answer["catalog_version"]], order="sorted"
        )
        if key not in self._known:
            asked = engine.rank if call.path == "/v1/rank" else engine.recommend
            answer = asked(**body)
            self._known[key] = {item.item_id: item.score for item in answer.items}
        return self._known[key]


def until(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> float | None:
    """Seconds until it holds; None: it does not within so long."""
    begun_s = time.monotonic()
    while (waited_s := time.monotonic() - begun_s) < patience_s:
        if holds():
            return waited_s
        time.sleep(LOOK_S)
    return None


def outcomes(calls: Sequence[Call]) -> Counter[str]:
    return Counter(call.outcome for call in calls)
