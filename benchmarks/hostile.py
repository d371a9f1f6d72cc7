# SPDX-License-Identifier: Apache-2.0
"""Everything that clients, operators and disks should not do to a server, one after the other, and what it makes of it.

The server is a process over two small models (benchmarks/hostile_world.py). Requests are drawn from a seed
(benchmarks/hostile_requests.py); a known good request is asked every 500 of them, and its scores are compared with the
first ones. The phases:

    requests     mutated requests over keep-alive connections, several at a time
    raw          bytes that are hardly HTTP
    connections  floods, slow writers, clients that do not read, clients that leave in the middle
    damage       checkpoints and catalogs that are broken, reloaded and uploaded while good requests go on
    kills        SIGKILL under load, and a start over what was left: the journal, the cache of compiled programs
    full disk    a start and requests where no file may grow beyond a few KiB

Asked for are the 504 of a request with a deadline, the 503 of a connection beyond server.max_connections, and no other
answer of 500 or above.

    python -m benchmarks.hostile [--quick]
"""

from __future__ import annotations

import http.client
import random
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.hostile_requests import Call, Document, raw
from benchmarks.hostile_world import (
    ADMIN,
    GOOD,
    RECOMMEND,
    Client,
    Server,
    apart,
    as_lines,
    damaged,
    drawn_call,
    eventually,
    generated_catalog,
    http_of,
    make_models,
    send_raw,
)

CLIENTS = 4
ASK_EVERY = 500
MAX_APART = 1e-4
MAX_CONNECTIONS = 200
FULL_BYTES = 16 << 10
GROWTH_BOUND = 0.10
"""How much memory a server may take on top, after a tenth of the requests, as a share of what it has then."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a client that leaves without a goodbye."""


@dataclass(frozen=True)
class Amounts:
    """How much of each phase there is."""

    requests: int = 100_000
    raw: int = 5_000
    floods: int = 20
    damages: int = 200
    kills: int = 5


QUICK = Amounts(requests=3_000, raw=300, floods=2, damages=12, kills=1)


@dataclass
class Found:
    """What went wrong, and how often each status came. Threads write to it, in one call each."""

    statuses: Counter[int] = field(default_factory=Counter)
    unasked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    rss: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def answered(self, status: int, call: str, asked: bool = False) -> None:
        """asked: whether the status is one that may be, though it is 500 or above."""
        self.statuses[status] += 1
        if status >= 500 and not asked:
            self.unasked.append(f"{status} for {call[:500]}")

    def compare(self, client: Client, when: str) -> None:
        """Ask the good requests; the first time, their scores are those that are right."""
        try:
            scores = client.good_scores()
        except (ValueError, OSError, http.client.HTTPException) as error:
            self.wrong.append(f"{when}: {error!r}"[:500])
            return
        self.first = self.first or scores
        self.counts["compared"] += 1
        if apart(scores, self.first) > MAX_APART:
            self.wrong.append(f"{when}: {scores}"[:500])


class Run:
    """One run over models in a folder; its phases are its methods, and what they find is in `found`."""

    def __init__(self, folder: Path, amounts: Amounts) -> None:
        self.folder, self.amounts, self.found = folder, amounts, Found()
        self.models = folder / "models"
        settings = (
            f"model.compilation_cache={folder / 'programs'}",
            f"server.journal={folder / 'journal'}",
            f"server.max_connections={MAX_CONNECTIONS}",
            "server.write_timeout_s=2",
        )
        self.log = folder / "log"
        self.server = Server(make_models(self.models, *settings), self.log)
        self.rows: list[Row] = []

    def phase(self, name: str, run: Callable[[], None]) -> None:
        """Run a phase, compare afterwards, and note how it went."""
        start, before, wrong = time.monotonic(), self.found.statuses.copy(), len(self.found.wrong)
        unasked = len(self.found.unasked)
        run()
        with closing(Client(self.server.port)) as client:
            self.found.compare(client, name)
        self.rows.append(
            {
                "phase": name,
                "seconds": harness.rounded(time.monotonic() - start),
                "statuses": {str(k): n for k, n in sorted((self.found.statuses - before).items())},
                "unasked": self.found.unasked[unasked:][:5],
                "wrong": self.found.wrong[wrong:][:5],
                "rss_mib": round(self.server.process.rss_bytes / 2**20),
            }
        )
        harness.note(f"{self.rows[-1]}")

    def requests(self) -> None:
        """Mutated requests by several clients; changes of the server (uploads apart) are left to `damage`."""
        with closing(Client(self.server.port)) as client:
            document = Document(client.get("/openapi.json"))
        share = self.amounts.requests // CLIENTS
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._ask, document, seed, share) for seed in range(CLIENTS)]:
                done.result()

    def _ask(self, document: Document, seed: int, number: int) -> None:
        rng = random.Random(seed)
        with closing(Client(self.server.port)) as client:
            for at in range(number):
                call = drawn_call(document, rng, GOOD)
                if call.template.endswith(("/reload", "/activate", "/rollback")):
                    call.headers.pop("Authorization", None)
                try:
                    status, _, body = client.ask(call)
                    given = call.body or b""
                    deadline = status == 504 and (b"deadline_ms" in given or b"timeout" in given)
                    self.found.answered(status, f"{call} {body[:200]!r}", deadline)
                except (OSError, http.client.HTTPException) as error:
                    self.found.unasked.append(f"{error!r} for {call}"[:500])
                if at % (ASK_EVERY // CLIENTS) == 0 and seed == 0:
                    self.found.compare(client, f"request {at} of client 0")
                    self.found.rss.append(self.server.process.rss_bytes)

    def raw(self) -> None:
        """Bytes that are hardly HTTP."""
        rng, good = random.Random("raw"), http_of("/v1/recommend", RECOMMEND)
        with closing(Client(self.server.port)) as client:
            for at in range(self.amounts.raw):
                data = raw(good, rng)
                answered = send_raw(self.server.port, data, rng)
                if answered:
                    self.found.answered(int(answered[9:12]), repr(data[:300]))
                if b"HTTP/1.1 5" in answered:
                    self.found.unasked.append(f"5xx for {data[:300]!r}")
                if at % 100 == 0:
                    self.found.compare(client, f"raw {at}")

    def connections(self) -> None:
        """Floods; then slow writers, slow readers and leavers, all at once, while good requests are asked."""
        rng, good = random.Random("connections"), http_of("/v1/recommend", RECOMMEND)
        for _ in range(self.amounts.floods):
            with closing(Client(self.server.port)) as client, ExitStack() as stack:
                client.get("/health/live")
                for at in range(2 * MAX_CONNECTIONS):
                    link = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
                    stack.enter_context(link)
                    if at % 4 == 0:
                        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    with suppress(OSError):  # one too many is hung up on
                        self._misbehave(link, good, rng)
                self.found.compare(client, "in a flood")
                self.found.counts["links"] += 2 * MAX_CONNECTIONS
            if not eventually(lambda: self.server.process.descriptors < MAX_CONNECTIONS):
                self.found.unasked.append(f"{self.server.process.descriptors} descriptors after a flood")

    def _misbehave(self, link: socket.socket, good: bytes, rng: random.Random) -> None:
        how = rng.randrange(5)
        if how == 0:
            link.sendall(good[: rng.randrange(len(good))])  # never ends
        elif how == 1:
            link.setblocking(False)
            link.send(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 300)  # and reads nothing
        elif how == 2:
            link.sendall(good)
            link.close()  # leaves before the answer
        elif how == 3:
            for byte in good[:20]:
                link.send(bytes([byte]))

    def damage(self) -> None:
        """Half of the damages are to a model's folder, which is reloaded; half to a catalog, which is uploaded."""
        rng = random.Random("damage")
        with self.load(), closing(Client(self.server.port, ADMIN)) as client:
            for at in range(self.amounts.damages // 2):
                self._damaged_reload(client, rng, rng.choice(("jgr", "tiny")))
                self._damaged_upload(client, rng, at)

    def _damaged_reload(self, client: Client, rng: random.Random, model: str) -> None:
        folder, whole = self.models / model, self.folder / "whole"
        shutil.copytree(folder, whole)
        path = damaged(folder, rng)
        client.post(f"/v1/models/{model}/reload", {})
        outcome = client.settled(model).split()[0]
        self.found.counts[f"reloads {outcome}"] += 1
        shutil.rmtree(folder)
        whole.rename(folder)
        if outcome == "done":  # what is served may be another model now, and rightly so
            client.post(f"/v1/models/{model}/reload", {})
            if not client.settled(model).startswith("done"):
                self.found.unasked.append(f"the whole folder was refused, after {path.name} was damaged")
        self.found.compare(client, f"after a damaged {path.name} of {model}: {outcome}")

    def _damaged_upload(self, client: Client, rng: random.Random, at: int) -> None:
        """An upload that is taken for good is served for a while; then the first catalog is again."""
        lines = self.folder / "upload" / "catalog.jsonl"
        lines.parent.mkdir(exist_ok=True)
        lines.write_bytes(as_lines(generated_catalog(at % 3)))
        if rng.random() < 0.7:
            damaged(lines.parent, rng)
        body = lines.read_bytes() if lines.exists() else b""
        status, answer = client.call("POST", "/v1/catalogs?model=jgr", body)
        self.found.answered(status, f"upload {body[:300]!r}")
        if status == 201 and answer["state"] != "active":
            first = client.get("/v1/models/jgr")["catalog_version"]
            for version in (answer["version"], first):
                client.call("POST", f"/v1/catalogs/{version}/activate?model=jgr")
                outcome = client.settled()
                if not outcome.endswith("done"):
                    self.found.unasked.append(f"activation: {outcome} of {body[:300]!r}")
        self.found.counts[f"uploads {status}"] += 1

    @contextmanager
    def load(self) -> Iterator[None]:
        """Good requests from another thread all the while; while models change, their scores are not compared."""
        ending = threading.Event()

        def ask() -> None:
            with closing(Client(self.server.port)) as client:
                while not ending.is_set():
                    for path, bodies in GOOD.items():
                        with suppress(OSError, http.client.HTTPException):  # where the server is killed
                            call = Call(
                                "POST", path, path, http_of(path, bodies[0]).partition(b"\r\n\r\n")[2]
                            )
                            self.found.answered(client.ask(call)[0], f"a good request for {path}")
                    ending.wait(0.005)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def kills(self) -> None:
        """SIGKILL while requests run and a model is being reloaded, and a start on the same folders."""
        for at in range(self.amounts.kills):
            with self.load(), closing(Client(self.server.port, ADMIN)) as client:
                client.post("/v1/models/jgr/reload", {})
                time.sleep(random.Random(at).uniform(0.05, 1.0))
                self.server.end(signal.SIGKILL)
            self.server.start()
            with closing(Client(self.server.port)) as client:
                self.found.compare(client, "after a kill")

    def full_disk(self) -> None:
        """Another server on the same models, whose files may not grow: the journal ends, and it serves on."""
        log = self.folder / "full.log"
        settings = (
            f"model.compilation_cache={self.folder / 'full'}",
            f"server.journal={self.folder / 'journal.full'}",
        )
        files = [self.models / "jgr.py", self.models / "tiny.py"]
        with Server(files, log, *settings, file_bytes=FULL_BYTES) as full:
            with closing(Client(full.port)) as client:
                for _ in range(30):
                    self.found.compare(client, "on a full disk")
        with (
            Server(files, log, settings[0], "server.journal=") as roomy,
            closing(Client(roomy.port)) as client,
        ):
            self.found.compare(client, "over what a full disk left")
        told = log.read_text(errors="replace")
        self.found.counts["journals that ended"] += told.count("journal.full ends here")
        self.found.counts["tracebacks"] += full.tracebacks


def measure(quick: bool, quiet: Quiet) -> Measured:
    with tempfile.TemporaryDirectory(prefix="jgr-hostile-") as folder:
        run = Run(Path(folder), QUICK if quick else Amounts())
        with run.server:
            run.phase("requests", run.requests)
            run.phase("raw", run.raw)
            run.phase("connections", run.connections)
            run.phase("damage", run.damage)
            run.phase("kills", run.kills)
            run.phase("full disk", run.full_disk)
        found = run.found
        found.counts["tracebacks"] += run.server.tracebacks
    rss = found.rss[len(found.rss) // 10 :]
    run.rows.append(
        {"phase": "all", "counts": dict(found.counts), "rss_mib": [round(size / 2**20) for size in found.rss]}
    )
    return Measured(
        [
            Claim("hostile-unasked-5xx-or-hang-ups", float(len(found.unasked)), "answers", "lower", 0.0),
            Claim(
                "hostile-tracebacks-in-the-log", float(found.counts["tracebacks"]), "tracebacks", "lower", 0.0
            ),
            Claim("hostile-wrong-scores", float(len(found.wrong)), "answers", "lower", 0.0),
            Claim(
                "hostile-memory-growth-after-the-first-tenth",
                max(rss) / rss[0] - 1,
                "share",
                "lower",
                GROWTH_BOUND,
            ),
            Claim(
                "hostile-journals-ended-by-a-full-disk",
                float(found.counts["journals that ended"]),
                "journals",
                "higher",
                1.0,
            ),
        ],
        run.rows,
    )


if __name__ == "__main__":
    here = Path(__file__).parent
    harness.main(
        Benchmark(
            name="hostile",
            measure=measure,
            packages=("jax", "numpy", "msgspec", "starlette", "uvicorn", "uvloop", "httptools"),
            sources=(Path(__file__), here / "hostile_world.py", here / "hostile_requests.py"),
        )
    )
