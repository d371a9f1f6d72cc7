# SPDX-License-Identifier: Apache-2.0
"""The table: which mechanism of which paper is which switch of the configuration.

The one idea: the table is the only place that knows. `jgr ablate` runs what it says, `jgr ablate --list` prints it, and
docs/ablations.md is written from it. A further system is one entry more in SYSTEMS.

A mechanism's numbers are those of its paper's specification, as BAT-5. What no field switches is listed too, with what
compares it: so nobody looks for a switch that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jgr.config import Config, UserError, override
from jgr.fields import nearest

LARGEST = "LARGEST"
"""Stands in a setting for the largest of the sizes that the model's own configuration has there."""
SAME = ""
"""What a mechanism's `differs` says where its answers must be those of the system without any mechanism."""


@dataclass(frozen=True)
class Mechanism:
    """What a paper describes and a field switches.

    name: for variants, without spaces. numbers: in the paper's specification. what: in words. settings: assignments as
    for --set that take it away from the system with all mechanisms; where `added`, that add it, since it is no part of
    that system. differs: why answers may differ from those without any mechanism; SAME: they may not.
    """

    name: str
    numbers: tuple[str, ...]
    what: str
    settings: tuple[str, ...]
    added: bool = False
    differs: str = SAME


@dataclass(frozen=True)
class Fixed:
    """What a paper describes and no field switches. instead: why, or what compares it."""

    numbers: tuple[str, ...]
    what: str
    instead: str


@dataclass(frozen=True)
class System:
    """A paper's system in jgr.

    name: of the command. kind: of the requests. model: the sort of model that serves them. on: the settings with all
    mechanisms; off: those with none. counts: names in `counts.COUNTS` that tell it apart. orders: whether a variant may
    put a prompt's parts in another order, and so give other scores; answers are then compared within an order.
    concurrency: requests that are asked together, and candidates: the least and the most of one to rank, both unless
    told otherwise.
    """

    name: str
    title: str
    kind: Literal["recommend", "rank"]
    model: Literal["decoder", "scorer"]
    on: tuple[str, ...]
    off: tuple[str, ...]
    mechanisms: tuple[Mechanism, ...]
    fixed: tuple[Fixed, ...]
    counts: tuple[str, ...]
    orders: bool = False
    concurrency: int = 8
    candidates: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Variant:
    """A configuration that is run. settings: on top of the world's. differs: see Mechanism."""

    name: str
    settings: tuple[str, ...]
    differs: str = SAME
    mechanism: Mechanism | None = None


ALL, NONE = "all on", "all off"

BAT = System(
    name="bat",
    title="BAT: candidates in the prompt, and a cache of what comes first in it",
    kind="rank",
    model="decoder",
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
            "jgr serve uses one device; python -m benchmarks.bat_placement compares placements on four nodes",
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

XGR = System(
    name="xgr",
    title="xGR: wide beam search over the catalog as one program",
    kind="recommend",
    model="decoder",
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
            "always on; python -m benchmarks.early_termination compares it with a sort",
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

FLAME = System(
    name="flame",
    title="FLAME: a feature cache, fused programs and executors of fixed sizes",
    kind="rank",
    model="scorer",
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
        "round trips", "fetched", "store bytes",
    ),
    concurrency=4,
    candidates=(20, 250),
)  # fmt: skip

SYSTEMS = {system.name: system for system in (BAT, XGR, FLAME)}
"""All systems, by the name that the command takes."""


def find(name: str) -> System:
    """The system of a name. Raises UserError, which names the nearest."""
    if name not in SYSTEMS:
        raise UserError(
            f"there is no system '{name}' to take apart; the nearest is '{nearest(name, SYSTEMS)}'"
        )
    return SYSTEMS[name]


def configured(base: Config, settings: Sequence[str]) -> Config:
    """The configuration of a variant. base: that of the model."""
    return override(base, *(_settled(setting, base) for setting in settings))


def _settled(setting: str, base: Config) -> str:
    field, _, value = setting.partition("=")
    if value != LARGEST:
        return setting
    section, name = field.split(".")
    return f"{field}={max(getattr(getattr(base, section), name))}"


def variants(system: System) -> list[Variant]:
    """What is run: all on, each mechanism off (or added) alone, all off."""
    found = [Variant(ALL, system.on)]
    for one in system.mechanisms:
        name = f"{'with' if one.added else 'without'} {one.name}"
        found.append(Variant(name, (*system.on, *one.settings), one.differs, one))
    return [*found, Variant(NONE, system.off)]
