# SPDX-License-Identifier: Apache-2.0
"""xGR: its mechanisms, and the switch of each (arXiv 2512.11529)."""

from __future__ import annotations

from jgr.ablation.system import Fixed, Mechanism, System

XGR = System(
    name="xgr",
    title="xGR: wide beam search over the catalog as one program",
    kind="recommend",
    shop="generator",
    base=(
        "profiles.batch=1,8",
        "profiles.tokens=48,128",
        "prompt.max_items=40",
        "beam.width=32",
        "profiles.widths=32",
        "profiles.candidates=1",
        "rank.tokens=512",
        "rank.context=512",
        "cache.device_mb=8",
        "cache.shadow=0",
    ),
    on=(
        "batching.in_flight=2",
        "batching.streams=2",
        "beam.approximate=0",
        "cache.policy=none",
    ),
    off=(
        "batching.in_flight=1",
        "batching.streams=1",
        "profiles.batch=1",
        "profiles.tokens=LARGEST",
        "beam.approximate=0",
        "cache.policy=none",
    ),
    mechanisms=(
        Mechanism(
            "overlap",
            ("XGR-12", "XGR-16"),
            "the host prepares a batch while the device runs the one before it",
            ("batching.in_flight=1",),
        ),
        Mechanism(
            "streams",
            ("XGR-15",),
            "two batches run at the same time",
            ("batching.streams=1",),
        ),
        Mechanism(
            "batches",
            ("XGR-14",),
            "requests that wait together run together, up to a number of tokens; without it each runs alone",
            ("profiles.batch=1",),
        ),
        Mechanism(
            "lengths",
            ("XGR-14",),
            "short prompts run in programs for short prompts; without it all are padded to the longest",
            ("profiles.tokens=LARGEST",),
        ),
        Mechanism(
            "few-children",
            ("XGR-2",),
            "a step keeps only the best four continuations of each beam (K < BW)",
            ("beam.approximate=4",),
            added=True,
            differs="the search is not exact: an item whose beginning had better neighbours can be lost",
        ),
        Mechanism(
            "cached-users",
            ("XGR-3",),
            "the prompt's keys and values are kept for the user's next request; xGR itself does not",
            ("cache.policy=user",),
            added=True,
        ),
    ),
    fixed=(
        Fixed(
            ("XGR-1", "XGR-13", "XGR-18"),
            "the whole search is one dispatched program",
            "always on; python -m benchmarks.xgr_throughput and beam_vs_peers compare it with other engines",
        ),
        Fixed(
            ("XGR-3", "XGR-4", "XGR-5"),
            "the prompt's keys and values are stored once for all beams and read once a step",
            "always on; python -m benchmarks.beam_attention and beam_memory compare it with copies for each beam",
        ),
        Fixed(
            ("XGR-6",),
            "the kernel's configuration is chosen by a fitted tree",
            "none is shipped; python -m benchmarks.kernel_configuration compares it with the rule",
        ),
        Fixed(
            ("XGR-7", "XGR-8", "XGR-9"),
            "only ids of the catalog are generated, by tables on the device",
            "always on; jgr evaluate --unconstrained tells what it is worth, benchmarks.catalog_scaling what it costs",
        ),
        Fixed(
            ("XGR-2",),
            "scores are taken over what may follow, and not over the whole vocabulary",
            "beam.normalize chooses what a score means; it takes nothing away",
        ),
        Fixed(
            ("XGR-10",),
            "the choice of the best beams ends early",
            "always on; python -m benchmarks.early_termination compares it with others",
        ),
        Fixed(
            ("XGR-11", "XGR-17"),
            "buffers are made once and used again",
            "always on; there is no form without it",
        ),
    ),
    counts=("computed", "reused", "runs", "asked tokens", "padded tokens"),
    concurrency=16,
)
