# SPDX-License-Identifier: Apache-2.0
"""A catalog small enough to work answers out by hand, an executor that can be held and broken, a live server.

leaf   0    1       2    3    4          prompt of history [a]: <bos> <x0> <y0> <sid> = 1 + 3 + 6 + 2 = 12
items  a    b, b2   c    d    7          so its beams start at leaf 12 mod 5 = 2: c, d, 7, a, b, b2
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, override
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.decoders.null import NullExecutor
from jgr.serving.decoders.serve import ServedDecoder, decoder_engine
from jgr.serving.decoders.work import Outcome, Work
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import Engine
from jgr.serving.http.listener import Listener
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import Profile

PATIENCE_S = 120.0
"""No test waits this long unless it fails."""

ITEMS = ("a", "b", "b2", "c", "d", "7")
CATALOG = Catalog.build(
    ITEMS,
    [
        ("<x0>", "<y0>"),
        ("<x0>", "<y1>"),
        ("<x0>", "<y1>"),
        ("<x1>", "<y0>"),
        ("<x1>", "<y1>"),
        ("<x2>", "<y0>"),
    ],
    [{"title": f"title of {item}"} for item in ITEMS],
)
TREE = PrefixTree.build(CATALOG.codes)
SETTINGS = (
    "prompt.template=<bos>{history}<sid>",
    "server.port=0",
    "beam.width=5",
    "prompt.max_items=3",
    "profiles.batch=1,4",
    "profiles.tokens=8",
    "profiles.widths=5",
    "profiles.candidates=4",
)


def make_config(*settings: str) -> Config:
    return override(Config(), *SETTINGS, *settings)


class FakeExecutor(NullExecutor):
    """A NullExecutor that records its batches, waits while it is held, and raises what it is told to.

    bias: added to every score, to tell versions apart.
    """

    def __init__(self, profiles: tuple[Profile, ...], bias: float = 0.0) -> None:
        super().__init__(profiles, TREE.n_leaves)
        self._bias = np.float32(bias)
        self.batches: list[int] = []
        self.errors: deque[Exception] = deque()
        self._open = threading.Event()
        self._open.set()
        self._entered = threading.Semaphore(0)

    def hold(self) -> None:
        """Batches and warm-ups that start from now on wait for `release`."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def forget_entered(self) -> None:
        """`wait_entered` counts from now on."""
        while self._entered.acquire(blocking=False):
            pass

    def wait_entered(self) -> None:
        """Block until one more batch or warm-up has started."""
        assert self._entered.acquire(timeout=PATIENCE_S)

    def warm_up(self, progress: Progress) -> None:
        self.progress = progress
        self._pass()
        super().warm_up(progress)

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        self.batches.append(len(works))
        self._pass()
        outcomes = super().run(profile, works)
        return [dataclasses.replace(outcome, scores=outcome.scores + self._bias) for outcome in outcomes]

    def _pass(self) -> None:
        self._entered.release()
        assert self._open.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.popleft()


def make_engine(config: Config, executor: NullExecutor | None = None, **engine: Any) -> Engine[ServedDecoder]:
    """engine: further arguments of decoder_engine."""
    prompts = PromptBuilder(config.prompt, semantic_id_tokenizer(CATALOG), CATALOG)
    executor = executor or FakeExecutor(make_profiles(config.profiles))
    return decoder_engine(config.model.name, CATALOG, TREE, prompts, executor, config, **engine)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, str]:
        """The error object, after a check of its shape."""
        assert self.json.keys() == {"error"}
        error: dict[str, str] = self.json["error"]
        assert {"type", "message", "request_id"} <= error.keys() <= {
            "type", "message", "request_id", "field", "predicted_ms"
        }  # fmt: skip
        assert error["request_id"] == self.headers["x-request-id"]
        return error


class Pending:
    """A request that was sent and not yet answered."""

    def __init__(self, port: int, method: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self._connection.request(method, path, content, dict(headers))

    def reply(self) -> Reply:
        with self._connection.getresponse() as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            reply = Reply(response.status, headers, response.read())
        self._connection.close()
        return reply

    def abandon(self) -> None:
        self._connection.close()


class LiveServer:
    """The whole server on a free port, in a thread of this process. A context manager; leaving it drains."""

    def __init__(
        self,
        *settings: str,
        hold: bool = False,
        costs: Mapping[Profile, float] | None = None,
        **listener: Any,
    ) -> None:
        """costs: seconds that runs are said to take. listener: arguments of the Listener, such as `load`."""
        self.config = make_config(*settings)
        self.executor = FakeExecutor(make_profiles(self.config.profiles))
        self.executor.costs = costs or {}
        if hold:
            self.executor.hold()
        self.engine = make_engine(self.config, self.executor)
        self.ready = threading.Event()
        self.listener = Listener(self.engine, self.config, on_ready=lambda url: self.ready.set(), **listener)
        self.port = int(self.listener.url.rpartition(":")[2])
        self._thread = threading.Thread(target=self.listener.serve_until_stopped, daemon=True)
        self._hold = hold

    def __enter__(self) -> LiveServer:
        self._thread.start()
        if not self._hold:
            assert self.ready.wait(PATIENCE_S)
            self.executor.wait_entered()
        return self

    def __exit__(self, *exception: object) -> None:
        self.executor.release()
        self.stop()
        self.join()
        assert self.listener.models.join(PATIENCE_S)
        self.listener.models.check()

    def stop(self) -> None:
        self.listener.stop()

    def join(self) -> int:
        """Wait for the end. The exit code."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.listener.exit_code

    def send(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Pending:
        """Send a request: POST where there is a body. Underscores in header names stand for dashes."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return Pending(self.port, method or ("GET" if body is None else "POST"), path, body, names)

    def call(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
        return self.send(path, body, method, **headers).reply()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def metric(self, series: str) -> float:
        """The value of a series, such as 'jgr_requests_total{endpoint="/v1/rank",status="200"}'."""
        lines = self.call("/metrics").body.decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == series))

    def counted(self, series: str) -> float:
        """The value of a series that may not be there yet; then 0."""
        try:
            return self.metric(series)
        except StopIteration:
            return 0.0

    def model(self, **headers: str) -> Any:
        """The entry of the one model."""
        (model,) = self.call("/v1/models", **headers).json["data"]
        return model

    def wait_for(self, series: str, value: float) -> None:
        """Ask until the series has the value; each question lets the server's loop turn."""
        for _ in range(10_000):
            if self.metric(series) == value:
                return
        raise AssertionError(f"{series} is {self.metric(series)}, not {value}")
