# SPDX-License-Identifier: Apache-2.0
"""HLEM: its mechanisms, and the switch of each (arXiv 2605.04450)."""

from __future__ import annotations

from jgr.ablation.system import Fixed, Mechanism, System

HLEM = System(
    name="hlem",
    title="HLEM: embedding rows and kept users in one memory, and a controller that moves the border",
    kind="rank",
    shop="history",
    base=(
        "executors.sizes=64,256",
        "executors.number=1",
        "cache.device_mb=2",
        "cache.page_kb=4",
        "cache.shadow=0",
        "memory.split=0.3",
        "memory.epoch_s=0.1",
        "memory.limit_ms=20",
    ),
    on=(
        "embeddings.tables=paged",
        "embeddings.link_mb_s=64",
        "executors.share_user=cache",
        "executors.growth=4",
        "memory.controller=full",
    ),
    off=(
        "embeddings.tables=resident",
        "embeddings.link_mb_s=0",
        "executors.share_user=part",
        "executors.growth=0",
        "memory.controller=static",
    ),
    mechanisms=(
        Mechanism(
            "paged-rows",
            ("HLEM-2", "HLEM-10"),
            "rows of the items' embeddings stand in pages beside kept users; without it the whole table is on the "
            "device, and nothing moves",
            ("embeddings.tables=resident", "memory.controller=static"),
        ),
        Mechanism(
            "kept-users",
            ("HLEM-2", "MODEL-13"),
            "what is computed of a user is kept for the next request; without it once a request",
            ("executors.share_user=request", "executors.growth=0", "memory.controller=static"),
        ),
        Mechanism(
            "growing-users",
            ("MODEL-14",),
            "a kept user takes the events that are new; without it whoever has new ones is computed whole, and one "
            "vector is kept in place of keys and values",
            ("executors.growth=0",),
        ),
        Mechanism(
            "controller",
            ("HLEM-3", "HLEM-4", "HLEM-5", "HLEM-6", "HLEM-16"),
            "the border is moved every epoch; without it, it stays where memory.split puts it",
            ("memory.controller=static",),
        ),
        Mechanism(
            "correction",
            ("HLEM-8", "HLEM-9"),
            "the policy that was learnt offline is corrected online, and left in bursts; without it, it decides alone",
            ("memory.controller=ppo",),
        ),
        Mechanism(
            "policy",
            ("HLEM-7",),
            "a policy learnt offline moves the border; without it a PID loop over both caches' misses",
            ("memory.controller=pid",),
        ),
        Mechanism(
            "throttle",
            ("HLEM-11",),
            "pages that rows got are filled with what misses leave of the link; without it as fast as it goes",
            ("embeddings.link_mb_s=0",),
        ),
    ),
    fixed=(
        Fixed(
            ("HLEM-1",),
            "the four stages of a request: route, rows, forward, report",
            "the order of things in any server; a batch's missing rows are one transfer",
        ),
        Fixed(
            ("HLEM-12",),
            "rows are fetched ahead of requests by a forecast",
            "not built; the paper has it in a system that it compares with",
        ),
        Fixed(
            ("HLEM-13", "HLEM-14", "HLEM-15"),
            "a router that knows what each node holds",
            "one server has no router; jgr cluster has one (docs/fleet.md)",
        ),
    ),
    counts=(
        "parts", "user parts", "computed", "reused", "evicted", "row hits", "row misses", "collateral", "refilled",
        "row bytes", "moves", "pages moved",
    ),
    concurrency=4,
    candidates=(20, 250),
    grows=1,
)  # fmt: skip
