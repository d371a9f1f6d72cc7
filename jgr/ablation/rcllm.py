# SPDX-License-Identifier: Apache-2.0
"""RcLLM: its mechanisms that are served, and the switch of each (arXiv 2605.07443)."""

from __future__ import annotations

from jgr.ablation.bat import BAT
from jgr.ablation.system import Fixed, Mechanism, System

_ALONE = "candidates' tokens that are not computed anew do not see what stands before their candidate"

RCLLM = System(
    name="rcllm",
    title="RcLLM: candidates that are reused wherever they stand in the prompt",
    kind="rank",
    shop="ranker",
    base=BAT.base,
    on=(
        "cache.policy=blocks",
        "cache.repair_tokens=1",
        "cache.repair_share=0.2",
        "cache.repair_by=attention",
        "cache.item_share=0.5",
    ),
    off=("cache.policy=blocks", "cache.repair_tokens=8", "cache.repair_share=0", "cache.item_share=1.0"),
    differs=_ALONE,
    mechanisms=(
        Mechanism(
            "blocks",
            ("RCLLM-1", "RCLLM-6", "RCLLM-9", "RCLLM-12"),
            "a candidate's keys and values are reused at any place; without it only the user is, who stands first",
            ("cache.repair_tokens=8", "cache.repair_share=0"),
        ),
        Mechanism(
            "selection",
            ("RCLLM-10", "RCLLM-11"),
            "of the candidates' tokens those that get the most attention in the first layer are computed anew",
            ("cache.repair_share=0",),
            differs=_ALONE,
        ),
        Mechanism(
            "boundary",
            ("RCLLM-11", "PIC-4"),
            "the first token of each candidate is computed anew",
            ("cache.repair_tokens=0",),
            differs=_ALONE,
        ),
        Mechanism(
            "last token",
            ("RCLLM-11",),
            "the last token of each candidate, at which it is read, is computed anew too",
            ("cache.repair_last_tokens=1",),
            added=True,
            differs=_ALONE,
        ),
        Mechanism(
            "users",
            ("RCLLM-9",),
            "users who come again are reused, exactly, since they stand first",
            ("cache.item_share=1.0",),
            differs=_ALONE,
        ),
        Mechanism(
            "deviation",
            ("PIC-3",),
            "tokens are chosen by how much they change in the second layer (CacheBlend) in place of attention",
            ("cache.repair_by=deviation",),
            added=True,
            differs=_ALONE,
        ),
    ),
    fixed=(
        Fixed(
            ("RCLLM-2", "RCLLM-3", "RCLLM-4", "RCLLM-5"),
            "tokens of the history are taken from prototypes that mean nearly the same",
            "served by cache.library; requests here have no texts: benchmarks/rcllm_library.py counts what it covers",
        ),
        Fixed(
            ("RCLLM-7", "RCLLM-8"),
            "items are placed over machines by who asks for them together, and requests go where they are",
            "of a fleet: jgr cluster does it by fleet.items=similarity and fleet.routing=matched",
        ),
        Fixed(
            ("RCLLM-13",),
            "what is reused travels to the device while the first layer is computed",
            "with repair_by=attention always: benchmarks/rcllm_ttft.py says what is left exposed",
        ),
        Fixed(
            ("RCLLM-14",),
            "the same policies in a simulation of many machines",
            "not there yet for blocks; jgr.simulation drives the batching and routing that serve",
        ),
    ),
    counts=("computed", "reused", "runs", "evicted", "pages"),
    concurrency=4,
    candidates=(10, 10),
)
