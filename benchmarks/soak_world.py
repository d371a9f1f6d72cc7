# SPDX-License-Identifier: Apache-2.0
"""A server's day in short: callers of all kinds, an operator who changes what is served, and somebody who measures.

All goes over HTTP, so the server may be a process or a thread of this one. Nothing here is malicious: whatever is
refused is counted, and only refusals that callers risk (a deadline, a full queue) are expected.

A sample of the answers is asked again when all is quiet, alone, with the user erased and in the layout that the answer
had: that is what the load, the cache and the changes must not have altered.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hostile_world import (
    ADMIN,
    MONDAY,
    N_GENERATED,
    N_SCORED,
    Client,
    Process,
    apart,
    as_lines,
    generated_catalog,
    http_of,
    scores,
)

CALLERS, USERS, KEPT_SAMPLES = 4, 40, 150
MAX_APART = 1e-4
MODELS = ("jgr", "tiny")
CATALOGS = 2
"""Catalogs that take turns: the first one, and one in which each item has another one's id."""
Row = dict[str, float]


@dataclass(frozen=True)
class Answered:
    """An answer to compare with. state: versions of the model and of its catalog."""

    path: str
    body: dict[str, Any]
    state: tuple[str, str]
    scores: dict[str, float]


@dataclass
class Found:
    """What came of it. series: what was measured, a row for each time. stray: those compiled while nothing changed."""

    counts: Counter[str] = field(default_factory=Counter)
    unasked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    series: list[Row] = field(default_factory=list)
    compared: int = 0
    lost_pages: int = 0
    stray: int = 0
    compiled_for_requests: int = 0


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A good request: path and body. A user's history grows with the clock of the generator."""
    user = int(USERS * rng.random() ** 2)  # some come often
    own = random.Random(user)
    kind = rng.randrange(3)
    if kind == 2:
        events = rng.randint(1, 6)
        history = [f"B{own.randrange(N_SCORED):03}" for _ in range(6)][:events]
        body: dict[str, Any] = {
            "model": "tiny",
            "history": history,
            "history_times": [MONDAY + 60 * at for at in range(events)],
            "history_actions": [own.randrange(8) for _ in range(events)],
            "context": {"slot0": user % 4},
            "time": MONDAY + 1_000 + rng.randrange(3),
            "candidates": [f"B{n:03}" for n in rng.sample(range(N_SCORED), rng.randint(1, 20))],
        }
    else:
        history = [f"i{own.randrange(N_GENERATED)}" for _ in range(12)][: rng.randint(1, 12)]
        body = {"model": "jgr", "history": history}
        if kind == 1:
            body["candidates"] = [f"i{n}" for n in rng.sample(range(N_GENERATED), rng.randint(1, 8))]
        else:
            body["top_k"] = rng.randint(1, 4)
            if rng.random() < 0.3:
                body["filters"] = {
                    "deny": [f"i{n}" for n in rng.sample(range(N_GENERATED), 5)],
                    "exclude": ["none"],
                }
    if rng.random() < 0.8:
        body["user_id"] = f"u{user}"
    if rng.random() < 0.2:
        body["deadline_ms"] = rng.choice((1, 20, 500, 60_000))
    if rng.random() < 0.2:
        body["priority"] = "batch"
    return "/v1/recommend" if kind == 0 else "/v1/rank", body


class Soak:
    """Runs the callers and the operator against a server, and measures. `found` is complete after `run`.

    port: of the server, whose models are those of hostile_world and whose admin key is the one there. process: its
    process. change_s: seconds between two changes. measure_s: between two measurements. kept: answers to compare
    with, of each pair of a model's and a catalog's versions.
    """

    def __init__(
        self,
        port: int,
        process: Process,
        *,
        change_s: float,
        measure_s: float,
        kept: int = KEPT_SAMPLES,
        seed: int = 0,
    ) -> None:
        self.found = Found()
        self._port, self._process, self._seed = port, process, seed
        self._change_s, self._measure_s, self._kept = change_s, measure_s, kept
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._samples: dict[tuple[str, str], list[Answered]] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._changes = 0
        self._changing = False
        self._failed: list[BaseException] = []

    def run(self, seconds: float) -> Found:
        """Load the server for so long; then compare, and look for what is lost."""
        with closing(Client(self._port, ADMIN)) as client:
            before = client.metrics()
            threads = [threading.Thread(target=self._guarded, args=(self._call, n)) for n in range(CALLERS)]
            threads.append(threading.Thread(target=self._guarded, args=(self._operate, 0)))
            for thread in threads:
                thread.start()
            try:
                self._measure(client, seconds)
            finally:
                self._ending.set()
                for thread in threads:
                    thread.join()
            if self._failed:
                raise self._failed[0]
            self._compare(client)
            self._look_for_pages(client)
            name = 'jgr_compilations_total{phase="request"}'
            self.found.compiled_for_requests = int(client.metrics()[name] - before[name])
        return self.found

    def _guarded(self, work: Any, number: int) -> None:
        try:
            work(random.Random(f"{self._seed} {number}"))
        except Exception as error:
            self._failed.append(error)
            self._ending.set()

    def _call(self, rng: random.Random) -> None:
        with closing(Client(self._port)) as client:
            while not self._ending.is_set():
                path, body = drawn(rng)
                how = rng.random()
                if how < 0.04:
                    self._leave(path, body)
                elif how < 0.06:
                    self._read_slowly(path, body)
                else:
                    self._ask(client, path, body, rng)

    def _ask(self, client: Client, path: str, body: dict[str, Any], rng: random.Random) -> None:
        status, answer = client.call("POST", path, body)
        with self._lock:
            self.found.counts[f"{path} {status}"] += 1
            if status != 200:
                risked = status == 429 or (status == 504 and "deadline_ms" in body)
                if not risked:
                    self.found.unasked.append(f"{status} {answer} for {body}"[:500])
                return
            state = answer["model"], answer["catalog_version"]
            self._seen[state] += 1
            kept = self._samples.setdefault(state, [])
            # Each answer of a state is among those that are kept with the same probability.
            place = len(kept) if len(kept) < self._kept else rng.randrange(self._seen[state])
            if place < self._kept:
                again = {
                    name: value for name, value in body.items() if name not in ("deadline_ms", "priority")
                }
                if path == "/v1/rank" and body["model"] == "jgr":
                    again["layout"] = answer["usage"]["layout"]
                kept[place : place + 1] = [Answered(path, again, state, scores(answer))]

    def _leave(self, path: str, body: dict[str, Any]) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as link:
            link.sendall(http_of(path, body))
        self._count("left")

    def _read_slowly(self, path: str, body: dict[str, Any]) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as link, suppress(ConnectionError):
            link.sendall(http_of(path, body, b"connection: close\r\n"))
            while link.recv(7) and not self._ending.wait(0.001):
                pass
        self._count("read slowly")

    def _count(self, what: str) -> None:
        with self._lock:
            self.found.counts[what] += 1

    def _operate(self, rng: random.Random) -> None:
        turn = 0
        while not self._ending.wait(self._change_s):
            self._changes, self._changing = self._changes + 1, True
            how = turn % 3
            # A connection of its own: between changes one would be closed, since nothing is sent for too long.
            with closing(Client(self._port, ADMIN)) as client:
                if how == 0:
                    self._serve_catalog(client, 1 + turn // 3)
                elif how == 1:
                    self._change(client, f"/v1/models/{rng.choice(MODELS)}/reload", {})
                else:
                    for user in rng.sample(range(USERS), USERS // 4):
                        self._erase(client, f"u{user}")
            self._changing = False
            turn += 1

    def _serve_catalog(self, client: Client, number: int) -> str:
        lines = as_lines(generated_catalog(7 * (number % CATALOGS)))
        version: str = client.post("/v1/catalogs?model=jgr", lines)["version"]
        if client.get("/v1/models/jgr")["catalog_version"] != version:
            self._change(client, f"/v1/catalogs/{version}/activate?model=jgr", None)
        return version

    def _change(self, client: Client, path: str, body: Any) -> None:
        client.post(path, body)
        outcomes = [client.settled(model) for model in MODELS]
        self._count(path.partition("?")[0].rpartition("/")[2])
        if any("failed" in outcome for outcome in outcomes):
            self.found.unasked.append(f"{path}: {outcomes}")

    def _erase(self, client: Client, user: str) -> None:
        status, answer = client.call("DELETE", f"/v1/users/{user}/cache?tenant=admin")
        if status != 200:
            self.found.unasked.append(f"{status} {answer} for the erasure of {user}")
        self._count("erasures")

    def _measure(self, client: Client, seconds: float) -> None:
        start_s = time.monotonic()
        compiled, changes = 0.0, -1
        while not self._ending.is_set():
            settled = not self._changing and changes == self._changes
            series = client.metrics()
            pages = {name: series[name] for name in series if name.startswith("jgr_cache_pages")}
            now = series['jgr_compilations_total{phase="load"}']
            settled = settled and not self._changing and changes == self._changes
            if settled:
                self.found.stray += int(now - compiled)
            compiled, changes = now, -1 if self._changing else self._changes
            self.found.series.append({
                "at_s": round(time.monotonic() - start_s, 1),
                "rss_bytes": self._process.rss_bytes,
                "threads": self._process.threads,
                "descriptors": self._process.descriptors,
                "free_pages": pages['jgr_cache_pages{holder="free",model="jgr"}'],
                "pages": sum(size for name, size in pages.items() if 'model="jgr"' in name),
                "answers": sum(n for what, n in list(self.found.counts.items()) if what.endswith(" 200")),
            })  # fmt: skip
            left_s = start_s + seconds - time.monotonic()
            if left_s <= 0:
                return
            self._ending.wait(min(self._measure_s, left_s))

    def _compare(self, client: Client) -> None:
        """Ask the samples again, alone: each catalog is served once more for those that came from it."""
        for number in range(CATALOGS):
            self._serve_catalog(client, number)
            served = {(info["version"], info["catalog_version"]) for info in client.get("/v1/models")["data"]}
            for state in served & self._samples.keys():
                for sample in self._samples.pop(state):
                    if "user_id" in sample.body:
                        self._erase(client, sample.body["user_id"])
                    found = scores(client.post(sample.path, sample.body))
                    self.found.compared += 1
                    if apart(found, sample.scores) > MAX_APART:
                        self.found.wrong.append(f"{sample} alone: {found}"[:900])

    def _look_for_pages(self, client: Client) -> None:
        """Pages of no model's present version are lost, and so are those of users that were erased."""
        for user in range(USERS):
            self._erase(client, f"u{user}")
        series = client.metrics()

        def pages(model: str, holder: str) -> float:
            return series.get(f'jgr_cache_pages{{holder="{holder}",model="{model}"}}', 0.0)

        used = {model: sum(pages(model, kind) for kind in ("user", "item")) for model in MODELS}
        lost = abs(pages("jgr", "others") - used["tiny"]) + abs(pages("tiny", "others") - used["jgr"])
        self.found.lost_pages = int(lost)
