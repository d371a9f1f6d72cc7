# SPDX-License-Identifier: Apache-2.0
"""BAT: its mechanisms, and the switch of each (ASPLOS '26)."""

from __future__ import annotations

from jgr.ablation.system import Fixed, Mechanism, System

BAT = System(
    name="bat",
    title="BAT: candidates in the prompt, and a cache of what comes first in it",
    kind="rank",
    shop="ranker",
    base=(
        "prompt.item={title}{sid}",
        "prompt.max_items=40",
        "rank.method=item_token",
        "rank.item={title}{sid}",
        "rank.item_span=8",
        "rank.requests=4",
        "rank.tokens=256,1024",
        "rank.context=1024",
        "rank.candidates=128",
        "batching.max_tokens=4096",
        "beam.width=1",
        "profiles.batch=1",
        "profiles.tokens=1024",
        "profiles.widths=1",
        "profiles.candidates=1",
        "cache.device_mb=1.5",
        "cache.shadow=0",
    ),
    on=(
        "cache.policy=hotness",
        "cache.rule=priced",
        "cache.host_mb=4",
        "cache.repair_tokens=0",
    ),
    off=("cache.policy=none", "cache.host_mb=0", "rank.requests=1", "cache.repair_tokens=0"),
    mechanisms=(
        Mechanism(
            "users-first",
            ("BAT-4",),
            "users whose keys and values are cached stand first in the prompt; without it the items always do",
            ("cache.policy=item",),
        ),
        Mechanism(
            "items-first",
            ("BAT-5",),
            "items whose keys and values are cached stand first, shared by all users; without it the user always does",
            ("cache.policy=user",),
        ),
        Mechanism(
            "hotness",
            ("BAT-9", "BAT-10"),
            "users who come often are admitted to the cache; without it the longer of user and items comes first",
            ("cache.policy=cache_agnostic",),
        ),
        Mechanism(
            "price",
            ("BAT-10",),
            "a user is admitted only where that computes less; without it by how often it comes alone, as published",
            ("cache.rule=published",),
        ),
        Mechanism(
            "host-memory",
            ("BAT-6", "BAT-7"),
            "entries that leave the device stay in the host's memory",
            ("cache.host_mb=0",),
        ),
        Mechanism(
            "batches",
            ("BAT-13", "BAT-14"),
            "several requests are packed into a run, up to a number of tokens; without it each has a run of its own",
            ("rank.requests=1",),
        ),
        Mechanism(
            "repair",
            ("BAT-15", "PIC-4"),
            "the first token of each cached item is computed again, so that it sees the items before it",
            ("cache.repair_tokens=1",),
            added=True,
            differs="where items come first, tokens that are repaired see other items, as those cached alone do not",
        ),
    ),
    fixed=(
        Fixed(
            ("BAT-1", "BAT-2", "BAT-3"),
            "scores from tokens of the candidates, in two orders that a request may ask for",
            "rank.method and the request's layout choose; python -m benchmarks.bat_accuracy compares their quality",
        ),
        Fixed(
            ("BAT-8",),
            "one service knows all cached entries",
            "always on where a cache is; it holds no keys and values and changes no count",
        ),
        Fixed(
            ("BAT-11", "BAT-12"),
            "hot items on every cache worker, cold ones on one",
            "one server has one worker; a fleet has several: fleet.items=hrcs of jgr cluster, which python -m "
            "benchmarks.fleet_items compares with other placements",
        ),
    ),
    counts=(
        "computed",
        "reused",
        "runs",
        "user first",
        "items first",
        "evicted",
        "to host",
        "from host",
        "pages",
    ),
    orders=True,
    concurrency=4,
    candidates=(10, 10),  # about as many tokens as a user of the shop has
)
