# SPDX-License-Identifier: Apache-2.0
"""The section of the configuration for embedding tables; see `jgr.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jgr.fields import check


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
