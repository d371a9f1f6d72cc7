# SPDX-License-Identifier: Apache-2.0
"""The series of rows in pages of the pool: embeddings, and records of features where they stand there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ROW_EVENTS = (
    "hits", "misses", "past", "refilled", "evicted", "collateral", "duplicates", "local", "remote", "failed",
)  # fmt: skip
TEXTS = {
    "jgr_embedding_rows": (
        "Rows of tables (items: embeddings; features: records), by table and event: found on the device or not, "
        "counted once for each batch, of features for each request; past the pool; filled ahead; evicted, and those of "
        "them still in use (collateral); read from shards, or failed. The look-ups of the warm-up are counted too."
    ),
    "jgr_embedding_bytes": (
        "Bytes of rows that were sent to the device since they were missed, and of refreshed records, by table."
    ),
    "jgr_embedding_resident": "Rows of tables on the device, by table.",
    "jgr_border_pages": "Pages of the pool for rows: held, empty, wanted by the border, and the model's part in all.",
    "jgr_border_moves": "Moves of the border, and pages that changed sides.",
}


@dataclass(frozen=True)
class PagingCounts:
    """What is told of rows. tables: counts by table. held, wanted, total, empty: pages. moves: counts of the border."""

    tables: Mapping[str, Mapping[str, int]]
    held: int
    wanted: int
    total: int
    empty: int
    moves: Mapping[str, int]


class PagingCollector(Collector):
    """Exports the counts that `read` gives, when it is asked; None: rows are not in pages."""

    def __init__(self, read: Callable[[], PagingCounts | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        of = ["table"]
        rows = CounterMetricFamily("jgr_embedding_rows", TEXTS["jgr_embedding_rows"], labels=[*of, "event"])
        sent = CounterMetricFamily("jgr_embedding_bytes", TEXTS["jgr_embedding_bytes"], labels=of)
        there = GaugeMetricFamily("jgr_embedding_resident", TEXTS["jgr_embedding_resident"], labels=of)
        for name, table in counts.tables.items():
            for event in ROW_EVENTS:
                rows.add_metric([name, event], table.get(event, 0))
            sent.add_metric([name], table.get("bytes", 0))
            there.add_metric([name], table.get("resident", 0))
        pages = GaugeMetricFamily("jgr_border_pages", TEXTS["jgr_border_pages"], labels=["of"])
        for name in ("held", "wanted", "total", "empty"):
            pages.add_metric([name], getattr(counts, name))
        moves = CounterMetricFamily("jgr_border_moves", TEXTS["jgr_border_moves"], labels=["of"])
        for name in ("moves", "to_rows", "to_users"):
            moves.add_metric([name], counts.moves.get(name, 0))
        yield from (rows, sent, there, pages, moves)
