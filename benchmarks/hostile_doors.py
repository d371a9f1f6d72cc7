# SPDX-License-Identifier: Apache-2.0
"""What clients should not do to the APIs of others, over HTTP and gRPC, and what a server makes of it.

The server is a process over two small models (benchmarks/hostile_world.py), with keys, a base path, CORS and an access
log. Between the broken requests good ones are asked in every shape, and their scores are compared with /v1/rank's. The
phases:

    http      /v1/rerank, /v1/score, /v1/explain, /v1/items, /v2 (JSON and binary tensors), /docs, /ui; paths, origins
              and keys of odd spelling
    grpc      messages with fields, bytes and keys changed; calls that are cancelled, or have no time
    large     bodies of 1 MB with as many values as there is room for, which are refused
    frames    HTTP/2 by hand: messages that never come, windows that never open, floods, a path that is no text
    tenants   one key's users through one door, and another key's through another
    kills     SIGKILL under load, and a start

Asked for are the 504 and DEADLINE_EXCEEDED of a request with a deadline, and no other answer of 500 or above, INTERNAL
or UNKNOWN. Whatever is answered, logged or counted must not hold a key. All the while /health/live is asked from
another connection, whose longest wait tells whether one request held the event loop.

    python -m benchmarks.hostile_doors [--quick]
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.hostile_agreement import PATIENCE_S, agreement, as_metadata, ask
from benchmarks.hostile_frames import hostile
from benchmarks.hostile_probe import Probe, large_bodies
from benchmarks.hostile_requests import Call, Document
from benchmarks.hostile_spellings import BEARER, KEY, KEYS, MAIL, ORIGIN, SECRETS, SHOP, is_clients, odd
from benchmarks.hostile_tensors import (
    BODIES,
    ITEMS,
    TINY,
    Value,
    binary,
    broken_body,
    broken_message,
    infer,
)
from benchmarks.hostile_world import (
    GOOD,
    SCORED_USER,
    Client,
    Server,
    apart,
    drawn_call,
    eventually,
    make_models,
)
from jgr.serving.http.kserve_grpc import message_class

CLIENTS = 4
ASK_EVERY = 100
MAX_APART = 1e-4
MAX_CONNECTIONS = 200
GROWTH_BOUND = 0.10
DOORS = (
    "/v1/rerank", "/v1/score", "/v1/explain", "/v1/items", "/ui", "/v2", "/docs", "/openapi.json", "/metrics",
    "/health",
)  # fmt: skip
OPEN = ("/health/", "/v2/health/")
CODES = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",  # a known key of the other role
    "RESOURCE_EXHAUSTED",
}


@dataclass(frozen=True)
class Amounts:
    """How much of each phase there is."""

    http: int = 14_000
    grpc: int = 8_000
    frames: int = 60
    kills: int = 3


QUICK = Amounts(http=600, grpc=400, frames=6, kills=1)


@dataclass
class Found:
    """What went wrong, and how often each answer came. Threads write to it, in one call each."""

    answers: Counter[str] = field(default_factory=Counter)
    unasked: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)
    let_in: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def look(self, said: bytes, where: str) -> None:
        """Look for keys in what the server said."""
        if any(secret in said for secret in SECRETS):
            self.leaked.append(where[:500])


class Doors(Document):
    """The document of a server, whose operations are those of the doors alone."""

    @property
    def operations(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path in super().operations if path.startswith(DOORS)]


class Run:
    """One run over models in a folder; its phases are its methods, and what they find is in `found`."""

    def __init__(self, folder: Path, amounts: Amounts) -> None:
        self.folder, self.amounts, self.found = folder, amounts, Found()
        keys = folder / "keys.json"
        listed = [
            {"name": name, "key": key, "role": "client"} for name, key in (("shop", SHOP), ("mail", MAIL))
        ]
        keys.write_text(json.dumps({"keys": listed}))
        keys.chmod(0o600)
        self.grpc_port = free_port()
        settings = (
            f"model.compilation_cache={folder / 'programs'}",
            f"server.max_connections={MAX_CONNECTIONS}",
            f"server.api_key={KEY}",
            f"server.keys={keys}",
            f"server.cors_origins={ORIGIN}",
            f"server.grpc_port={self.grpc_port}",
            "server.base_path=/jgr",
            "server.access_log=true",
            "server.write_timeout_s=2",
        )
        self.log = folder / "log"
        self.server = Server(make_models(folder / "models", *settings), self.log)
        self.rows: list[Row] = []

    def phase(self, name: str, run: Callable[[], None]) -> None:
        """Run a phase, compare afterwards, and note how it went."""
        start, before, found = time.monotonic(), self.found.answers.copy(), self.found
        faults = (found.unasked, found.undocumented, found.let_in, found.leaked, found.wrong)
        known = [len(each) for each in faults]
        run()
        self.compare(name)
        self.rows.append(
            {
                "phase": name,
                "seconds": harness.rounded(time.monotonic() - start),
                "answers": dict(sorted((found.answers - before).items())),
                "faults": [text for each, n in zip(faults, known, strict=True) for text in each[n:][:5]],
                "rss_mib": round(self.server.process.rss_bytes / 2**20),
            }
        )
        harness.note(f"{self.rows[-1]}")

    # Good requests

    def compare(self, when: str) -> None:
        """Ask the same of all doors: the scores must be those of /v1/rank and /v1/recommend."""
        try:
            with closing(Client(self.server.port, BEARER)) as client, self.channel() as channel:
                pairs = list(agreement(client, channel))
        except (ValueError, OSError, KeyError, http.client.HTTPException, grpc.RpcError) as error:
            self.found.wrong.append(f"{when}: {error!r}"[:500])
            return
        self.found.counts["compared"] += len(pairs)
        self.found.rss.append(self.server.process.rss_bytes)
        for door, given, right in pairs:
            if min(apart(given, one) for one in right) > MAX_APART:
                self.found.wrong.append(f"{when}: {door}: {given} against {right}"[:500])

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A channel of its own connection."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options) as channel:
            yield channel

    # HTTP

    def http(self) -> None:
        with closing(Client(self.server.port, BEARER)) as client:
            document = Doors(client.get("/openapi.json"))
        share = self.amounts.http // CLIENTS
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._ask_http, document, seed, share) for seed in range(CLIENTS)]:
                done.result()

    def _ask_http(self, document: Doors, seed: int, number: int) -> None:
        rng = random.Random(seed)
        good = {path: bodies for path, bodies in GOOD.items() if path.startswith(DOORS)}
        with closing(Client(self.server.port)) as client:
            for at in range(number):
                how = rng.random()
                if how < 0.5:
                    call = drawn_call(document, rng, good)
                    if rng.random() < 0.8:
                        call.headers |= BEARER
                elif how < 0.8:
                    body, headers = broken_body(rng.choice(BODIES), rng)
                    kind = rng.choice(("rank", "recommend"))
                    call = Call(
                        "POST",
                        f"/v2/models/{kind}/infer",
                        "/v2/models/{name}/infer",
                        body,
                        {**BEARER, **headers},
                    )
                else:
                    call = odd(rng)
                self._judge(client, document, call)
                if at % ASK_EVERY == 0 and seed == 0:
                    self.compare(f"request {at} of client 0")

    def _judge(self, client: Client, document: Doors, call: Call) -> None:
        """Ask, and hold the answer against what may be."""
        found, said = self.found, f"{call}"[:400]
        try:
            status, headers, body = client.ask(call)
        except (OSError, http.client.HTTPException) as error:
            found.unasked.append(f"{error!r} for {said}")
            return
        found.answers[str(status)] += 1
        found.look(body + json.dumps(headers).encode(), f"in the answer to {said}")
        late = any(word in (call.body or b"") for word in (b"deadline_ms", b"timeout"))
        if status >= 500 and not (status == 504 and late):
            found.unasked.append(f"{status} for {said}: {body[:200]!r}")
        key = call.headers.get("Authorization", "")
        path = call.path.removeprefix("/jgr")
        preflight = call.method == "OPTIONS" and "Access-Control-Request-Method" in call.headers
        if status < 400 and not (path.startswith(OPEN) or preflight or is_clients(key)):
            found.let_in.append(f"{status} for {said}")
        allowed = headers.get("access-control-allow-origin")
        if allowed is not None and call.headers.get("Origin", "").strip() != ORIGIN:
            found.let_in.append(f"origin {allowed} for {said}")
        if call.template in document.paths and call.method.lower() in document.paths[call.template]:
            faults = document.faults(
                call.method, call.template, status, headers.get("content-type", ""), body
            )
            found.undocumented += [f"{fault}: {said}" for fault in faults]

    # gRPC

    def messages(self) -> None:
        share = self.amounts.grpc // CLIENTS
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._ask_grpc, seed, share) for seed in range(CLIENTS)]:
                done.result()

    def _ask_grpc(self, seed: int, number: int) -> None:
        rng = random.Random(f"grpc {seed}")
        good = [
            infer("recommend" if b[1].name == "top_k" else "rank", b, "", raw)
            for b in BODIES
            for raw in (True, False)
        ]
        good += [infer("rank", TINY, "tiny", raw) for raw in (True, False)]
        with self.channel() as channel:
            for at in range(0, number, 10):
                asked = [self._begun(channel, good, rng) for _ in range(min(10, number - at))]
                for judge in asked:
                    judge()
                if at % ASK_EVERY == 0 and seed == 0:
                    self.compare(f"message {at} of client 0")

    def _begun(self, channel: grpc.Channel, good: Sequence[Any], rng: random.Random) -> Callable[[], None]:
        """Send a message; what is returned looks at its answer."""
        message, found = broken_message(good, rng), self.found
        key = rng.choice((*[f"Bearer {KEY}"] * 40, *(k for k in KEYS if k.isascii() and k.isprintable())))
        metadata = (
            [*message.metadata, ("authorization", key)] if key or rng.random() < 0.5 else message.metadata
        )
        timeout_s = rng.choice((*[None] * 30, PATIENCE_S, 0.05, 1e-4))
        future = ask(channel, message.method, message.data, metadata, timeout_s)
        cancelled = rng.random() < 0.03 and future.cancel()
        said = f"{message.method} {message.metadata} {key!r} {message.data[:300]!r}"

        def judge() -> None:
            try:
                error = future.exception(PATIENCE_S)
            except (grpc.FutureCancelledError, grpc.FutureTimeoutError) as failed:
                if not cancelled:
                    found.unasked.append(f"{failed!r} for {said}")
                return
            code = "OK" if error is None else error.code().name
            found.answers[code] += 1
            told = future.result() if error is None else str(error.details()).encode()
            found.look(told + repr(future.trailing_metadata()).encode(), f"in the answer to {said}")
            timed = timeout_s in (0.05, 1e-4) or ("grpc-timeout", "1n") in message.metadata
            late = timed or any(word in message.data for word in (b"deadline_ms", b"timeout"))
            if code not in CODES and not (code == "DEADLINE_EXCEEDED" and late):
                found.unasked.append(f"{code} for {said}: {told[:200]!r}")
            if code == "OK" and message.method not in ("ServerLive", "ServerReady") and not is_clients(key):
                found.let_in.append(f"OK for {said}")

        return judge

    def large(self) -> None:
        """Whatever such a body costs, other connections wait for it."""
        with closing(Client(self.server.port, BEARER)) as client:
            for path, body, headers in large_bodies():
                status = client.ask(Call("POST", path, path, body, {**BEARER, **headers}))[0]
                self.found.answers[str(status)] += 1
                if status not in (400, 422):
                    self.found.unasked.append(f"{status} for a large body of {path}: {body[:100]!r}")

    def frames(self) -> None:
        """Connections by hand, some of which stay open while good requests are asked."""
        rng, message = random.Random("frames"), infer("rank", TINY, "tiny").SerializeToString()
        metadata = [(b"authorization", f"Bearer {KEY}".encode())]
        for at in range(self.amounts.frames):
            link = socket.create_connection(("127.0.0.1", self.grpc_port), timeout=PATIENCE_S)
            with closing(link), suppress(OSError):
                link.sendall(hostile(rng, at, message, metadata))
                if rng.random() < 0.3:
                    link.shutdown(socket.SHUT_WR)
                if not eventually(self._answers):
                    self.found.unasked.append(f"no gRPC answer beside the frames of round {at}")
            self.found.counts["links"] += 1
        if not eventually(lambda: self.server.process.descriptors < MAX_CONNECTIONS):
            self.found.unasked.append(f"{self.server.process.descriptors} descriptors after the frames")

    def _answers(self) -> bool:
        with self.channel() as channel:
            future = ask(
                channel, "ModelInfer", infer("rank", TINY, "tiny").SerializeToString(), as_metadata(KEY), 10
            )
            return future.exception(PATIENCE_S) is None

    def tenants(self) -> None:
        """The users of one key are kept for it alone, whichever door it comes by, and erased for it alone."""
        user = Value("user_id", "BYTES", ["tenant"])
        data = infer("rank", (*TINY, user), "tiny").SerializeToString()
        body = {"model": "tiny", "query": {**SCORED_USER, "user_id": "tenant"}, "documents": ITEMS}

        def by_message(key: str) -> int:
            answer = ask(channel, "ModelInfer", data, as_metadata(key)).result(PATIENCE_S)
            found = message_class("ModelInferResponse").FromString(answer)
            return int(found.parameters["cached_tokens"].int64_param)

        def by_rerank(key: str) -> int:
            with closing(Client(self.server.port, {"Authorization": f"Bearer {key}"})) as client:
                return int(client.post("/v1/rerank", body)["usage"]["cached_tokens"])

        def erased(key: str) -> int:
            with closing(Client(self.server.port, {"Authorization": f"Bearer {key}"})) as client:
                return int(client.call("DELETE", "/v1/users/tenant/cache")[1]["entries"])

        with self.channel() as channel:
            cold, strange, kept, again = by_message(SHOP), by_rerank(MAIL), by_rerank(SHOP), by_message(SHOP)
            others, own, after = erased(KEY), erased(SHOP), by_message(SHOP)
            left = by_message(MAIL)
        told = f"{cold=} {strange=} {kept=} {again=} {others=} {own=} {after=} {left=}"
        if not (cold == strange == others == after == 0 < min(kept, again, own, left)):
            self.found.let_in.append(f"tenants: {told}")
        self.found.counts["entries erased"] += own

    def kills(self) -> None:
        """SIGKILL while both doors are asked, and a start on the same folders and ports."""
        for at in range(self.amounts.kills):
            ending = threading.Event()
            with ThreadPoolExecutor(2) as pool:
                asking = [pool.submit(self._until, ending, seed) for seed in range(2)]
                time.sleep(random.Random(at).uniform(0.2, 1.0))
                self.server.end(signal.SIGKILL)
                ending.set()
                for one in asking:
                    one.result()
            self.server.start()
            self.compare("after a kill")

    def _until(self, ending: threading.Event, seed: int) -> None:
        rng, data = random.Random(seed), infer("rank", TINY, "tiny").SerializeToString()
        with closing(Client(self.server.port)) as client, self.channel() as channel:
            while not ending.is_set():
                with suppress(OSError, http.client.HTTPException, grpc.RpcError):  # the server is killed
                    body, headers = binary(rng.choice(BODIES[1:3]))
                    client.ask(Call("POST", "/v2/models/rank/infer", "", body, {**BEARER, **headers}))
                    ask(channel, "ModelInfer", data, as_metadata(KEY), 5).result(PATIENCE_S)

    def look_around(self) -> None:
        """Where a key could stand besides answers."""
        self.found.look(self.log.read_bytes(), "in the log")
        pid = self.server.process.pid
        self.found.look(Path(f"/proc/{pid}/cmdline").read_bytes(), "in ps")
        with closing(Client(self.server.port)) as client:
            self.found.look(client.ask(Call("GET", "/metrics", "", None, BEARER))[2], "in the metrics")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def measure(quick: bool, quiet: Quiet) -> Measured:
    with tempfile.TemporaryDirectory(prefix="jgr-doors-") as folder:
        run = Run(Path(folder), QUICK if quick else Amounts())
        with run.server:
            with Probe(run.server) as probe:
                run.phase("http", run.http)
                run.phase("grpc", run.messages)
                rss = run.found.rss[len(run.found.rss) // 10 :]  # a start anew has other memory
                run.phase("large", run.large)
                run.phase("frames", run.frames)
                run.phase("tenants", run.tenants)
            run.rows.append(probe.row())
            run.phase("kills", run.kills)
            run.look_around()
        found = run.found
        tracebacks = run.server.tracebacks
        _, _, after = run.log.read_text(errors="replace").partition("Traceback")
        run.rows.append({"first traceback": after[:2_000]})
        restarts = run.log.read_text(errors="replace").count("gRPC ended by itself")
    found.counts["restarts of gRPC"] = restarts
    run.rows.append(
        {"phase": "all", "counts": dict(found.counts), "rss_mib": [round(n / 2**20) for n in found.rss]}
    )

    def none(name: str, faults: float, unit: str = "answers") -> Claim:
        return Claim(f"hostile-doors-{name}", float(faults), unit, "lower", 0.0)

    asked = float(sum(found.answers.values()))
    return Measured(
        [
            Claim("hostile-doors-requests", asked, "requests", "higher", 20_000.0),
            none("unasked-5xx-internal-or-hang-ups", len(found.unasked)),
            none("answers-that-the-document-has-not", len(found.undocumented)),
            none("answers-without-the-right-key-or-origin", len(found.let_in)),
            none("keys-in-answers-log-metrics-or-ps", len(found.leaked), "places"),
            none("wrong-scores", len(found.wrong)),
            Claim("hostile-doors-longest-wait-of-a-health-probe", probe.longest_s, "s", "lower", 1.0),
            none("tracebacks-in-the-log", tracebacks, "tracebacks"),
            Claim(
                "hostile-doors-memory-growth-after-the-first-tenth",
                max(rss) / rss[0] - 1,
                "share",
                "lower",
                GROWTH_BOUND,
            ),
        ],
        run.rows,
    )


if __name__ == "__main__":
    here = Path(__file__).parent
    parts = ("agreement", "frames", "probe", "requests", "spellings", "tensors", "world")
    harness.main(
        Benchmark(
            name="hostile_doors",
            measure=measure,
            packages=(
                "jax",
                "numpy",
                "msgspec",
                "starlette",
                "uvicorn",
                "uvloop",
                "httptools",
                "grpcio",
                "protobuf",
            ),
            sources=(Path(__file__), *(here / f"hostile_{part}.py" for part in parts)),
        )
    )
