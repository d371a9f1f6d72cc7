# SPDX-License-Identifier: Apache-2.0
"""The configuration: a tree of frozen dataclasses, one section per part of jgr.

The one idea: a field's annotation is the only statement of its type. It checks the values of a config file
and types the text of `--set section.field=value`; the field's default stands nowhere else.

Invariants: a Config that exists is valid, section by section; nothing here reads flags or the environment.
Whether two sections fit together (a beam width and the compiled profiles, say) is checked by whoever is
handed both.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.machinery
import sys
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

from jgr.feedback import FeedbackConfig as FeedbackConfig
from jgr.fields import ConfigError as ConfigError
from jgr.fields import UserError as UserError
from jgr.fields import check, describe, parse, require, sizes

MAX_WAIT_MS = 60_000
"""More than any caller waits for company; a typing error otherwise."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to serve."""

    name: str = "jgr"  # what answers and /v1/models call it
    path: str = ""  # folder: Hugging Face, or our own checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations; scores are float32
    compilation_cache: str = (
        "~/.cache/jgr"  # folder of compiled programs, for a fast second start; empty: none
    )

    def __post_init__(self) -> None:
        check(self)
        require(bool(self.name), "model.name must not be empty")


@dataclass(frozen=True)
class CatalogConfig:
    """The items that may be recommended."""

    path: str = ""  # .jsonl[.gz], .index.json[.gz] with its .item.json[.gz] beside it, or .catalog
    segments: str = "segments"  # the metadata field with an item's segments: a name or a list of names
    segment_rows: int = 32  # combinations of segments that stay on the device
    max_versions: int = 4  # catalogs that the server keeps: the active one, the one before it, and uploads
    max_upload_bytes: int = 256 << 20  # of a catalog sent to POST /v1/catalogs

    def __post_init__(self) -> None:
        check(self, segment_rows=1, max_versions=3, max_upload_bytes=1)


@dataclass(frozen=True)
class PromptConfig:
    """How a history becomes tokens."""

    template: str = "<bos>{history}"
    item: str = "{sid}"  # one item of the history; may also name metadata fields, as in "{title}: {sid}"
    max_items: int = 50  # the last items of a history that are kept
    # The kept items begin at a multiple of it, so that a long history that grows keeps its first tokens for so many
    # events, and with them what is cached; at most stride - 1 items fewer are kept.
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

    width: int = 32  # beams of a request that names no width
    normalize: Literal["valid", "full"] = "valid"  # log-softmax over legal tokens, or the whole vocabulary
    approximate: int = 0  # most children that a beam may have at a step; 0: all, the exact search
    items_per_id: int = 50  # items of an answer that may share a semantic id; the catalog's first of them

    def __post_init__(self) -> None:
        check(self, width=1, approximate=0, items_per_id=1)


@dataclass(frozen=True)
class RankConfig:
    """How candidates are ranked. The sizes are those of the compiled shapes of all scorers but `likelihood`."""

    # The likelihood of each candidate's semantic id after the history's prompt; or all candidates in the prompt and a
    # score from the token of each (one-level catalogs), from a question about each, or from a letter for each place.
    scorer: Literal["likelihood", "item_token", "item_probe", "list_letter"] = "likelihood"
    item: str = "{title}{sid}"  # a candidate, as prompt.item; scored by item_token it ends with {sid}
    # Behind everything. {last} is the semantic id of the history's last item: recency-focused prompting, which a small
    # model needs (arXiv 2305.08845).
    instruction: str = "<sid>"
    probe: str = "<sid>"  # the question about an item, for item_probe
    positive: str = "<yes>"  # its answers, each one token
    negative: str = "<no>"
    letters: str = "<l_{n}>"  # the token of the n-th candidate, for list_letter
    item_span: int = 32  # tokens of a candidate at most, and positions that the candidates take
    requests: int = 8  # of one batch
    tokens: tuple[int, ...] = (512, 2048)  # new tokens of a batch
    context: tuple[int, ...] = (2048,)  # cached tokens of a batch
    candidates: int = 256  # of a batch

    def __post_init__(self) -> None:
        check(self, item_span=1, requests=1, candidates=1)
        sizes("rank.tokens", self.tokens)
        sizes("rank.context", self.context)


@dataclass(frozen=True)
class ExecutorsConfig:
    """The compiled shapes of models that score a user's candidates in one pass: HSTU, STU, Climber, SASRec, LRURec."""

    sizes: tuple[int, ...] = (128, 256, 512, 1024)  # candidates of a part; what has more is split
    number: int = 2  # executors of each size
    streams: int = 2  # parts that run at a time
    # What all parts need of the user: computed in each part; once a request; or kept for later requests of the same
    # user and history, in the pool of cache.device_mb.
    share_user: Literal["part", "request", "cache"] = "request"
    # Events by which a kept user may have grown, so that only they are computed; what is kept takes more room. 0: a
    # history that grew is computed whole. For models whose events do not depend on later ones.
    growth: int = 0

    def __post_init__(self) -> None:
        check(self, number=1, streams=1, growth=0)
        sizes("executors.sizes", self.sizes)
        if self.growth and self.share_user != "cache":
            raise ConfigError("executors.growth: needs executors.share_user=cache, which keeps users")


@dataclass(frozen=True)
class CacheConfig:
    """The cache of users' and items' keys and values."""

    # Which of them comes first in a prompt, and so can be reused: never anything; always the user; always the items;
    # whichever is longer; or the user where it is longer and comes more often than the cached ones.
    policy: Literal["none", "user", "item", "cache_agnostic", "hotness"] = "none"
    # Of the pool on the device, and of the host's memory for what the device gives up. A server has one of each, which
    # its models share: those of its first configuration.
    device_mb: float = 64.0
    host_mb: float = 0.0
    page_kb: int = 0  # size of the pool's pages; 0: 2048, 64 on a CPU, less where the pool is small
    share: float = 1.0  # the weight of this model when the models divide the pool
    # Of the model's pages, for items; the others are for users. None: as many as all items need, at most four of five,
    # for a policy that caches both.
    item_share: float | None = None
    cell_tokens: int = 2  # tokens of a cell, by which entries grow
    # New tokens of a request that continues from cached ones, in the smallest compiled shapes of recommend.
    new_tokens: int = 16
    window_s: float = 300.0  # over which accesses are counted
    hysteresis: float = (
        0.1  # how much more often than the coldest cached user another must come to take its place
    )
    shadow: float = 0.001  # share of requests that are computed again without the cache, to measure the drift
    # Item tokens that are computed again where the items come first, seeing the items before theirs, which cached ones
    # do not: the first so many of each item; or this share of a request's, those that differ the most.
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
    schema: str = (
        ""  # for jgr features load: "price:float32, genres:int32[4]"; empty: what the metadata holds
    )
    # Whether a request waits for the store: never; for what is not cached; for what is too old, too.
    mode: Literal["asynchronous", "synchronous", "sync_missing"] = "sync_missing"
    cache_mb: float = 64.0
    buckets: int = 64  # parts of the cache, each of which drops what was used longest ago
    ttl_s: float = 60.0  # until a record is asked for again; 10 % more or less, drawn for each
    absent_ttl_s: float = 5.0  # the same for an item that the store has nothing of
    max_wait_ms: float = 20.0  # of a request for the store, within its deadline
    timeout_ms: float = 500.0  # of the store's answer
    linger_ms: float = 20.0  # that a fetch waits for others, in the mode in which no request waits for it
    connections: int = 4  # threads that ask the store
    bind_threads: bool = True  # to the accelerator's NUMA node, where there are several

    def __post_init__(self) -> None:
        check(
            self,
            cache_mb=0,
            buckets=1,
            ttl_s=1e-3,
            absent_ttl_s=1e-3,
            max_wait_ms=0,
            timeout_ms=1,
            connections=1,
        )
        check(self, linger_ms=0)


@dataclass(frozen=True)
class ProfilesConfig:
    """The shapes that are compiled at start-up: the product of these sizes, each ascending."""

    batch: tuple[int, ...] = (1, 8)  # rows
    tokens: tuple[int, ...] = (64, 256)  # padded prompt length
    widths: tuple[int, ...] = (32,)  # beams per row, for recommend
    candidates: tuple[int, ...] = (128,)  # candidates per row, for rank

    def __post_init__(self) -> None:
        check(self)
        for f in dataclasses.fields(self):
            sizes(f"profiles.{f.name}", getattr(self, f.name))


@dataclass(frozen=True)
class BatchingConfig:
    """When requests are batched, and how many may wait."""

    max_tokens: int = 8192  # padded tokens of one batch
    max_wait_ms: float = 0.0  # a request waits this long for company
    max_queue: int = 1024  # waiting requests; one more is refused with 429

    def __post_init__(self) -> None:
        check(self, max_tokens=1, max_wait_ms=0, max_queue=1)
        ms = self.max_wait_ms
        require(ms <= MAX_WAIT_MS, f"batching.max_wait_ms must be at most {MAX_WAIT_MS}, not {ms}")


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server and the limits on what it accepts."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes any free port
    api_key: str = field(default="", repr=False)  # empty: no authorization is asked for
    admin_key: str = field(
        default="", repr=False
    )  # of what changes the server: reloads, catalogs; empty: refused to all
    max_body_bytes: int = 1 << 20
    max_history: int = 4096  # items
    max_candidates: int = 10_000  # items
    max_filter_items: int = 4096  # items of a request's filters, all lists together
    unknown_items: Literal["skip", "reject"] = "skip"  # items of a history that the catalog lacks
    drain_timeout_s: float = 30.0  # after SIGTERM
    default_deadline_ms: float | None = None  # of a request that names none; None: no deadline

    def __post_init__(self) -> None:
        check(self, port=0, max_body_bytes=1, max_history=1, max_candidates=1, drain_timeout_s=0)
        check(self, max_filter_items=0)
        same = bool(self.api_key) and self.api_key == self.admin_key
        require(not same, "server.admin_key must not be server.api_key, which clients have")
        require(bool(self.host), "server.host must not be empty; 127.0.0.1 serves this machine only")
        require(self.port <= 65535, f"server.port must be at most 65535, not {self.port}")
        ms = self.default_deadline_ms
        require(ms is None or ms > 0, f"server.default_deadline_ms must be above 0 or none, not {ms}")


@dataclass(frozen=True)
class DataConfig:
    """The interactions to train and evaluate on."""

    # The synthetic shop, a folder that `jgr prepare` wrote, or one in MiniOneRec's format.
    kind: Literal["shop", "prepared", "minionerec"] = "shop"
    path: str = ""  # the folder; the shop needs none

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class TrainConfig:
    """A small model and how it is trained."""

    # A decoder over semantic ids; OneRec-V2's lazy decoder over them; SASRec, LRURec or HSTU over items; a decoder that
    # ranks the candidates in its prompt; Climber or DLRMv3's HSTU, which learn from feedback.
    model: Literal["generator", "onerec", "sasrec", "lrurec", "hstu", "ranker", "climber", "stu"] = (
        "generator"
    )
    out: str = ""  # folder for the checkpoint
    # Folder of a decoder that a ranker or a generator begins from, of the same sizes; empty: from random weights.
    start: str = ""
    seed: int = 0
    steps: int = 2000  # optimizer steps
    batch: int = 256  # sequences per step
    micro_batches: int = 1  # parts that a step's batch is computed in, one after the other; saves memory only
    devices: int = 1  # of the data-parallel mesh
    learning_rate: float = 1e-3  # the peak, reached after the warm-up
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up, down to 1 % of the peak
    weight_decay: float = 0.01  # decoupled, as in AdamW
    adam_b2: float = 0.98
    clip_norm: float = 1.0  # bound of the gradient's global norm
    dropout: float = 0.1  # probability
    # Items that a retriever's softmax is sampled from in a step, 0: all; other candidates of a ranker's prompt.
    negatives: int = 0
    weigh_negatives: bool = (
        True  # the sampled ones stand for all items; False: for themselves, as in HSTU's recipe
    )
    temperature: float = 1.0  # that a retriever's scores are divided by in the softmax
    times: bool = False  # hstu's bias depends on times too, which the dataset must have
    # A retriever learns from the validation targets as well, as HSTU's recipe does; nothing is left to validate on.
    learn_valid: bool = False
    layouts: Literal["both", "user_prefix", "item_prefix"] = "both"  # of a ranker's prompts
    retriever: str = ""  # folder of a retriever that names half of a ranker's negatives; empty: none
    max_items: int = 20  # history items per training sequence
    checkpoint_every: int = 200  # steps; a killed run goes on from the last one
    evaluate_every: int = 0  # steps between validations; 0: none, and the last step's weights are kept
    patience: int = 0  # validations without a better one after which it stops; 0: never
    validation_examples: int = 1000  # of the validation split, drawn by the seed
    hidden: int = 64  # width of the residual stream
    layers: int = 2
    heads: int = 4  # query heads
    kv_heads: int = 2  # key-value heads; divides heads
    head_dim: int = 16  # width of one head
    mlp: int = 256  # inner width of the feed-forward block

    def __post_init__(self) -> None:
        check(
            self, seed=0, learning_rate=0, warmup_steps=0, weight_decay=0, dropout=0, adam_b2=0, clip_norm=0
        )
        check(self, steps=1, batch=1, micro_batches=1, devices=1, max_items=1, checkpoint_every=1)
        check(self, negatives=0, evaluate_every=0, patience=0, validation_examples=1)
        check(self, hidden=1, layers=1, heads=1, kv_heads=1, head_dim=2, mlp=1)
        for name in ("clip_norm", "temperature"):
            require(getattr(self, name) > 0, f"train.{name} must be above 0, not {getattr(self, name)}")
        require(self.seed < 1 << 32, f"train.seed must be below 2^32, not {self.seed}")
        for name in ("dropout", "adam_b2"):
            value = getattr(self, name)
            require(value < 1, f"train.{name} must be below 1, not {value}")
        validates = self.learn_valid and self.evaluate_every > 0
        require(
            not validates, "train.learn_valid leaves nothing to validate on: train.evaluate_every must be 0"
        )
        require(not self.times or self.model == "hstu", "train.times: only hstu's bias depends on times")
        starts = self.model in ("generator", "ranker")
        require(not self.start or starts, f"train.start: a decoder cannot begin train.model={self.model}")
        fits = self.heads % self.kv_heads == 0
        require(fits, f"train.heads ({self.heads}) must be a multiple of train.kv_heads ({self.kv_heads})")
        require(self.head_dim % 2 == 0, f"train.head_dim must be even (rotary pairs), not {self.head_dim}")
        parts = self.micro_batches * self.devices
        require(
            self.batch % parts == 0,
            f"train.batch ({self.batch}) must be a multiple of train.micro_batches x train.devices ({parts})",
        )


@dataclass(frozen=True)
class Config:
    """Everything; each part of jgr is given its own section only."""

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

    Raises ConfigError, with the line of the file where there is one, for whatever goes wrong in it.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such config file")
    module = types.ModuleType("jgr_config_file")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses of the file look their annotations up there
    try:
        _ConfigFile(module.__name__, str(path)).exec_module(module)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except (Exception, SystemExit) as e:
        line = _line_in(path, e)
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {kind}{e}") from e
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: define get_config() so that it returns a jgr.config.Config")
    return config


def override(config: Config, *assignments: str) -> Config:
    """Return `config` with each `section.field=value` applied; the last one of a field wins.

    The values of one call are checked together, so that fields of a section that depend on each other can
    change in one step. Raises ConfigError for an unknown field, naming the nearest, and for a value that its
    annotation or its section excludes.
    """
    hints = _field_types()
    updates: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"cannot override by '{assignment}': write section.field=value")
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)[0]
            raise ConfigError(f"there is no field '{key}' in the configuration; the nearest is '{nearest}'")
        section, name = key.split(".")
        try:
            updates.setdefault(section, {})[name] = parse(text, hints[key])
        except ValueError:
            raise ConfigError(f"{key} must be {describe(hints[key])}, not '{text}'") from None
    sections = {s: dataclasses.replace(getattr(config, s), **values) for s, values in updates.items()}
    return dataclasses.replace(config, **sections)


def to_json(config: Config) -> dict[str, Any]:
    """The whole tree as JSON values. Secrets (the fields kept out of repr) are "***" where they are set."""
    return {s.name: _section_to_json(getattr(config, s.name)) for s in dataclasses.fields(config)}


def _section_to_json(section: Any) -> dict[str, Any]:
    shown = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        shown[f.name] = "***" if value and not f.repr else list(value) if isinstance(value, tuple) else value
    return shown


class _ConfigFile(importlib.machinery.SourceFileLoader):
    """Loads a Python file without a bytecode cache, whose whole-second key would hide a quick second edit."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError("without the file's time there is no cache")


def _line_in(path: Path, error: BaseException) -> int | None:
    """The last line of `path` that ran when `error` was raised, or the one that does not parse."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)


def _field_types() -> dict[str, Any]:
    """Every "section.field" with its annotation."""
    sections = get_type_hints(Config).items()
    return {f"{s}.{name}": hint for s, section in sections for name, hint in get_type_hints(section).items()}
