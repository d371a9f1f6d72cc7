# SPDX-License-Identifier: Apache-2.0
"""What the long tests of the server share: two small models in folders, a server process over them, and a client.

"jgr" is a decoder over items of one token, which recommends, and ranks with a cache; "tiny" is an STU scorer that
keeps its users. Both share the pool, which is small, so that entries come and go.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.hostile_requests import Call, Document, filled, mutated, rendered
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, override
from jgr.models import checkpoint, decoder, params, scorers
from jgr.models.retrievers import items_digest
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import StuScorerConfig
from jgr.prompt.tokens import semantic_id_tokenizer
from jgr.training.generator import decoder_config

ROOT = Path(__file__).resolve().parents[1]
ADMIN_KEY = "4dm1n"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
N_GENERATED, N_SCORED = 30, 60
MONDAY = 1_700_438_400
START_PATIENCE_S, PATIENCE_S = 240.0, 60.0

DECODER = (
    "model.name=jgr", "prompt.max_items=12", "prompt.template=<bos>{history}<sid>", "rank.method=item_token",
    "rank.item=<sid>{sid}", "rank.item_span=4", "rank.requests=4", "rank.tokens=64", "rank.context=64",
    "rank.candidates=16", "profiles.widths=4", "profiles.batch=1,4", "beam.width=4", "cache.policy=hotness",
    "cache.device_mb=0.2", "cache.page_kb=2", "cache.item_share=0.125", "cache.cell_tokens=2", "cache.share=3",
    "cache.shadow=0", "server.port=0", "server.explain=true", f"server.admin_key={ADMIN_KEY}",
)  # fmt: skip
SCORER = (
    "model.name=tiny", "executors.sizes=4,8", "executors.share_user=cache", "cache.device_mb=0.2", "cache.page_kb=2",
)  # fmt: skip

HISTORY = ["i1", "i2", "i3"]
SCORED_USER: dict[str, Any] = {
    "history": ["B000", "B001", "B002", "B003"],
    "history_times": [MONDAY + at for at in range(4)],
    "history_actions": [1] * 4,
    "context": {"slot0": 1},
    "time": MONDAY + 9,
}
RECOMMEND: dict[str, Any] = {"model": "jgr", "history": HISTORY, "top_k": 2, "user_id": "u"}
RANK: dict[str, Any] = {
    "model": "jgr", "history": HISTORY, "candidates": ["i4", "i5", "i6"], "user_id": "u", "layout": "user_prefix",
    "explain": True, "deadline_ms": 60_000,
}  # fmt: skip
SCORE: dict[str, Any] = {
    "model": "tiny", "candidates": ["B005", "B006", "B007", "B008"], "task_weights": {"like": 1}, **SCORED_USER,
}  # fmt: skip
_RECOMMENDS = (RECOMMEND, {**RECOMMEND, "filters": {"deny": ["i7"], "exclude": [8]}, "priority": "batch"})
_RANKS = (RANK, {**RANK, "model": "tiny", "history": ["B001"]}, SCORE)
GOOD: Mapping[str, Sequence[dict[str, Any]]] = {
    "/v1/recommend": _RECOMMENDS,
    "/v1/rank": _RANKS,
    "/v1/explain/recommend": _RECOMMENDS,
    "/v1/explain/rank": _RANKS,
    "/v1/rerank": (
        {"model": "jgr", "query": HISTORY, "documents": ["i4", "i5", "i4"], "top_n": 2, "include_metadata": True},
        {"model": "tiny", "query": SCORED_USER, "documents": ["B005", "B006"], "return_documents": False},
    ),
    "/v1/score": (
        {"model": "jgr", "queries": {"history": HISTORY, "user_id": 5}, "items": ["i4", "i5"]},
        {"model": "tiny", "text_1": SCORED_USER, "text_2": "B005", "deadline_ms": 60_000},
    ),
    "/v2/models/{name}/infer": (
        {"inputs": [
            {"name": "history", "datatype": "BYTES", "shape": [1, 3], "data": [HISTORY]},
            {"name": "top_k", "datatype": "INT32", "shape": [1], "data": [2]},
        ], "outputs": [{"name": "metadata"}, {"name": "scores", "parameters": {"binary_data": True}}]},
        {"inputs": [
            {"name": "history", "datatype": "BYTES", "shape": [3], "data": HISTORY},
            {"name": "candidates", "datatype": "BYTES", "shape": [2], "data": ["i4", "i5"]},
        ], "id": "mine", "parameters": {"timeout": 60_000_000, "priority": 2}},
    ),
}  # fmt: skip
"""Requests that the world answers, but the second of a ranking, by endpoint."""
KNOWN = ("i1", "jgr", "jgr", "tiny", "u", "rank", "recommend")
"""Names that a path may have, of items, models and users."""


def make_models(folder: Path, *settings: str, seed: int = 0) -> list[Path]:
    """Write both models below a folder, and a configuration file for each. settings: further ones of both. seed: of the
    decoder's weights."""
    scored = [f"B{row:03}" for row in range(N_SCORED)]
    items = Catalog.build(scored, [(f"<a_{row}>",) for row in range(N_SCORED)], [{}] * N_SCORED)
    stu = StuScorerConfig(
        stack=StuConfig(hidden=8, layers=2, heads=2, qk_dim=4, v_dim=4, length=16, contextual=2),
        n_items=N_SCORED, max_items=6, item_dim=8, actions=3, action_dim=2, slots=(4, 2), mlp=8,
        position_rows=16, time_rows=32, tasks=("click", "like"), items=items_digest(scored),
    )  # fmt: skip
    drawn = params.initialize(scorers.scorer(stu).spec(stu), jax.random.key(0))
    rng = np.random.default_rng(0)  # jax would compile two programs for every shape
    weights = jax.tree.map(
        lambda x: np.asarray(x) + np.float32(0.3) * rng.standard_normal(x.shape, np.float32), drawn
    )
    scorers.save(folder / "tiny", stu, weights, lambda beside: save_catalog(items, beside / "catalog.jsonl"))

    catalog = generated_catalog()
    tokenizer = semantic_id_tokenizer(catalog)
    config = override(Config(), "train.layers=2", "train.hidden=32", *DECODER[1:2])
    cfg = decoder_config(config.train, tokenizer.vocab_size, 64)
    generator = jax.tree.map(lambda x: x * 3, params.initialize(decoder.spec(cfg), jax.random.key(seed)))

    def write_beside(beside: Path) -> None:
        tokenizer.save(beside / "tokenizer.json")
        save_catalog(catalog, beside / "catalog.jsonl")

    checkpoint.save(folder / "jgr", cfg, generator, write_beside)
    files = []
    for name, own in (("jgr", DECODER), ("tiny", SCORER)):
        given = [*own, f"model.path={folder / name}", *settings]
        files.append(folder / f"{name}.py")
        files[-1].write_text(
            "from jgr.config import Config, override\n\n\ndef get_config():\n"
            f"    return override(Config(), *{given!r})\n"
        )
    return files


def generated_catalog(shift: int = 0) -> Catalog:
    """The catalog of the decoder; with a shift, each item has another item's id."""
    names = [[f"<a_{(n + shift) % N_GENERATED}>"] for n in range(N_GENERATED)]
    return Catalog.build([f"i{n}" for n in range(N_GENERATED)], names, [{"n": n} for n in range(N_GENERATED)])


def as_lines(catalog: Catalog) -> bytes:
    """A catalog of one level, as it is uploaded."""
    (names,) = catalog.symbols
    ids = [names[code] for code in catalog.codes[:, 0].tolist()]
    rows = zip(catalog.item_ids, ids, catalog.metadata, strict=True)
    lines = [{"item_id": item, "semantic_id": [name], "metadata": fields} for item, name, fields in rows]
    return "\n".join(map(json.dumps, lines)).encode()


def drawn_call(document: Document, rng: random.Random, good: Mapping[str, Sequence[dict[str, Any]]]) -> Call:
    """A request for an operation of the document, most of them broken: half of them for the endpoints of `good`."""
    method, template = rng.choice(document.operations)
    if rng.random() < 0.5:
        method, template = "POST", rng.choice(list(good))
    call = Call(method, filled(template, rng, KNOWN), template)
    schema = document.request(method, template)
    if schema is not None:
        how = rng.randrange(4)
        alike = template if template in good and rng.random() < 0.7 else rng.choice(list(good))
        body = document.drawn(schema, rng) if how == 0 else rng.choice(good[alike])
        call.body = rendered(body if how < 2 else mutated(body, rng, list(RANK.values())), rng)
    elif template == "/v1/catalogs" and method == "POST":
        lines = [json.loads(line) for line in as_lines(generated_catalog()).splitlines()]
        lines = rng.choice((lines[:-1], lines[::-1], mutated(lines, rng)))
        call.body = b"\n".join(json.dumps(line).encode() for line in lines)
        call.body = call.body if rng.random() < 0.7 else rendered(lines, rng)
    elif rng.random() < 0.1:
        call.body = rendered(RANK, rng)
    if rng.random() < 0.5:
        keys = (
            ADMIN["Authorization"],
            ADMIN["Authorization"],
            "Bearer cl13nt-k3y",
            "Bearer é",
            "Basic x",
            "",
        )
        call.headers["Authorization"] = rng.choice(keys)
    if rng.random() < 0.3:
        call.headers["X-Request-Id"] = rng.choice(("r1", "r" * 200, "\xff", "a b"))
    return call


def scores(answer: Mapping[str, Any]) -> dict[str, float]:
    """An answer's scores by item."""
    return {item["item_id"]: item["score"] for item in answer["items"]}


def apart(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The largest difference of two answers' scores; infinite where they have other items."""
    if one.keys() != other.keys():
        return float("inf")
    return max((abs(one[item] - other[item]) for item in one), default=0.0)


def damaged(folder: Path, rng: random.Random) -> Path:
    """Break one of the JSON files of a model folder, in place: cut, bytes changed, a value replaced, gone. Its path."""
    path = rng.choice(sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jsonl")))
    data = path.read_bytes()
    how = rng.randrange(6)
    if how == 0:
        path.unlink()
    elif how == 1:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == 2:
        broken = bytearray(data)
        for _ in range(rng.choice((1, 3, 40))):
            broken[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(broken)
    elif how == 3:
        path.write_bytes(rng.choice((b"", b"null", b"[" * 100_000, b"\xff\xfe", data * 2)))
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in data.splitlines()]
        path.write_bytes(b"\n".join(json.dumps(line).encode() for line in mutated(lines, rng)))
    else:
        path.write_text(json.dumps(mutated(json.loads(data), rng)))
    return path


def http_of(path: str, body: Any, headers: bytes = b"") -> bytes:
    """A request as bytes. headers: more lines of its head."""
    content = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d" % (path.encode(), headers, len(content))
    return head + b"\r\n\r\n" + content


def send_raw(port: int, data: bytes, rng: random.Random) -> bytes:
    """Send bytes in a few pieces and then nothing more, or leave without a word. All that the server answered."""
    answered = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        try:
            step = rng.choice((1 << 20, 1_000, 1 + len(data) // 3))
            for start in range(0, len(data), step):
                connection.sendall(data[start : start + step])
            if rng.random() < 0.8:
                connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(1 << 16):
                    answered += chunk
        except TimeoutError:
            raise
        except OSError:
            pass  # the server hung up first
    return answered


class Client:
    """A keep-alive connection, made again where the server closes it. headers: of what `get` and `post` send."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def ask(self, call: Call) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer. OSError, HTTPException where there is none."""
        try:
            self._connection.request(call.method, call.path, call.body, call.headers)
            with self._connection.getresponse() as response:
                headers = {name.lower(): value for name, value in response.getheaders()}
                return response.status, headers, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON. body: bytes, or a value to send as JSON."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        status, _, answer = self.ask(Call(method, path, path, content, self._headers))
        return status, json.loads(answer)

    def get(self, path: str) -> Any:
        return self.call("GET", path)[1]

    def post(self, path: str, body: Any) -> Any:
        """The answer; ValueError where it is a refusal."""
        status, answer = self.call("POST", path, body)
        if status >= 300:
            raise ValueError(f"{status}: {answer}")
        return answer

    def good_scores(self) -> dict[str, float]:
        """Scores of three good requests, one of each sort."""
        asked = (("/v1/recommend", RECOMMEND), ("/v1/rank", RANK), ("/v1/rank", SCORE))
        answers = [self.post(path, body) for path, body in asked]
        return {
            f"{at} {item}": score
            for at, answer in enumerate(answers)
            for item, score in scores(answer).items()
        }

    def metrics(self) -> dict[str, float]:
        """All series by their full names."""
        _, _, body = self.ask(Call("GET", "/metrics", "/metrics", None, self._headers))
        lines = [line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def settled(self, model: str = "jgr") -> str:
        """Wait until no change of a model runs: how its last reload and its last activation went."""
        until_s = time.monotonic() + START_PATIENCE_S
        while True:
            reload = self.get(f"/v1/models/{model}")["reload"]
            activation = self.get(f"/v1/catalogs?model={model}")["activation"]
            if "running" not in (reload, activation):
                return f"{reload} {activation}"
            if time.monotonic() > until_s:
                raise TimeoutError(f"a change of {model} goes on: {reload}, {activation}")
            time.sleep(0.02)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Process:
    """What a process takes of the machine."""

    pid: int

    @property
    def rss_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        return self._status("VmRSS") * 1024

    @property
    def threads(self) -> int:
        return self._status("Threads")

    @property
    def descriptors(self) -> int:
        """Files and sockets that the process has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


class Server:
    """`jgr serve` over configuration files, as a process. A context manager; leaving it drains and ends it."""

    def __init__(
        self, files: Sequence[Path], log: Path, *settings: str, file_bytes: int | None = None
    ) -> None:
        """log: what it says, which is added to. file_bytes: how large a file it may write; None: any."""
        flags = [*(f"--config={file}" for file in files), *(f"--set={setting}" for setting in settings)]
        self._command = [sys.executable, "-c", "from jgr.cli.main import run; run()", "serve", *flags]
        self._log, self._file_bytes = log, file_bytes
        self.port = 0
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self.end(signal.SIGTERM)
        if exception == (None, None, None) and self._process.returncode != 0:
            raise RuntimeError(f"the server ended with exit code {self._process.returncode}; see {self._log}")

    def start(self) -> None:
        """Start it, and wait until it serves."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        if self._file_bytes is not None:
            limit = (self._file_bytes, self._file_bytes)
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, limit)
        assert self._process.stdout is not None
        url = self._process.stdout.readline()
        if not url.startswith("http"):
            raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")
        self.port = int(url.rpartition(":")[2])

    def end(self, number: signal.Signals) -> int:
        """End it by a signal: its exit code."""
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    @property
    def process(self) -> Process:
        return Process(self._process.pid)

    @property
    def tracebacks(self) -> int:
        """How many its log has."""
        return self._log.read_text(errors="replace").count("Traceback (most recent call last)")


def eventually(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Ask until something holds, or for as long as we are willing to wait: whether it came to hold."""
    until_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True
