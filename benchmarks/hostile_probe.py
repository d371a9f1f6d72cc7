# SPDX-License-Identifier: Apache-2.0
"""What hostile_doors asks to see whether one request holds the server's event loop: probes, and bodies that are large.

A probe asks nothing of any model, so it waits for nobody but the event loop, and for a core of the machine.
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from types import TracebackType

from benchmarks.harness import Row, rounded
from benchmarks.hostile_world import Client, Server

BODY_BYTES = 1_000_000
EVERY_S = 0.02
PATH = "/health/live"


class Probe:
    """Asks for the server's health from a connection of its own, again and again, while it is entered."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._asking = threading.Thread(target=self._ask)
        self._waited_s: list[float] = []

    def __enter__(self) -> Probe:
        self._asking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._asking.join()

    def _ask(self) -> None:
        with closing(Client(self._server.port)) as client:
            while not self._over.wait(EVERY_S):
                start_s = time.monotonic()
                with suppress(OSError, http.client.HTTPException):  # it waited all the same
                    client.get(PATH)
                self._waited_s.append(time.monotonic() - start_s)

    @property
    def longest_s(self) -> float:
        return max(self._waited_s, default=float("inf"))

    def row(self) -> Row:
        return {
            "phase": "probe",
            "probes": len(self._waited_s),
            "median_ms": rounded(1e3 * statistics.median(self._waited_s or [float("inf")])),
            "longest_ms": rounded(1e3 * self.longest_s),
        }


def large_bodies() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Paths, bodies and headers, each of which has as many values as there is room for, and is refused."""
    plain: dict[str, str] = {}
    ids = b",".join(b"%d" % at for at in range(BODY_BYTES // 8))
    texts = b",".join([b'""'] * (BODY_BYTES // 3))
    nested = b",".join([b"[" * 500 + b"]" * 500] * (BODY_BYTES // 1_001))
    yield "/v1/score", b'{"queries":["a"],"documents":[%b]}' % ids, plain
    yield "/v1/rerank", b'{"query":["a"],"documents":[%b]}' % ids, plain
    yield "/v1/rank", b'{"history":["a"],"candidates":[%b]}' % ids, plain
    yield "/v1/recommend", b'{"history":[%b],"top_k":NaN}' % texts, plain
    tensor = b'{"inputs":[{"name":"history","datatype":"BYTES","shape":[%d],"data":[%b]}]}'
    yield "/v2/models/rank/infer", tensor % (1_000, nested), plain
    yield "/v2/models/rank/infer", tensor % (BODY_BYTES // 3, texts), plain
    count = BODY_BYTES // 4
    for shape in (count, 3):
        head = {
            "name": "history",
            "datatype": "BYTES",
            "shape": [shape],
            "parameters": {"binary_data_size": 4 * count},
        }
        described = json.dumps({"inputs": [head]}).encode()
        sizes = {"Inference-Header-Content-Length": str(len(described))}
        yield "/v2/models/rank/infer", described + bytes(4 * count), sizes
