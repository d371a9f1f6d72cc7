# SPDX-License-Identifier: Apache-2.0
"""The configuration: a tree of frozen dataclasses, one section per part of jgr.

The one idea: a field's annotation is the only statement of its type. It checks the values of a config file
and types the text of `--set section.field=value`; the field's default stands nowhere else.

Invariants: a Config that exists is valid, section by section; nothing here reads flags or the environment.
Whether two sections fit together (such as a beam width and the compiled profiles) is checked by the code that
reads both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from jgr.config_file import line_in, run_python
from jgr.config_training import DataConfig as DataConfig
from jgr.config_training import TrainConfig as TrainConfig
from jgr.feedback import FeedbackConfig as FeedbackConfig
from jgr.fields import ConfigError as ConfigError
from jgr.fields import UserError as UserError
from jgr.fields import check, describe, nearest, parse, require, sizes

MAX_WAIT_MS = 60_000
"""The largest batching.max_wait_ms. No server waits a minute to fill a batch, so a larger value is a slip."""
RENAMED = {"rank.scorer": "rank.method"}
"""Old names of fields; whoever still uses one is told the new one."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to serve."""

    name: str = "jgr"  # the name that requests, answers and /v1/models use for it
    path: str = ""  # folder of the weights: a Hugging Face checkpoint, or one that `jgr train` wrote
    # Type of weights and activations. Scores are float32 in either case; bfloat16 halves memory, on GPUs time too.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Folder that keeps compiled programs, so that the next start is fast; empty: nothing is kept.
    compilation_cache: str = "~/.cache/jgr"

    def __post_init__(self) -> None:
        check(self)
        require(bool(self.name), "model.name must not be empty")


@dataclass(frozen=True)
class CatalogConfig:
    """The items that may be recommended."""

    path: str = ""  # .jsonl[.gz], .index.json[.gz] with its .item.json[.gz] in the same folder, or .catalog
    segments: str = "segments"  # metadata field that holds an item's segments: one name or a list of names
    segment_rows: int = 32  # combinations of segments whose bitmaps stay on the device
    max_versions: int = 4  # catalogs that the server keeps: the active one, the one before it, and uploads
    max_upload_bytes: int = 256 << 20  # largest body of POST /v1/catalogs, in bytes

    def __post_init__(self) -> None:
        check(self, segment_rows=1, max_versions=3, max_upload_bytes=1)


@dataclass(frozen=True)
class PromptConfig:
    """How a history becomes tokens."""

    template: str = "<bos>{history}"  # the whole prompt; {history} stands for the items
    item: str = "{sid}"  # text of one history item; may name metadata fields, as in "{title}: {sid}"
    max_items: int = 50  # how many of a history's last items are kept
    # A history longer than max_items is cut in steps of `stride` items. Between two cuts its first tokens stay the
    # same, so that their cached keys and values can be reused. Up to stride - 1 items fewer are kept; 1: none fewer.
    stride: int = 1
    separator: str = ""  # text between two items

    def __post_init__(self) -> None:
        check(self, max_items=1, stride=1)
        fits = self.stride <= self.max_items
        require(fits, f"prompt.stride ({self.stride}) must be at most prompt.max_items ({self.max_items})")
        require(self.template.count("{history}") == 1, "prompt.template must hold {history} exactly once")


@dataclass(frozen=True)
class BeamConfig:
    """The beam search over semantic ids."""

    width: int = 32  # beam width of a request that names none
    # What a step's log-softmax runs over: the legal continuations only, or the whole vocabulary.
    normalize: Literal["valid", "full"] = "valid"
    approximate: int = 0  # most continuations of one beam that a step keeps; 0: all of them, the exact search
    items_per_id: int = 50  # most items of an answer that share a semantic id: the catalog's first ones

    def __post_init__(self) -> None:
        check(self, width=1, approximate=0, items_per_id=1)


@dataclass(frozen=True)
class RankConfig:
    """How a decoder ranks candidates. All fields but `method` are for the methods with candidates in the prompt."""

    # likelihood: of each candidate's semantic id after the history's prompt. The others put all candidates into the
    # prompt and take a score from each one's token (item_token, for one-level catalogs), from the answer to a question
    # about each (item_probe), or from a letter for each place in the list (list_letter).
    method: Literal["likelihood", "item_token", "item_probe", "list_letter"] = "likelihood"
    item: str = "{title}{sid}"  # text of one candidate, as in prompt.item; item_token needs {sid} at its end
    # Text after the history and the candidates. {last} is the semantic id of the history's last item: recency-focused
    # prompting, which a small model needs (arXiv 2305.08845).
    instruction: str = "<sid>"
    probe: str = "<sid>"  # the question about one candidate, for item_probe
    positive: str = "<yes>"  # the token that says yes; the score is its logit minus that of `negative`
    negative: str = "<no>"  # the token that says no
    letters: str = "<l_{n}>"  # the token of the n-th candidate, for list_letter
    item_span: int = 32  # most tokens of one candidate, and the positions that the candidates share
    requests: int = 8  # most requests in a batch
    tokens: tuple[int, ...] = (512, 2048)  # compiled shapes: tokens of a batch to compute
    context: tuple[int, ...] = (2048,)  # compiled shapes: tokens of a batch whose keys and values are cached
    candidates: int = 256  # most candidates in a batch, all its requests together

    def __post_init__(self) -> None:
        check(self, item_span=1, requests=1, candidates=1)
        sizes("rank.tokens", self.tokens)
        sizes("rank.context", self.context)


@dataclass(frozen=True)
class ExecutorsConfig:
    """The executors of scorers: models that score a user's candidates in one pass (HSTU, STU, Climber, SASRec, LRURec).

    A request is split into parts of at most `sizes` candidates; each part runs on an executor of its size.
    """

    sizes: tuple[int, ...] = (128, 256, 512, 1024)  # compiled shapes: candidates in a part
    number: int = 2  # executors of each size, each with buffers and a thread of its own
    streams: int = 2  # parts that run at the same time
    # How often the user's history is encoded: in each part; once a request; or once for all requests of the same user
    # with the same history, whose state is kept in the pool of cache.device_mb.
    share_user: Literal["part", "request", "cache"] = "request"
    # Most new events that are computed on top of a cached user, for models whose events do not depend on later ones.
    # The cached state takes more memory for it. 0: a history that grew is computed whole.
    growth: int = 0
    # How Climber is computed, with the same scores (FLAME-7): each operation a program of its own, dispatched by the
    # host; one program; one program with the fused ops. For comparisons: other models have the last alone.
    build: Literal["op_by_op", "xla", "fused"] = "fused"

    def __post_init__(self) -> None:
        check(self, number=1, streams=1, growth=0)
        require(self.number <= 1024, f"executors.number must be at most 1024, not {self.number}")
        sizes("executors.sizes", self.sizes)
        if self.growth and self.share_user != "cache":
            raise ConfigError("executors.growth: needs executors.share_user=cache, which keeps users")


@dataclass(frozen=True)
class CacheConfig:
    """The cache of users' and items' keys and values."""

    # What comes first in a prompt, and so can be reused. none: there is no cache; user: always the user; item: always
    # the items; cache_agnostic: the longer one; hotness: the user if it is longer and is asked for more often than the
    # coldest cached user (BAT-10).
    policy: Literal["none", "user", "item", "cache_agnostic", "hotness"] = "none"
    # Device memory of the pool, and host memory for entries that leave the device, in MiB. A server has one of each,
    # which its models share: those of its first configuration.
    device_mb: float = 64.0
    host_mb: float = 0.0
    page_kb: int = 0  # size of the pool's pages in KiB; 0: 2048, on a CPU 64, less where the pool is small
    share: float = 1.0  # weight of this model when the models divide the pool
    # Share of the model's pages that items may take; users get the others. None: what all items need, but at most 0.8,
    # where the policy caches both.
    item_share: float | None = None
    cell_tokens: int = 2  # tokens in a cell, by which entries grow
    # New tokens of a request that continues from cached ones, in the smallest compiled shapes of recommend.
    new_tokens: int = 16
    # With hotness, which user goes first. priced: as BAT-10, but a user is admitted, or read from the cache, only where
    # that computes less than the items first would; published: by how often the user comes alone.
    rule: Literal["priced", "published"] = "priced"
    window_s: float = 300.0  # length of the sliding window in which accesses are counted, in seconds
    # How much more often than the least used cached user another must be asked for to take its place (priced rule).
    hysteresis: float = 0.1
    shadow: float = 0.001  # share of requests computed again without the cache, to measure the drift
    # Cached items do not see the items before them. Repair computes some of their tokens again, so that they do: the
    # first repair_tokens of each item, or the share repair_share of a request's item tokens, those that differ most.
    repair_tokens: int = 0
    repair_share: float = 0.0

    def __post_init__(self) -> None:
        check(self, device_mb=0, host_mb=0, page_kb=0, share=0, cell_tokens=1, new_tokens=1, window_s=1e-3)
        check(self, hysteresis=0, shadow=0, repair_tokens=0, repair_share=0)
        require(self.repair_share <= 1, f"cache.repair_share must be at most 1, not {self.repair_share}")
        both = self.repair_tokens and self.repair_share
        require(not both, "cache.repair_tokens and cache.repair_share: only one of them can be above 0")
        share = self.item_share
        require(share is None or 0 <= share <= 1, f"cache.item_share must be 0 to 1 or none, not {share}")
        require(self.shadow <= 1, f"cache.shadow must be at most 1, not {self.shadow}")


@dataclass(frozen=True)
class FeaturesConfig:
    """The store of the items' features, and its cache in this process."""

    store: str = field(default="", repr=False)  # redis://host:port/db or an SQLite file; empty: no features
    # Names and types for `jgr features load`, as "price:float32, genres:int32[4]"; empty: read off the metadata.
    schema: str = ""
    # When a request waits for the store. asynchronous: never; sync_missing: for records that are not cached;
    # synchronous: for those and for records older than ttl_s.
    mode: Literal["asynchronous", "synchronous", "sync_missing"] = "sync_missing"
    # Memory of the cache, in MiB. 0: no cache, every request asks the store; a mode that never waits needs some.
    cache_mb: float = 64.0
    buckets: int = 64  # parts of the cache; a full one drops its least recently used record
    ttl_s: float = 60.0  # age in seconds at which a record is fetched again; +-10 %, drawn for each record
    absent_ttl_s: float = 5.0  # the same for an item that the store does not have
    max_wait_ms: float = 20.0  # longest time a request waits for the store, also bounded by its deadline
    timeout_ms: float = 500.0  # longest time a fetch may take
    linger_ms: float = 20.0  # how long a fetch that no request waits for collects further items
    connections: int = 4  # threads that ask the store, with a connection each
    bind_threads: bool = True  # bind them to the accelerator's NUMA node, on machines with several nodes

    def __post_init__(self) -> None:
        check(self, cache_mb=0, buckets=1, ttl_s=1e-3, absent_ttl_s=1e-3, max_wait_ms=0)
        check(self, timeout_ms=1, connections=1, linger_ms=0)


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
    # Which request goes next. deadline: the earliest deadline of those that can still be met; what cannot be answered
    # in time is refused at once. The others, for comparisons, refuse nothing: edf, the earliest deadline; fifo, lifo,
    # the first or the last come; codel, fifo in which who waited for long is ended.
    order: Literal["deadline", "edf", "fifo", "lifo", "codel"] = "deadline"
    in_flight: int = (
        2  # batches of a stream that are handed to the device, so that it need not wait for the host
    )
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

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: str = field(default="", repr=False)  # key that every client must send; empty: none is needed
    # Key for calls that change the server (reloads, catalogs); empty: they are refused.
    admin_key: str = field(default="", repr=False)
    keys: str = ""  # JSON file of more keys, each with a name, role, rate and share; empty: none
    max_body_bytes: int = 1 << 20  # largest body of a request, in bytes
    max_history: int = 4096  # most items in a request's history
    max_candidates: int = 10_000  # most candidates in a request
    max_filter_items: int = 4096  # most item ids in a request's filters, all lists together
    unknown_items: Literal["skip", "reject"] = "skip"  # what happens to history items that the catalog lacks
    max_connections: int = 4096  # most connections at a time; one more gets a 503 and is closed
    write_timeout_s: float = 30.0  # seconds that a client has to take an answer; then its connection is cut
    drain_timeout_s: float = 30.0  # seconds that accepted requests have to finish after SIGTERM
    default_deadline_ms: float | None = None  # deadline of a request that names none; None: no deadline
    # How long a request without a deadline waits before it is as urgent as one whose deadline is now, in milliseconds.
    patience_ms: float = 1000.0
    # File to which every call of a policy is written, with what requests say of users; empty: none.
    journal: str = ""
    # OTLP endpoint to which requests' traces are sent, such as http://127.0.0.1:4318; empty: nowhere. Needs jgr[otel].
    traces: str = ""
    trace_ratio: float = 1.0  # share of the requests without a traceparent that are traced
    # Origins whose pages may call the server from a browser, such as https://shop.example, or * for any; empty: none.
    cors_origins: tuple[str, ...] = ()
    tls_certificate: str = (
        ""  # PEM file of a certificate and its chain, with which clients ask by https; empty: http
    )
    tls_key: str = ""  # PEM file of the certificate's key, without a password
    # Path under which a gateway shows the server, such as /jgr; requests are answered with it and without it.
    base_path: str = ""
    # What is answered without a key where clients need one: /health, /metrics, /docs with /openapi.json.
    open_health: bool = True
    open_metrics: bool = False
    open_docs: bool = False
    grpc_port: int | None = (
        None  # port of KServe's gRPC service, 0 for any free one; None: it is off. Needs jgr[grpc]
    )

    def __post_init__(self) -> None:
        check(self, port=0, max_body_bytes=1, max_history=1, max_candidates=1, drain_timeout_s=0)
        check(self, max_filter_items=0, max_connections=1, write_timeout_s=0.1, patience_ms=0)
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
        base = re.fullmatch(r"(/[0-9A-Za-z._~-]+)*", self.base_path)
        require(
            bool(base),
            f"server.base_path must be a path such as /jgr, without / at its end, not {self.base_path!r}",
        )
        url = self.traces
        known = not url or re.fullmatch(r"https?://[0-9A-Za-z._:\[\]-]+(/[0-9A-Za-z._~/-]*)?", url)
        require(bool(known), f"server.traces must be a URL such as http://127.0.0.1:4318, not {url!r}")
        ratio = self.trace_ratio
        require(0 <= ratio <= 1, f"server.trace_ratio must be 0 to 1, not {ratio}")
        ms = self.default_deadline_ms
        require(ms is None or ms > 0, f"server.default_deadline_ms must be above 0 or none, not {ms}")


@dataclass(frozen=True)
class Config:
    """The whole configuration. Each part of jgr is given only the sections that it reads."""

    model: ModelConfig = field(default_factory=ModelConfig)
    catalog: CatalogConfig = field(default_factory=CatalogConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    beam: BeamConfig = field(default_factory=BeamConfig)
    rank: RankConfig = field(default_factory=RankConfig)
    executors: ExecutorsConfig = field(default_factory=ExecutorsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    profiles: ProfilesConfig = field(default_factory=ProfilesConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)

    def __post_init__(self) -> None:
        check(self)


def load_config(path: str | Path) -> Config:
    """Run the Python file at `path` and return what its `get_config()` returns.

    Raises ConfigError for anything that goes wrong in it, with the line of the file if it is known.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such config file")
    try:
        module = run_python(path)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except (Exception, SystemExit) as e:
        line = line_in(path, e)
        renamed = [new for old, new in RENAMED.items() if _is_unknown(e, old)]
        hint = f"; the field is called {renamed[0]} now" if renamed else ""
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {kind}{e}{hint}") from e
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: define get_config() so that it returns a jgr.config.Config")
    return config


def override(config: Config, *assignments: str) -> Config:
    """Return `config` with each `section.field=value` applied; the last value of a field wins.

    The values of one call are checked together, so that fields of a section that depend on each other can
    change in one step. Raises ConfigError for an unknown field, naming the nearest one, and for a value that the
    field's annotation or its section excludes.
    """
    hints = _field_types()
    updates: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"cannot override by '{assignment}': write section.field=value")
        _require_field(key, hints)
        section, name = key.split(".")
        try:
            updates.setdefault(section, {})[name] = parse(text, hints[key])
        except ValueError:
            raise ConfigError(f"{key} must be {describe(hints[key])}, not '{text}'") from None
    return _replace(config, updates)


def from_json(sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """The configuration that `to_json` wrote; sections and fields that are left out have their defaults.

    Raises ConfigError for an unknown field, and for a value that the field excludes.
    """
    hints = _field_types()
    updates: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        for name, value in values.items():
            _require_field(f"{section}.{name}", hints)
            updates.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
    return _replace(Config(), updates)


def _require_field(key: str, hints: Mapping[str, Any]) -> None:
    if key in RENAMED:
        raise ConfigError(f"there is no field '{key}' any more; it is called '{RENAMED[key]}' now")
    if key not in hints:
        near = nearest(key, hints)
        raise ConfigError(f"there is no field '{key}' in the configuration; the nearest is '{near}'")


def _replace(config: Config, updates: Mapping[str, Mapping[str, Any]]) -> Config:
    sections = {s: dataclasses.replace(getattr(config, s), **values) for s, values in updates.items()}
    return dataclasses.replace(config, **sections)


def to_json(config: Config) -> dict[str, Any]:
    """The whole tree as JSON values. Secrets (fields kept out of repr) that are set are shown as "***"."""
    return {s.name: _section_to_json(getattr(config, s.name)) for s in dataclasses.fields(config)}


def _section_to_json(section: Any) -> dict[str, Any]:
    shown = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        shown[f.name] = "***" if value and not f.repr else list(value) if isinstance(value, tuple) else value
    return shown


def _is_unknown(error: BaseException, key: str) -> bool:
    """Whether `error` says that a section's class has no field of the name `key`, "section.field"."""
    section, name = key.split(".")
    return (
        str(error) == f"{section.capitalize()}Config.__init__() got an unexpected keyword argument '{name}'"
    )


def _field_types() -> dict[str, Any]:
    """The annotation of every field, by "section.field"."""
    sections = get_type_hints(Config).items()
    return {f"{s}.{name}": hint for s, section in sections for name, hint in get_type_hints(section).items()}
