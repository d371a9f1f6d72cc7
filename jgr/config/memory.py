# SPDX-License-Identifier: Apache-2.0
"""The sections on what is kept: keys and values, embedding rows, the border between them, and features of items."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from jgr.fields import check, require


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
    # Last tokens of each cached item that are computed again beside that share: what follows reads an item at its end.
    repair_last_tokens: int = 0
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
        check(self, hysteresis=0, shadow=0, repair_tokens=0, repair_share=0, repair_last_tokens=0)
        check(self, library_cosine=0.9, kv_mb=0)
        require(
            self.library_cosine <= 1, f"cache.library_cosine must be at most 1, not {self.library_cosine}"
        )
        require(self.repair_share <= 1, f"cache.repair_share must be at most 1, not {self.repair_share}")
        require(
            not self.repair_last_tokens or self.repair_share > 0,
            "cache.repair_last_tokens: needs cache.repair_share above 0",
        )
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
class MemoryConfig:
    """Where the border between embedding rows and kept users stands in the pool, and what moves it."""

    # What moves the border. static: nothing; pid: both caches' misses made equal; predictor: boosted trees, to the
    # split of the least predicted latency; ppo: a policy that was trained offline; full: that, corrected online and
    # with a rule for bursts (HLEM).
    controller: Literal["static", "pid", "predictor", "ppo", "full"] = "static"
    # Share of the model's pages that embedding rows begin with, and go back to where signals are missing; kept users
    # (executors.share_user=cache) have the others. Where no users are kept, rows have all of them.
    split: float = 0.5
    least: float = 0.1  # least share of the pool that embedding rows have
    most: float = 0.9  # most share of the pool that embedding rows have
    limit_ms: float = 30.0  # latency that 99 of 100 requests should stay below, for the controllers
    epoch_s: float = 5.0  # seconds between two decisions
    # File of a trained controller, .npz; empty: the one that comes with jgr, made by jgr train --config=controller.
    file: str = ""

    def __post_init__(self) -> None:
        check(self, least=0, most=0, split=0)
        require(
            0.0 < self.least <= self.most < 1.0,
            f"memory.least ({self.least}) must be at most memory.most ({self.most}), and both above 0 and below 1",
        )
        require(
            self.least <= self.split <= self.most,
            f"memory.split ({self.split}) must lie between memory.least ({self.least}) and memory.most ({self.most})",
        )
        reads = self.controller in ("predictor", "ppo", "full")
        require(reads or not self.file, f"memory.file: memory.controller={self.controller} reads no file")
        for name in ("limit_ms", "epoch_s"):
            value = getattr(self, name)
            require(0.0 < value < math.inf, f"memory.{name} must be above 0, not {value}")


@dataclass(frozen=True)
class EmbeddingsConfig:
    """Where a scorer's embeddings stand while it serves. See docs/embeddings.md."""

    # resident: the whole table is on the device, as a parameter; paged: the device holds rows of it in pages of the
    # pool of cache.device_mb, and the table stays in its file. Scores are the same.
    tables: Literal["resident", "paged"] = "resident"
    # Address of a Redis server with the rows that the model's folder lacks, redis://host:port/db; empty: none.
    remote: str = field(default="", repr=False)
    timeout_ms: float = 200.0  # longest time that reading rows from embeddings.remote may take
    # Speed of the link by which rows come to the device, in MB a second. Empty pages are filled ahead with what misses
    # leave of 80 % of it; 0: as fast as it goes.
    link_mb_s: float = 0.0

    def __post_init__(self) -> None:
        check(self, timeout_ms=1, link_mb_s=0)


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
    # Where records are kept. host: in this process, features.cache_mb of them; paged: on the device, in the pages that
    # rows of embeddings have too (embeddings.tables=paged), where what was used longest ago goes first. Scores are the
    # same.
    tables: Literal["host", "paged"] = "host"
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
