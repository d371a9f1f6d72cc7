# SPDX-License-Identifier: Apache-2.0
"""FLAME: its mechanisms, and the switch of each (arXiv 2509.22681)."""

from __future__ import annotations

from jgr.ablation.system import Fixed, Mechanism, System

FLAME = System(
    name="flame",
    title="FLAME: a feature cache, fused programs and executors of fixed sizes",
    kind="rank",
    shop="scorer",
    base=(
        "executors.sizes=64,128,256",
        # So that what is counted does not depend on how fast the machine is.
        "features.ttl_s=3600",
        "features.max_wait_ms=60000",
        "features.timeout_ms=60000",
        "cache.device_mb=4",
        "cache.shadow=0",
    ),
    on=(
        "features.cache_mb=16",
        "features.buckets=64",
        "features.mode=sync_missing",
        "features.bind_threads=true",
        "executors.build=fused",
        "executors.number=2",
        "executors.streams=2",
        "executors.share_user=cache",
    ),
    off=(
        "features.cache_mb=0",
        "features.mode=sync_missing",
        "features.bind_threads=false",
        "executors.build=op_by_op",
        "executors.sizes=LARGEST",
        "executors.number=1",
        "executors.streams=1",
        "executors.share_user=part",
    ),
    mechanisms=(
        Mechanism(
            "feature-cache",
            ("FLAME-3",),
            "items' features are kept in this process; without it each request asks the store for all of its items",
            ("features.cache_mb=0",),
        ),
        Mechanism(
            "buckets",
            ("FLAME-4",),
            "the feature cache drops what was used least in parts, and not as a whole",
            ("features.buckets=1",),
        ),
        Mechanism(
            "never-waiting",
            ("FLAME-2",),
            "a request never waits for the store: what is not cached is scored by default features",
            ("features.mode=asynchronous",),
            added=True,
            differs="candidates whose features are not cached yet are scored without them, which the answer counts",
        ),
        Mechanism(
            "paged-features",
            ("FLAME-1", "HLEM-2", "HLEM-10"),
            "features' records stand on the device, in the pages of embeddings' rows; only those that it lacks cross",
            ("features.tables=paged", "embeddings.tables=paged"),
            added=True,
        ),
        Mechanism(
            "near-memory",
            ("FLAME-5",),
            "threads are bound to the accelerator's part of the memory; nothing changes on machines of one part",
            ("features.bind_threads=false",),
        ),
        Mechanism(
            "fused-ops",
            ("FLAME-8", "FLAME-9"),
            "attention and feed-forward layers are fused operations; without it the compiler's own",
            ("executors.build=xla",),
        ),
        Mechanism(
            "one-program",
            ("FLAME-7",),
            "a part is one program, with fused operations; without it every operation is dispatched by the host",
            ("executors.build=op_by_op",),
        ),
        Mechanism(
            "sizes",
            ("FLAME-10", "FLAME-11"),
            "candidates are split over programs of several sizes; without it all are padded to the largest",
            ("executors.sizes=LARGEST",),
        ),
        Mechanism(
            "executors",
            ("FLAME-12",),
            "several parts run at the same time, each with buffers of its own",
            ("executors.number=1", "executors.streams=1"),
        ),
        Mechanism(
            "kept-users",
            ("MODEL-13",),
            "what is computed of a user is kept for the next request; without it once a request. FLAME itself does not",
            ("executors.share_user=request",),
        ),
        Mechanism(
            "shared-users",
            ("FLAME-11", "MODEL-13"),
            "a user is computed at most once a request; without it in each part, as FLAME publishes it",
            ("executors.share_user=part",),
        ),
    ),
    fixed=(
        Fixed(
            ("FLAME-1", "FLAME-6"),
            "a part's inputs cross to the device in one packed transfer",
            "always on; python -m benchmarks.flame_pda compares it with a transfer for each input",
        ),
        Fixed(
            ("FLAME-13",),
            "programs for any number of candidates, compiled when it comes",
            "no program compiles for a request; python -m benchmarks.flame_dso has it as a baseline",
        ),
    ),
    counts=(
        "parts", "user parts", "pairs", "padding pairs", "reused", "computed", "looked up", "missing",
        "round trips", "fetched", "store bytes", "row hits", "row misses", "row bytes",
    ),
    concurrency=4,
    candidates=(20, 250),
)  # fmt: skip
