# SPDX-License-Identifier: Apache-2.0
"""The sections on how requests are run: compiled shapes, executors, batches and the HTTP server."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Literal

from jgr.fields import ConfigError, check, require, sizes

MAX_WAIT_MS = 60_000
"""The largest batching.max_wait_ms. No server waits a minute to fill a batch, so a larger value is a slip."""
OWN_PATHS = ("/v1", "/v2", "/health", "/metrics", "/docs", "/ui", "/openapi.json")
"""What the paths of the HTTP server begin with; a base path that does as well would hide some of them."""


@dataclass(frozen=True)
class ExecutorsConfig:
    """The executors of scorers: models that score a user's candidates in one pass (HSTU, STU, Climber, SASRec, LRURec).

    A request is split into parts of at most `sizes` candidates; each part runs on an executor of its size.
    """

    sizes: tuple[int, ...] = (128, 256, 512, 1024)  # compiled shapes: candidates in a part
    number: int = 2  # executors of each size, each with buffers and a thread of its own
    streams: int = 2  # parts that run at the same time
    # How often the user's history is encoded. part: in each part of a request; request: once a request; cache: once for
    # all requests of the same user with the same history, whose state is kept in the pool of cache.device_mb.
    share_user: Literal["part", "request", "cache"] = "request"
    # Most new events that are computed on top of a cached user and written behind it; 0: a history that grew is
    # computed whole. Only for models whose events do not depend on later ones.
    growth: int = 0
    # Numbers of events for which there are programs of their own, unless share_user=part; a user takes the shortest
    # that holds the history. Empty: half, a quarter and an eighth of the model's longest, none below 64.
    history_lengths: tuple[int, ...] = ()
    # How Climber is computed, with the same scores (FLAME-7). op_by_op: each operation is a program, dispatched by the
    # host; xla: one program; fused: one program with the fused ops, as all other models have it.
    build: Literal["op_by_op", "xla", "fused"] = "fused"

    def __post_init__(self) -> None:
        check(self, number=1, streams=1, growth=0)
        require(self.number <= 1024, f"executors.number must be at most 1024, not {self.number}")
        sizes("executors.sizes", self.sizes)
        if self.growth and self.share_user != "cache":
            raise ConfigError("executors.growth: needs executors.share_user=cache, which keeps users")
        if self.history_lengths:
            sizes("executors.history_lengths", self.history_lengths)
            at_most = self.share_user != "part" and len(self.history_lengths) <= 8
            require(at_most, "executors.history_lengths: at most 8, and none with executors.share_user=part")


@dataclass(frozen=True)
class ProfilesConfig:
    """The shapes that are compiled at start-up: the product of these sizes, each ascending."""

    batch: tuple[int, ...] = (1, 8)  # rows of a batch, one for each request
    tokens: tuple[int, ...] = (64, 256)  # prompt length of a row, padding included
    widths: tuple[int, ...] = (32,)  # beam width of a row, for recommend
    candidates: tuple[int, ...] = (128,)  # candidates of a row, for rank

    def __post_init__(self) -> None:
        check(self)
        for f in dataclasses.fields(self):
            sizes(f"profiles.{f.name}", getattr(self, f.name))


@dataclass(frozen=True)
class BatchingConfig:
    """When requests are batched, and how many may wait."""

    max_tokens: int = 8192  # most tokens in a batch, padding included
    max_wait_ms: float = 0.0  # how long a request waits for others to fill a batch; 0: not at all
    # Most requests that wait, of each sort: with a deadline, without one, and of priority batch. One more is refused
    # with 429.
    max_queue: int = 1024
    # Which request goes next: deadline, the earliest deadline of those that can still be met, and what cannot be
    # answered in time is refused at once; or, to compare with, which refuse only what a full queue has no room for:
    # edf, the earliest deadline; fifo, lifo, the first or the last come; codel, fifo. With codel a request gets a 504,
    # even without a deadline, once it has waited for 20 ms, or for 100 ms where the queue was empty within the last
    # 100 ms.
    order: Literal["deadline", "edf", "fifo", "lifo", "codel"] = "deadline"
    # Batches of a stream that are handed to the device, so that it need not wait for the host.
    in_flight: int = 2
    streams: int = 1  # batches without a cache that run at the same time; a scorer has executors.streams

    def __post_init__(self) -> None:
        check(self, max_tokens=1, max_wait_ms=0, max_queue=1, in_flight=1, streams=1)
        for name in ("in_flight", "streams"):
            require(
                getattr(self, name) <= 64, f"batching.{name} must be at most 64, not {getattr(self, name)}"
            )
        ms = self.max_wait_ms
        require(ms <= MAX_WAIT_MS, f"batching.max_wait_ms must be at most {MAX_WAIT_MS}, not {ms}")


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server and the limits on what it accepts."""

    host: str = "127.0.0.1"  # address to listen on; 127.0.0.1 serves this machine only
    port: int = 8000  # port to listen on; 0: any free port
    api_key: str = field(default="", repr=False)  # key that every client must send; empty: none is needed
    # Key for calls that change the server (reloads, catalogs); empty: they are refused.
    admin_key: str = field(default="", repr=False)
    keys: str = ""  # JSON file of more keys, each with a name, a role and limits; empty: none
    max_body_bytes: int = 1 << 20  # largest body of a request, in bytes
    max_history: int = 4096  # most items in a request's history
    max_text_bytes: int = 1 << 16  # most bytes of a request's history_texts, all together
    max_candidates: int = 10_000  # most candidates in a request
    max_filter_items: int = 4096  # most item ids in a request's filters, all lists together
    unknown_items: Literal["skip", "reject"] = "skip"  # what happens to history items that the catalog lacks
    # Cores that a model on a CPU leaves to HTTP, JSON and plans: runs take as long under load as alone then, and fewer
    # of them go into a second. 0: the model's threads and the server's share all cores.
    host_cores: int = 0
    max_connections: int = 4096  # most connections at a time; one more gets a 503 and is closed
    write_timeout_s: float = 30.0  # seconds that a client has to take an answer; then its connection is cut
    drain_timeout_s: float = 30.0  # seconds that accepted requests have to finish after SIGTERM
    # Deadline in milliseconds of a request that has none of its own; none: no deadline.
    default_deadline_ms: float | None = None
    # A request without a deadline is as urgent as one that is due so many milliseconds after it came.
    patience_ms: float = 1000.0
    # Whether each request gets a line in the log; /health, /v2/health and /metrics get one only when not answered 200.
    access_log: bool = False
    # File to which every call of a policy is written, with what requests say of users; empty: none.
    journal: str = ""
    # Whether /v1/explain/recommend and /v1/explain/rank show how an answer came about. Each program that recommends
    # then has a second one beside it, which returns the beams of every level.
    explain: bool = False
    # OTLP endpoint to which requests' traces are sent, such as http://127.0.0.1:4318; empty: nowhere. Needs jgr[otel].
    traces: str = ""
    trace_ratio: float = 1.0  # share of the requests without a traceparent that are traced
    # Origins whose pages may call the server from a browser, such as https://shop.example, or * for any; empty: none.
    cors_origins: tuple[str, ...] = ()
    tls_certificate: str = (
        ""  # PEM file of a certificate and its chain, with which clients ask by https; empty: http
    )
    tls_key: str = ""  # PEM file of the certificate's key, without a password
    # Path under which a gateway shows the server, such as /jgr; requests are answered with it and without it. It begins
    # with none of the server's own paths, such as /v1.
    base_path: str = ""
    open_health: bool = True  # whether /health is answered without a key where clients need one
    open_metrics: bool = False  # whether /metrics is answered without a key
    open_docs: bool = False  # whether /docs, with /openapi.json, is answered without a key
    open_ui: bool = False  # whether the page /ui needs no key; what it asks of the API does
    grpc_port: int | None = (
        None  # port of KServe's gRPC service, 0 for any free one; none: it is off. Needs jgr[grpc]
    )

    def __post_init__(self) -> None:
        check(self, port=0, max_body_bytes=1, max_history=1, max_candidates=1, drain_timeout_s=0)
        check(
            self, max_text_bytes=0, max_filter_items=0, max_connections=1, write_timeout_s=0.1, patience_ms=0
        )
        check(self, host_cores=0)
        require(self.patience_ms <= 1e9, f"server.patience_ms must be at most 1e9, not {self.patience_ms}")
        same = bool(self.api_key) and self.api_key == self.admin_key
        require(not same, "server.admin_key must not be server.api_key, which clients have")
        require(bool(self.host), "server.host must not be empty; 127.0.0.1 serves this machine only")
        drain_s = self.drain_timeout_s
        require(drain_s <= 1e6, f"server.drain_timeout_s must be at most 1e6, not {drain_s}")
        require(self.port <= 65535, f"server.port must be at most 65535, not {self.port}")
        port = self.grpc_port
        require(
            port is None or 0 <= port <= 65535, f"server.grpc_port must be 0 to 65535 or none, not {port}"
        )
        same = bool(self.port) and self.port == self.grpc_port
        require(not same, "server.grpc_port must not be server.port, where HTTP is served")
        paired = bool(self.tls_certificate) == bool(self.tls_key)
        require(paired, "server.tls_certificate and server.tls_key: one is of no use without the other")
        for origin in self.cors_origins:
            fits = origin == "*" or re.fullmatch(r"https?://[0-9A-Za-z._:\[\]-]+", origin)
            require(
                bool(fits),
                f"server.cors_origins: must be * or origins such as https://shop.example, not {origin!r}",
            )
        base = re.fullmatch(r"(/(?!\.\.?(/|$))[0-9A-Za-z._~-]+)*", self.base_path)
        require(
            bool(base),
            f"server.base_path must be a path such as /jgr, without / at its end, not {self.base_path!r}",
        )
        first = "/".join(self.base_path.split("/")[:2])
        require(
            first not in OWN_PATHS,
            f"server.base_path must not begin with {first}, a path of the server itself",
        )
        url = self.traces
        known = not url or re.fullmatch(r"https?://[0-9A-Za-z._:\[\]-]+(/[0-9A-Za-z._~/-]*)?", url)
        require(bool(known), f"server.traces must be a URL such as http://127.0.0.1:4318, not {url!r}")
        ratio = self.trace_ratio
        require(0 <= ratio <= 1, f"server.trace_ratio must be 0 to 1, not {ratio}")
        ms = self.default_deadline_ms
        require(ms is None or ms > 0, f"server.default_deadline_ms must be above 0 or none, not {ms}")
