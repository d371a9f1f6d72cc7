# SPDX-License-Identifier: Apache-2.0
"""The configuration: a tree of frozen dataclasses, one section per part of jgr.

The one idea: a field's annotation is the only statement of its type. It checks the values of a config file
and types the text of `--set section.field=value`; the field's default stands nowhere else.

Invariants: a Config that exists is valid, section by section; nothing here reads flags or the environment. The comment
of a field, above or behind it, is all that the reference (docs/configuration.md, `--help=config`) says of it. A field
that holds a key or a password has `repr=False`, and is printed nowhere.
Whether two sections fit together (such as a beam width and the compiled profiles) is checked by the code that
reads both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jgr.config_data_parallel import DataParallelConfig as DataParallelConfig
from jgr.config_embeddings import EmbeddingsConfig as EmbeddingsConfig
from jgr.config_file import line_in, run_python
from jgr.config_fleet import FleetConfig as FleetConfig
from jgr.config_formats import is_document, load
from jgr.config_memory import MemoryConfig as MemoryConfig
from jgr.config_training import DataConfig as DataConfig
from jgr.config_training import TrainConfig as TrainConfig
from jgr.config_tree import RENAMED, from_sections
from jgr.config_tree import override as override
from jgr.config_tree import to_json as to_json
from jgr.feedback import FeedbackConfig as FeedbackConfig
from jgr.fields import ConfigError as ConfigError
from jgr.fields import UserError as UserError
from jgr.fields import check, require, sizes
from jgr.named_configs import find

MAX_WAIT_MS = 60_000
"""The largest batching.max_wait_ms. No server waits a minute to fill a batch, so a larger value is a slip."""

MAX_DEVICES = 64
"""The largest model.tensor_parallel. No machine has more devices."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to serve."""

    name: str = "jgr"  # name of the model in requests, answers and /v1/models
    # Folder of the weights: one that `jgr train` wrote, a Hugging Face checkpoint, or the name of one on the hub,
    # hf://org/name[@revision].
    path: str = ""
    # Type of weights and activations; scores are float32 in either case. Empty: float32, but on a GPU bfloat16 for a
    # generator whose folder has weights of 16 bits, which halves memory and saves time there.
    dtype: Literal["", "float32", "bfloat16"] = ""
    # How a generator's layers hold their matrices: in 8 bits, as int8 or fp8 with a factor for each output channel, or
    # as the folder has them where it is empty. All else stays in model.dtype.
    quantize: Literal["", "int8", "fp8"] = ""
    # Devices that share the model's weights and each of its batches, for a model too large for one of them: heads and
    # MLPs are divided over them. A decoder's heads and the MLP's width must be multiples of it.
    tensor_parallel: int = 1
    # Whether the kernels of jgr-native may compute on a CPU, where that package is installed. False for one model of a
    # server is False for all.
    native: bool = True
    # Folder that keeps compiled programs, so that the next start is fast; empty: nothing is kept.
    compilation_cache: str = "~/.cache/jgr"

    def __post_init__(self) -> None:
        check(self, tensor_parallel=1)
        require(bool(self.name), "model.name must not be empty")
        count = self.tensor_parallel
        require(count <= MAX_DEVICES, f"model.tensor_parallel must be at most {MAX_DEVICES}, not {count}")


@dataclass(frozen=True)
class CatalogConfig:
    """The items that may be recommended."""

    # File of the items: .jsonl[.gz], .index.json[.gz] with its .item.json[.gz] in the same folder, or .catalog; empty:
    # the one in the model's folder.
    path: str = ""
    segments: str = "segments"  # metadata field that holds an item's segments: one name or a list of names
    segment_rows: int = 32  # combinations of segments whose bitmaps stay on the device
    max_versions: int = 4  # catalogs that the server keeps: the active one, the one before it, and uploads
    max_upload_bytes: int = 256 << 20  # largest body of POST /v1/catalogs, in bytes

    def __post_init__(self) -> None:
        check(self, segment_rows=1, max_versions=3, max_upload_bytes=1)


@dataclass(frozen=True)
class PromptConfig:
    """How a history becomes tokens."""

    template: str = "<bos>{history}"  # text of the whole prompt; {history} stands for the items
    # Text of one history item; may name metadata fields, as in "{title}: {sid}". {review} stands for the event's own
    # text, of a request's history_texts.
    item: str = "{sid}"
    max_items: int = 50  # how many of a history's last items are kept
    # Items by which a history above prompt.max_items is cut at a time: between two cuts its first tokens stay the same,
    # so that their cached keys and values can be reused. Up to stride - 1 items fewer are kept; 1: none fewer.
    stride: int = 1
    separator: str = ""  # text between two items
    review_tokens: int = 128  # most tokens of an event's own text; what follows is cut

    def __post_init__(self) -> None:
        check(self, max_items=1, stride=1, review_tokens=1)
        fits = self.stride <= self.max_items
        require(fits, f"prompt.stride ({self.stride}) must be at most prompt.max_items ({self.max_items})")
        require(self.template.count("{history}") == 1, "prompt.template must hold {history} exactly once")


@dataclass(frozen=True)
class BeamConfig:
    """The beam search over semantic ids."""

    width: int = 32  # beam width of a request that names none
    # What a step's log-softmax runs over. valid: the legal continuations only; full: the whole vocabulary.
    normalize: Literal["valid", "full"] = "valid"
    approximate: int = 0  # most continuations of one beam that a step keeps; 0: all of them, the exact search
    items_per_id: int = 50  # most items of an answer that share a semantic id: the catalog's first ones

    def __post_init__(self) -> None:
        check(self, width=1, approximate=0, items_per_id=1)


@dataclass(frozen=True)
class RankConfig:
    """How a decoder ranks candidates. All fields but `method` are for the methods with candidates in the prompt."""

    # What a candidate's score is. likelihood: that of its semantic id after the history's prompt; the others put all
    # candidates into the prompt, and read the score off its own token (item_token, for one-level catalogs), the answer
    # to a question about it (item_probe), or the letter of its place in the list (list_letter). list_generation: the
    # model writes the letters of all candidates one after the other, the best first, each read before the next.
    method: Literal["likelihood", "item_token", "item_probe", "list_letter", "list_generation"] = "likelihood"
    item: str = "{title}{sid}"  # text of one candidate, as in prompt.item; item_token needs {sid} at its end
    # Text after the history and the candidates. {last} is the semantic id of the history's last item: recency-focused
    # prompting, which a small model needs (arXiv 2305.08845).
    instruction: str = "<sid>"
    probe: str = "<sid>"  # the question about one candidate, for item_probe
    # The token that says yes, for item_probe: the score is its logit minus that of rank.negative.
    positive: str = "<yes>"
    negative: str = "<no>"  # the token that says no, for item_probe
    letters: str = "<l_{n}>"  # the token of the n-th candidate, for list_letter and list_generation
    item_span: int = 32  # most tokens of one candidate, and the positions that the candidates share
    requests: int = 8  # most requests in a batch of prompts with candidates
    tokens: tuple[int, ...] = (512, 2048)  # compiled shapes: tokens that a batch with candidates computes
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
    # How often the user's history is encoded. part: in each part of a request; request: once a request; cache: once for
    # all requests of the same user with the same history, whose state is kept in the pool of cache.device_mb.
    share_user: Literal["part", "request", "cache"] = "request"
    # Most new events that are computed on top of a cached user and written behind it; 0: a history that grew is
    # computed whole. Only for models whose events do not depend on later ones.
    growth: int = 0
    # Numbers of events for which there are programs of their own, with share_user=cache; a user takes the shortest that
    # holds the history. Empty: half, a quarter and an eighth of the model's longest, none below 64.
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
            at_most = self.share_user == "cache" and len(self.history_lengths) <= 8
            require(at_most, "executors.history_lengths: at most 8, and only with executors.share_user=cache")


@dataclass(frozen=True)
class CacheConfig:
    """The cache of users' and items' keys and values."""

    # What comes first in a prompt, and so can be reused. none: there is no cache; user: always the user; item: always
    # the items; cache_agnostic: the longer one; hotness: the user if it is longer and is asked for more often than the
    # coldest cached user (BAT-10). blocks: the user, and then the items one after the other as in plain text, each as
    # it is alone, wherever it stands: an approximation, which cache.repair_* bring nearer to the whole prompt (RcLLM).
    policy: Literal["none", "user", "item", "cache_agnostic", "hotness", "blocks"] = "none"
    # Device memory of the pool, in MiB; of each device where several share a model. A server has one pool, which its
    # models share: that of its first configuration.
    device_mb: float = 64.0
    # Host memory for entries that leave the device, in MiB; models share it as they share cache.device_mb.
    host_mb: float = 0.0
    page_kb: int = 0  # size of the pool's pages in KiB; 0: 2048, on a CPU 64, less where the pool is small
    share: float = 1.0  # weight of this model when the models divide the pool
    # Share of the model's pages that items may take; users get the others. none: what all items need, but at most 0.8,
    # where the policy caches both.
    item_share: float | None = None
    cell_tokens: int = 2  # tokens in a cell, by which entries grow, kept users of scorers too
    # How kept keys and values are held: in 8 bits, as int8 or fp8 with a factor for each token and head, or as they are
    # computed where it is empty. What reads kept ones approximates then; nothing else changes.
    quantize: Literal["", "int8", "fp8"] = ""
    # New tokens of a request that continues from cached ones, in the smallest compiled shapes of recommend.
    new_tokens: int = 16
    # With hotness, which user goes first. priced: as BAT-10, but a user is admitted, or read from the cache, only where
    # that computes less than the items first would; published: by how often the user comes alone.
    rule: Literal["priced", "published"] = "priced"
    window_s: float = 300.0  # length of the sliding window in which accesses are counted, in seconds
    # How much more often than the least used cached user another must be asked for to take its place (priced rule).
    hysteresis: float = 0.1
    shadow: float = 0.001  # share of requests computed again without the cache, to measure the drift
    # First tokens of each cached item that are computed again, since a cached item does not see the items before it.
    repair_tokens: int = 0
    # Share of a request's tokens of cached items that is computed again beside these, as cache.repair_by chooses.
    repair_share: float = 0.0
    # Which tokens these are. deviation: those that differ most in the second layer (CacheBlend); attention: those that
    # get the most attention in the first layer (RcLLM).
    repair_by: Literal["deviation", "attention"] = "deviation"
    # How far the order of approximate answers may be from that of prompts computed whole: the mean of 1 - Kendall's tau
    # over the last 200 samples of cache.shadow. Beyond it the model computes all prompts whole, until the samples are
    # below half of it again. none: no limit.
    max_drift: float | None = None
    # Folder of the items' keys and values that jgr kv build made: a server of its own reads candidates from it that it
    # does not have, where that is cheaper than to compute them (fleet.fetch, fleet.fetch_ms). Empty: it computes them.
    kv: str = ""
    kv_mb: float = 256.0  # host memory for items that were read from it, in MiB; they go when room is needed
    # Folder of a library of prototypes, made by jgr kv library, for cache.policy=blocks: tokens of a request's
    # history_texts take the keys and values of the nearest prototype, by jgr[library]. Empty: they are computed.
    library: str = ""
    library_cosine: float = (
        0.9  # how near a prototype must be to a token that takes its keys and values, as a cosine
    )
    # Share of the tokens of history_texts with a prototype that is computed all the same; none: as cache.repair_share.
    library_share: float | None = None

    def __post_init__(self) -> None:
        check(self, device_mb=0, host_mb=0, page_kb=0, share=0, cell_tokens=1, new_tokens=1, window_s=1e-3)
        check(self, hysteresis=0, shadow=0, repair_tokens=0, repair_share=0, library_cosine=0.9, kv_mb=0)
        require(
            self.library_cosine <= 1, f"cache.library_cosine must be at most 1, not {self.library_cosine}"
        )
        require(self.repair_share <= 1, f"cache.repair_share must be at most 1, not {self.repair_share}")
        of_texts = self.library_share
        require(
            of_texts is None or 0 <= of_texts <= 1,
            f"cache.library_share must be 0 to 1 or none, not {of_texts}",
        )
        share = self.item_share
        require(share is None or 0 <= share <= 1, f"cache.item_share must be 0 to 1 or none, not {share}")
        require(self.shadow <= 1, f"cache.shadow must be at most 1, not {self.shadow}")
        if self.max_drift is not None:
            require(
                0 < self.max_drift <= 2, f"cache.max_drift must be above 0, at most 2, not {self.max_drift}"
            )
            approximates = self.policy == "blocks" or self.repair_tokens or self.repair_share
            require(bool(approximates), "cache.max_drift: without blocks and repair nothing approximates")
            require(self.shadow > 0, "cache.max_drift: needs samples, cache.shadow above 0")


@dataclass(frozen=True)
class FeaturesConfig:
    """The store of the items' features, and its cache in this process."""

    # Address of the store, redis://host:port/db or an SQLite file; empty: no features.
    store: str = field(default="", repr=False)
    # Names and types for `jgr features load`, as "price:float32, genres:int32[4]"; empty: read off the metadata.
    schema: str = ""
    # When a request waits for the store. asynchronous: never; sync_missing: for records that are not cached;
    # synchronous: for those and for records older than features.ttl_s.
    mode: Literal["asynchronous", "synchronous", "sync_missing"] = "sync_missing"
    # Memory of the features' cache, in MiB; a mode that never waits needs some. 0: no cache, every request asks the
    # store.
    cache_mb: float = 64.0
    buckets: int = 64  # parts of the features' cache; a full one drops its least recently used record
    ttl_s: float = 60.0  # age in seconds at which a record is fetched again; +-10 %, drawn for each record
    absent_ttl_s: float = 5.0  # age in seconds at which an item that the store lacks is asked for again
    max_wait_ms: float = 20.0  # longest time a request waits for the store, also bounded by its deadline
    timeout_ms: float = 500.0  # longest time a fetch may take
    linger_ms: float = 20.0  # how long a fetch that no request waits for collects further items
    connections: int = 4  # threads that ask the store, with a connection each
    # Whether the threads that ask the store are bound to the accelerator's NUMA node, on machines with several nodes.
    bind_threads: bool = True

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
    max_connections: int = 4096  # most connections at a time; one more gets a 503 and is closed
    write_timeout_s: float = 30.0  # seconds that a client has to take an answer; then its connection is cut
    drain_timeout_s: float = 30.0  # seconds that accepted requests have to finish after SIGTERM
    # Deadline in milliseconds of a request that has none of its own; none: no deadline.
    default_deadline_ms: float | None = None
    # How long a request without a deadline waits before it is as urgent as one whose deadline is now, in milliseconds.
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
    # Path under which a gateway shows the server, such as /jgr; requests are answered with it and without it.
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
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    profiles: ProfilesConfig = field(default_factory=ProfilesConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)

    def __post_init__(self) -> None:
        check(self)


def load_config(path: str | Path) -> Config:
    """Return the configuration of a file: Python whose `get_config()` returns it, or TOML, JSON or YAML by its suffix.

    path: the file, or the name of a configuration that comes with jgr, `industrial`. Raises ConfigError for anything
    that goes wrong in it, with the line of the file if it is known.
    """
    path = find(path)
    if is_document(path):
        return load(path, Config())
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


def from_json(sections: Mapping[str, Any]) -> Config:
    """The configuration that `to_json` wrote; sections and fields that are left out have their defaults.

    Raises ConfigError for an unknown field, and for a value that the field excludes.
    """
    return from_sections(Config(), sections)


def _is_unknown(error: BaseException, key: str) -> bool:
    """Whether `error` says that a section's class has no field of the name `key`, "section.field"."""
    section, name = key.split(".")
    return (
        str(error) == f"{section.capitalize()}Config.__init__() got an unexpected keyword argument '{name}'"
    )
